"""`unfreeze`: parameters that begin to learn at a step, on any number of ranks and from any version."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.running import hashes, job, mlp, regression, seeded, train
from torch import nn

from paceline.checkpoint.store import CheckpointStore
from paceline.core.errors import ConfigError, UsageError
from paceline.train.callbacks import Modifier
from paceline.train.history import StepRecord
from paceline.train.settings.conflicts import check
from paceline.train.settings.train_config import CheckpointConfig, GradientCompression, TrainConfig
from paceline.train.step.unfreezing import Unfreezing

DATA = regression(29)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Decay would move weights that only have a gradient of zeros."""
    return torch.optim.AdamW(parameters, 0.01, weight_decay=0.5)


def unfrozen(**given: Any) -> Any:
    return job(mlp(), DATA, **{"optimizer": adamw, "epochs": 4, "unfreeze": {"0.": 5}, **given})


class Weights(Modifier):
    """Keeps the weights of the first layer, and what asks for a gradient, after each step."""

    def __init__(self, module: Any) -> None:
        self.module, self.seen = module, [module[0].weight.clone()]
        self.flags: list[list[bool]] = []

    def stop(self, record: StepRecord) -> None:
        self.seen.append(self.module[0].weight.detach().clone())
        self.flags.append([parameter.requires_grad for parameter in self.module.parameters()])


@pytest.mark.parametrize("frozen_by_the_caller", [False, True])
def test_weights_wait_for_their_step_without_decay_or_moments(frozen_by_the_caller: bool) -> None:
    module: Any = mlp()
    module[0].requires_grad_(not frozen_by_the_caller)
    watch = Weights(module)
    given = job(
        lambda: module, DATA, optimizer=adamw, epochs=4, shards=4, unfreeze={"0.": 5}, callbacks=[watch]
    )
    train(given)
    still = [bool(torch.equal(a, b)) for a, b in zip(watch.seen, watch.seen[1:], strict=False)]
    assert still == [True] * 5 + [False] * 7
    assert watch.flags == [[False, False, True, True]] * 5 + [[True] * 4] * 7
    # As it was given.
    assert [p.requires_grad for p in module.parameters()] == [not frozen_by_the_caller] * 2 + [True] * 2


def test_it_is_two_runs_of_a_plain_loop_one_after_the_other() -> None:
    """One shard on one worker is a plain loop: five steps with a frozen layer, then with all of them."""
    ended = train(unfrozen(shards=1, shuffle=False, global_batch=29, epochs=12))
    module: Any = mlp()
    optimizer = adamw(module.parameters())
    module[0].requires_grad_(False)
    for step in range(12):
        if step == 5:
            module[0].requires_grad_(True)
        optimizer.zero_grad()
        nn.functional.mse_loss(module(DATA[0]), DATA[1]).backward()
        optimizer.step()
    trained = dict(ended.module.named_parameters())
    assert all(torch.equal(one, trained[name]) for name, one in module.named_parameters())


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"compression": GradientCompression(kind="int8")},
        {"clip_norm": 0.3, "unfreeze": {"0.": 5, "0.b": 8}},
    ],
)
def test_the_same_bits_on_any_number_of_ranks(more: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = hashes(unfrozen(**more), (1, 2, 3, 4))
    assert len(set(found)) == 1
    assert found[0] != train(unfrozen(**{**more, "unfreeze": {}})).hash
    # What waits for its step is no parameter that was forgotten.
    assert "gave no gradient to" not in caplog.text


def test_from_before_at_and_after_the_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    keeping = CheckpointConfig(every_steps=1, keep_last=100)
    expected = train(unfrozen(run_dir=run, checkpoint=keeping)).hash
    versions = {one.info.step: one.version for one in CheckpointStore(run / "checkpoints").manifests()}
    for step in (4, 5, 7):
        again = unfrozen(run_dir=run, checkpoint=keeping, resume=versions[step])
        assert train(again, 2).hash == expected
    with pytest.raises(ConfigError, match=r"unfreeze: \{'0\.': 5\} -> \{'0\.': 6\}"):
        train(unfrozen(run_dir=run, resume="auto", unfreeze={"0.": 6}, epochs=5))
    with pytest.raises(ConfigError, match=r"unfreeze: \{'0\.': 5\} -> \{\}"):
        train(unfrozen(run_dir=run, resume="auto", unfreeze={}, epochs=5))


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match=r"unfreeze names 'backbone\.', and no parameter") as refused:
        train(unfrozen(unfreeze={"backbone.": 3}))
    assert "0.weight" in refused.value.remedy
    with pytest.raises(UsageError, match="leaves no parameter of the model that learns in the first step"):
        train(unfrozen(unfreeze={"0": 3, "2": 4}))
    with pytest.raises(ConfigError, match=r"12 steps .*the run would end before these parameters learn"):
        check(unfrozen(unfreeze={"0.": 12}).config, samples=29)
    for bad in ({"": 3}, {"0.": 0}, {"0.": -1}):
        with pytest.raises(ConfigError, match="waits 1 step or more"):
            TrainConfig(unfreeze=bad)

    def head(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for name, one in parameters.named.items() if name[0] == "2"], 0.1)

    with pytest.raises(UsageError, match=r"no optimizer holds 0\.weight, 0\.bias"):
        train(unfrozen(optimizer=head))


def test_other_code_still_must_not_change_it() -> None:
    module: Any = mlp()

    class Thaws(Modifier):
        def stop(self, record: StepRecord) -> None:
            if record.step == 2:
                module[0].requires_grad_(True)

    given = job(lambda: module, DATA, epochs=4, shards=4, unfreeze={"0.": 5}, callbacks=[Thaws()])
    with pytest.raises(
        UsageError, match=r"requires_grad of 0\.weight, 0\.bias changed during the run, before step 3"
    ):
        train(given)


def test_a_longer_name_counts_and_numbers_that_cannot_learn_are_left_out() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = seeded(lambda: nn.Linear(2, 2))
            self.head = nn.Linear(2, 2)
            self.table = nn.Parameter(torch.arange(3), requires_grad=False)

    module = Odd()
    plan = Unfreezing(module, {"body.weight": 7, "body": 3})
    learns = {}
    for step in range(9):
        plan.turn_to(step)
        learns[step] = [
            name for name, one in module.named_parameters() if one.requires_grad and "body" in name
        ]
    assert learns[2] == []
    assert learns[3] == ["body.bias"]
    assert learns[7] == ["body.weight", "body.bias"]
    plan.close()
    assert copy.deepcopy(module).table.requires_grad is False
