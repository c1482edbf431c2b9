"""EMA and SWA on any number of workers, in runs that are killed or resumed, and back at the caller."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train import small_run
from tests.train.running import job, mlp, regression, seeded, train
from torch import Tensor, nn
from torch.nn import Parameter

import paceline
from paceline.core.errors import ConfigError, UsageError
from paceline.train.callbacks import Modifier
from paceline.train.settings.train_config import CheckpointConfig, EarlyStopping, LossScaling
from paceline.train.step_info import StepInfo

DATA = regression(29)


class Follows(Modifier):
    """The weights after every update."""

    def __init__(self) -> None:
        self.seen: list[tuple[StepInfo, dict[str, Tensor]]] = []

    def after_update(self, parameters: Mapping[str, Parameter], step: StepInfo) -> None:
        self.seen.append((step, {name: p.detach().clone() for name, p in parameters.items()}))


def averaged(average: Any, workers: int = 1, **given: Any) -> dict[str, Tensor]:
    given = {"max_steps": 7, **given}
    made = [average() for _ in range(workers)]
    rest = iter(made)
    train(job(mlp(), DATA, **given), workers, callbacks=lambda: [next(rest)])
    weights: list[dict[str, Tensor]] = [one.weights for one in made]
    assert all(torch.equal(weights[0][n], one[n]) for one in weights for n in one)  # on every rank
    return weights[0]


def test_the_averages_are_those_of_the_weights_after_each_step() -> None:
    follows, ema = Follows(), paceline.EMA(0.8)
    swa = paceline.SWA(start_step=2, every=2)
    train(job(mlp(), DATA, max_steps=7, callbacks=[follows, ema, swa]))
    assert [step.step for step, _ in follows.seen] == list(range(7))
    assert {(step.steps_per_epoch, step.total_steps) for step, _ in follows.seen} == {(3, 7)}
    expected = {name: one.clone() for name, one in follows.seen[0][1].items()}
    for _, weights in follows.seen[1:]:
        expected = {name: 0.8 * one + 0.2 * weights[name] for name, one in expected.items()}
    for name, one in expected.items():
        assert torch.allclose(ema.weights[name], one, atol=1e-6)
        chosen = [follows.seen[number][1][name] for number in (3, 5)]
        assert torch.allclose(swa.weights[name], torch.stack(chosen).mean(0), atol=1e-6)
    assert (ema.count, swa.count) == (7, 2)


@pytest.mark.parametrize(
    "average",
    [lambda: paceline.EMA(0.9), lambda: paceline.SWA(start_epoch=1), lambda: paceline.SWA(start_step=3)],
)
def test_an_average_has_the_same_bits_on_any_number_of_workers_and_when_resumed(
    average: Any, tmp_path: Path
) -> None:
    expected = averaged(average)
    for workers in (2, 3, 4):
        found = averaged(average, workers)
        assert all(torch.equal(found[name], one) for name, one in expected.items())
    saved: dict[str, Any] = {"checkpoint": CheckpointConfig(every_steps=2), "run_dir": tmp_path / "run"}
    train(job(mlp(), DATA, max_steps=4, callbacks=[average()], **saved))
    found = averaged(average, 3, resume="auto", **saved)
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_swa_by_epochs_takes_the_weights_at_the_end_of_each() -> None:
    follows, swa = Follows(), paceline.SWA(start_epoch=1)
    train(job(mlp(), DATA, epochs=3, callbacks=[follows, swa]))
    ends = [follows.seen[number][1] for number in (5, 8)]
    assert swa.count == 2
    for name, one in swa.weights.items():
        assert torch.allclose(one, torch.stack([end[name] for end in ends]).mean(0), atol=1e-6)


def test_a_skipped_step_moves_no_average() -> None:
    follows = Follows()
    done = train(
        job(
            mlp(),
            DATA,
            max_steps=4,
            precision="fp16",
            loss_scaling=LossScaling(initial=2.0**40, growth_interval=100),
            callbacks=[follows],
        )
    )
    skipped = [record.step for record in done.history.steps if record.skipped]
    assert skipped
    assert [step.step + 1 for step, _ in follows.seen] == [n for n in range(1, 5) if n not in skipped]


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A bias ahead of the normalization would have rounding noise for a gradient, or none.
        first = nn.Linear(5, 8, bias=False)
        self.layers = nn.Sequential(first, nn.BatchNorm1d(8), nn.Linear(8, 2).to(torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        hidden = self.layers[1](self.layers[0](x))
        return self.layers[2](hidden.bfloat16()).float() * self.frozen


def test_buffers_and_frozen_parameters_are_the_models_own_and_dtypes_stay() -> None:
    ema = paceline.EMA(0.9)
    done = train(job(seeded(WithNorm), DATA, max_steps=4, callbacks=[ema], shards=2))
    own = dict(done.module.state_dict())
    assert ema.weights.keys() == own.keys()
    for name, one in own.items():
        same = torch.equal(ema.weights[name], one)
        assert same == (name == "frozen" or ".running_" in name or name.endswith("num_batches_tracked")), name
        assert ema.weights[name].dtype == one.dtype
    module = WithNorm()
    ema.load_into(module)
    assert torch.equal(module.state_dict()["layers.0.weight"], ema.weights["layers.0.weight"])


def test_an_evaluation_of_the_average_leaves_no_trace() -> None:
    seen: list[Tensor] = []

    def objective(model: nn.Module, batch: Any) -> Tensor:
        if not model.training:
            seen.append(next(model.parameters()).detach().clone())
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    given: dict[str, Any] = {"objective": objective, "validation": DATA, "epochs": 2, "shards": 2}
    ema = paceline.EMA(0.5, evaluate=True)
    with_average = train(job(mlp(), DATA, callbacks=[ema], **given))
    of_average = seen.copy()
    seen.clear()
    plain = train(job(mlp(), DATA, **given))
    assert with_average.hash == plain.hash
    assert with_average.losses == plain.losses
    assert torch.equal(of_average[-1], next(iter(ema.weights.values())))
    assert not torch.equal(of_average[-1], seen[-1])
    assert with_average.history.evaluations[-1].metrics != plain.history.evaluations[-1].metrics
    two = train(job(mlp(), DATA, **given), 2, callbacks=lambda: [paceline.EMA(0.5, evaluate=True)])
    assert [one.metrics for one in two.history.evaluations] == [
        one.metrics for one in with_average.history.evaluations
    ]


def test_the_weights_of_the_best_evaluation_are_those_that_were_evaluated() -> None:
    def objective(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        size = next(model.parameters()).detach().abs().sum()
        return nn.functional.mse_loss(model(batch[0]), batch[1]), {"size": size}

    given: dict[str, Any] = {"objective": objective, "validation": DATA, "epochs": 3, "shards": 2}
    # The size of the first layer grows: by one rule the last evaluation is the best, by the other the first.
    cases: tuple[tuple[Any, Any, int], ...] = ((max, "max", 9), (min, "min", 3))
    for choose, mode, step in cases:
        stopping = EarlyStopping(metric="size", patience=5, mode=mode)
        for workers in (1, 2):
            done = train(
                job(mlp(), DATA, early_stopping=stopping, **given),
                workers,
                callbacks=lambda: [paceline.EMA(0.5, evaluate=True)],
            )
            assert done.history.restored == step
            best = choose(one.metrics["size"] for one in done.history.evaluations)
            assert float(next(done.module.parameters()).detach().abs().sum()) == best
            assert paceline.state_hash(done.module) == done.hash


def test_two_averages_to_evaluate_with_are_refused() -> None:
    both = [paceline.EMA(evaluate=True), paceline.SWA(start_step=0, every=1, evaluate=True)]
    with pytest.raises(UsageError, match="EMA and SWA both give weights"):
        train(job(mlp(), DATA, validation=DATA, epochs=1, callbacks=both))
    with pytest.raises(UsageError, match="EMA and SWA both give weights"):
        paceline.Trainer(mlp(), nn.MSELoss(), optimizer=torch.optim.SGD, callbacks=both)


def test_a_second_run_with_the_same_object_begins_anew() -> None:
    ema = paceline.EMA(0.9)
    train(job(mlp(), DATA, max_steps=5, callbacks=[ema]))
    first = ema.weights
    train(job(mlp(), DATA, max_steps=5, callbacks=[ema]))
    assert ema.count == 5
    assert all(torch.equal(first[name], one) for name, one in ema.weights.items())


def test_what_cannot_be_averaged_is_said() -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        paceline.EMA(1.0)
    with pytest.raises(ConfigError, match="decay='high'"):
        paceline.EMA("high")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="one of the two"):
        paceline.SWA()
    with pytest.raises(ConfigError, match="one of the two"):
        paceline.SWA(start_step=1, start_epoch=1)
    settings: list[dict[str, Any]] = [{"start_step": -1}, {"start_epoch": -1}, {"start_step": 0, "every": 0}]
    settings += [{"start_step": "x"}, {"start_step": 1.5}, {"start_epoch": True}]
    for wrong in settings:
        with pytest.raises(ConfigError, match="counts from"):
            paceline.SWA(**wrong)
    with pytest.raises(UsageError, match="no average yet"):
        _ = paceline.EMA().weights
    ema = paceline.EMA()
    train(job(mlp(), DATA, max_steps=5, callbacks=[ema]))
    untouched = nn.Linear(2, 3)
    before = paceline.state_hash(untouched)
    with pytest.raises(UsageError, match=r"of another model than this Linear: .*weight.* differ"):
        ema.load_into(untouched)
    assert paceline.state_hash(untouched) == before
    swa = paceline.SWA(start_step=100)
    train(job(mlp(), DATA, max_steps=5, callbacks=[swa]))
    with pytest.raises(UsageError, match="ended before start_step=100"):
        _ = swa.weights
    with pytest.raises(UsageError, match="steps of an epoch are not known"):
        train(job(mlp(), iter_pairs, max_steps=5, callbacks=[paceline.SWA(start_epoch=0)]))


def iter_pairs() -> Any:
    return iter(list(zip(*DATA, strict=True)))


def test_a_killed_run_brings_the_average_back_to_the_caller(tmp_path: Path) -> None:
    def fit(folder: str, workers: int, **changes: Any) -> tuple[paceline.Trainer, paceline.EMA]:
        ema = paceline.EMA(0.9, evaluate=True)
        config = small_run.settings(tmp_path / folder, workers, epochs=2, **changes)
        trainer = small_run.trainer(config, [ema])
        trainer.fit(small_run.data(), small_run.data())
        return trainer, ema

    _, plain = fit("plain", 1, fault_tolerance=small_run.UNATTENDED)
    chaos = paceline.FaultTolerance(chaos="kill rank=1 step=5 phase=forward", backoff=0.01)
    trainer, killed = fit("killed", 2, fault_tolerance=chaos)
    assert all(torch.equal(killed.weights[name], one) for name, one in plain.weights.items())
    model = trainer.averaged_model
    assert torch.equal(model.state_dict()["0.weight"], killed.weights["0.weight"])
    assert isinstance(trainer.model, nn.Module)
    assert not torch.equal(model.state_dict()["0.weight"], trainer.model.state_dict()["0.weight"])
    without = small_run.trainer(small_run.settings(tmp_path / "none"))
    with pytest.raises(UsageError, match="0 averages"):
        _ = without.averaged_model


def test_a_session_averages_too(tmp_path: Path) -> None:
    ema, model = paceline.EMA(0.9), mlp()
    config = paceline.TrainConfig(
        max_steps=7, shards=6, global_batch=12, threads=1, progress=False, run_dir=str(tmp_path / "run")
    )
    with paceline.session(
        model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), config, callbacks=[ema]
    ) as run:
        for micro in run.microbatches(DATA):
            assert micro.info.total_steps == 7
            run.backward(nn.functional.mse_loss(model(micro.x), micro.y))
    expected = averaged(lambda: paceline.EMA(0.9))
    assert all(torch.equal(ema.weights[name], one) for name, one in expected.items())
