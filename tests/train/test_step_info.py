"""Step and epoch in an objective, a session and an evaluation: the same on any number of workers."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.running import job, mlp, no_checkpoints, regression, train
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.core.errors import UsageError
from paceline.train.objective import Objective
from paceline.train.settings.train_config import DynamicBatch, TrainConfig
from paceline.train.step_info import StepInfo, first_step_of

DATA = regression(29)
SEEN: list[tuple[bool, StepInfo]] = []


def annealed(model: nn.Module, batch: tuple[Tensor, Tensor], step: StepInfo) -> Tensor:
    """A loss whose weight depends on the step and on the epoch."""
    SEEN.append((model.training, step))
    inputs, target = batch
    assert step.total_steps is not None
    output: Tensor = model(inputs)
    part = step.step / step.total_steps
    return F.mse_loss(output, target) * (1.0 - 0.5 * part) + 0.01 * step.epoch * output.abs().mean()


def test_an_objective_that_depends_on_the_step_has_the_same_bits_anywhere() -> None:
    given = job(mlp(), DATA, objective=annealed, epochs=3)
    outcomes = [train(given, workers) for workers in (1, 2, 3, 4)]
    assert len({outcome.hash for outcome in outcomes}) == 1
    plain = train(job(mlp(), DATA, epochs=3))
    assert plain.hash != outcomes[0].hash


def test_training_and_evaluation_are_told_where_they_are() -> None:
    SEEN.clear()
    train(job(mlp(), DATA, objective=annealed, validation=DATA, epochs=2, shards=1, global_batch=10))
    places = {(training, info.step, info.epoch) for training, info in SEEN}
    steps = [(True, step, step // 3) for step in range(6)]
    # An evaluation is told how many updates its weights have had, and of which epoch the last one was.
    assert places == {*steps, (False, 3, 0), (False, 6, 1)}
    assert {(info.steps_per_epoch, info.total_steps, info.optimizer) for _, info in SEEN} == {(3, 6, None)}


def test_an_evaluation_after_the_last_epoch_is_of_its_last_step() -> None:
    SEEN.clear()
    given = job(mlp(), DATA, objective=annealed, validation=DATA, epochs=1, shards=1, evaluate_every=2)
    train(given)
    assert {(info.step, info.epoch) for training, info in SEEN if not training} == {(2, 0), (3, 0)}


def test_evaluate_after_fit_is_told_the_step_that_fit_reached(tmp_path: Path) -> None:
    def objective(model: nn.Module, batch: Any, step: StepInfo) -> tuple[Tensor, dict[str, float]]:
        return F.mse_loss(model(batch[0]), batch[1]), {"step": step.step, "epoch": step.epoch}

    config = TrainConfig(
        global_batch=10,
        epochs=2,
        threads=1,
        progress=False,
        run_dir=str(tmp_path / "run"),
        checkpoint=no_checkpoints(),
        fault_tolerance=paceline.FaultTolerance(enabled=False),
    )
    trainer = paceline.Trainer(mlp(), objective, optimizer=lambda p: torch.optim.SGD(p, 0.1), config=config)
    assert trainer.evaluate(DATA)["step"] == 0
    last = trainer.fit(DATA, DATA).evaluations[-1].metrics
    assert trainer.evaluate(DATA) == last
    assert (last["step"], last["epoch"]) == (6, 1)


def test_lengths_that_cannot_be_known_are_none() -> None:
    config = TrainConfig(global_batch=10, epochs=2)
    assert first_step_of(config, 29) == StepInfo(steps_per_epoch=3, total_steps=6)
    assert first_step_of(config, None) == StepInfo()
    dynamic = TrainConfig(dynamic_batch=DynamicBatch(8, 32), shards=2, max_steps=5)
    assert first_step_of(dynamic, 29) == StepInfo(total_steps=5)


@pytest.mark.parametrize(
    ("objective", "arguments"),
    [
        (lambda model, batch: (model, batch), 2),
        (lambda model, batch, step: step, 3),
        (lambda model, batch, temperature=0.5: temperature, 2),
        (lambda model, batch, step=None: step, 3),
        (lambda model, batch, *, temperature=0.5: temperature, 2),
        (lambda *arguments: arguments, 2),
        (partial(lambda model, batch, step, temperature: step, temperature=0.5), 3),
        (partial(lambda first, model, batch, step: step, 1), 3),
    ],
)
def test_a_third_parameter_is_the_step_unless_it_has_a_default_and_another_name(
    objective: Any, arguments: int
) -> None:
    calls: list[int] = []

    class Counts:
        __signature__ = inspect.signature(objective)

        def __call__(self, *given: Any) -> Tensor:
            calls.append(len(given))
            return torch.zeros(1)

    Objective(Counts()).score(nn.Identity(), (1, 2), StepInfo())
    assert calls == [arguments]


def test_too_many_parameters_are_refused_with_both_forms() -> None:
    with pytest.raises(UsageError, match="cannot be called with") as caught:
        Objective(lambda model, batch, step, more: step)
    assert "(model, batch, step)" in caught.value.remedy
