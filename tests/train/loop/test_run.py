"""What must not change under a run while it goes on, and what its versions and its end are said to be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.running import job, mlp, regression, train
from torch import Tensor, nn

from paceline.checkpoint.store import CheckpointStore
from paceline.core.errors import UsageError
from paceline.train.callbacks import Modifier
from paceline.train.history import StepRecord
from paceline.train.settings.train_config import CheckpointConfig

DATA = regression(29)


def test_versions_carry_only_what_was_measured_at_their_step(tmp_path: Path) -> None:
    given = job(
        mlp(),
        DATA,
        validation=DATA,
        epochs=2,
        run_dir=tmp_path / "run",
        checkpoint=CheckpointConfig(every_steps=1, every_epochs=1, keep_last=50),
    )
    history = train(given).history
    measured = {evaluation.step: evaluation.metrics for evaluation in history.evaluations}
    losses = {record.step: record.loss for record in history.steps}
    kept = CheckpointStore(str(tmp_path / "run" / "checkpoints")).manifests()
    assert {manifest.info.step for manifest in kept} == set(range(1, 7))
    for manifest in kept:
        step, metrics = manifest.info.step, dict(manifest.info.metrics)
        assert metrics in (measured.get(step), {"train_loss": losses[step]})
    # The newest of a step that was evaluated carries the evaluation.
    newest = {manifest.info.step: dict(manifest.info.metrics) for manifest in kept}
    assert newest[3] == measured[3]
    assert newest[6] == measured[6]


class Does(Modifier):
    """Does something to the outside after a step."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def stop(self, record: StepRecord) -> str | None:
        if record.step == 1:
            self.action()
        return None


@pytest.mark.parametrize("shards", [1, 6])
def test_parameters_that_are_frozen_or_thawed_in_a_run(shards: int) -> None:
    model: Any = mlp()
    model[0].requires_grad_(False)

    def thaw() -> None:
        model[0].requires_grad_(True)
        model[2].weight.requires_grad_(False)

    given = job(lambda: model, DATA, epochs=1, shards=shards, callbacks=[Does(thaw)])
    with pytest.raises(UsageError, match=r"requires_grad of 0\.weight, 0\.bias, 2\.weight changed during"):
        train(given)


def test_groups_that_are_added_in_a_run() -> None:
    made: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, 0.1))
        return made[0]

    add = Does(lambda: made[0].add_param_group({"params": [nn.Parameter(torch.zeros(2))]}))
    with pytest.raises(UsageError, match="the parameter groups of SGD changed during the run"):
        train(job(mlp(), DATA, optimizer=optimizer, epochs=1, callbacks=[add]))


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("when", ["a scheduler after a step", "a modifier"])
def test_learning_rates_that_other_code_changes(as_tensor: bool, when: str) -> None:
    made: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.Adam(parameters, torch.tensor(0.1) if as_tensor else 0.1, foreach=False))
        return made[0]

    def scheduler() -> None:
        torch.optim.lr_scheduler.LambdaLR(made[0], lambda step: 0.5)

    class Sets(Modifier):
        def change_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
            rate = made[0].param_groups[0]["lr"]
            made[0].param_groups[0]["lr"] = rate * 0.5

    modifier = Sets() if when == "a modifier" else Does(scheduler)
    with pytest.raises(
        UsageError, match=r"group 0 of Adam is 0\.05, and that is not what the run's schedule"
    ) as e:
        train(job(mlp(), DATA, optimizer=optimizer, epochs=1, callbacks=[modifier]))
    assert "TrainConfig(schedule=...)" in e.value.remedy


class Counts(Modifier):
    def __init__(self, own: int = 0) -> None:
        self.turns, self.own = 0, own

    def change_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.turns += 1 + self.own

    def state_dict(self) -> dict[str, Any]:
        return {"turns": self.turns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turns = state["turns"]


class CountsBatches(Counts):
    def change_batch(self, batch: Any) -> Any:
        self.turns += 1
        return batch


@pytest.mark.parametrize("saving", [False, True])
def test_modifiers_that_differ_between_ranks_are_named(saving: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint": CheckpointConfig(every_steps=1)} if saving else {}
    given = job(mlp(), DATA, epochs=1, run_dir=tmp_path / "run" if saving else None, **settings)
    made = iter(range(100))
    assert train(given, 2, lambda: [Counts()]).history.steps
    if saving:
        given = job(mlp(), DATA, epochs=1, run_dir=tmp_path / "again", **settings)
    with pytest.raises(UsageError, match="the modifier Counts has another state on rank 1") as caught:
        train(given, 2, lambda: [Counts(next(made))])
    assert f"after step {1 if saving else 3}" in str(caught.value)


@pytest.mark.parametrize("workers", [1, 2])
def test_state_that_changes_with_the_batches_of_a_worker_is_refused(workers: int) -> None:
    with pytest.raises(UsageError, match="the state of the modifier CountsBatches changed in change_batch"):
        train(job(mlp(), DATA, epochs=1), workers, lambda: [CountsBatches()])


class Growing(nn.Module):
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 2)
        self.register_buffer("cache", torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        self.cache = torch.zeros(self.cache.numel() + 1)
        return self.linear(x)


@pytest.mark.parametrize("shards", [1, 6])
def test_a_buffer_that_grows(shards: int) -> None:
    with pytest.raises(UsageError, match=r"the buffer cache \(had 1 element, has 2\) changed its size"):
        train(job(Growing(), DATA, epochs=1, shards=shards))


def test_modules_that_do_not_know_their_sizes() -> None:
    with pytest.raises(UsageError, match=r"0\.weight, 0\.bias of the model Sequential have no size yet"):
        train(job(lambda: nn.Sequential(nn.LazyLinear(2)), DATA))


def test_no_optimizer() -> None:
    given = job(mlp(), DATA)
    object.__setattr__(given, "optimizer", None)
    with pytest.raises(UsageError, match="the optimizer is a NoneType"):
        train(given)
