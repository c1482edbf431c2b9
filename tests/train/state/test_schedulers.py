"""Torch's schedulers in a run: the rates of a plain loop, the same bits on any number of ranks and from any
version, and what cannot work refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.running import hashes, job, mlp, regression, train
from torch.optim import lr_scheduler as torchs
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint.store import CheckpointStore
from paceline.core.errors import ConfigError, UsageError
from paceline.train.loop.worker_jobs import TrainJob
from paceline.train.settings.train_config import CheckpointConfig, LossScaling

DATA, HELD_OUT = regression(29), regression(12, seed=1)
EPOCHS, STEPS_OF_EPOCH = 4, 3
STEPS = EPOCHS * STEPS_OF_EPOCH


def sgd(parameters: Any) -> torch.optim.Optimizer:
    first, *rest = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": rest}], 0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.01)


def adam_with_tensor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, torch.tensor(0.01), foreach=False)


def sequential(optimizer: Any) -> LRScheduler:
    warm = torchs.LinearLR(optimizer, 0.2, total_iters=2)
    return torchs.SequentialLR(optimizer, [warm, torchs.CosineAnnealingLR(optimizer, 2)], [2])


class Halves(LRScheduler):
    """A scheduler of the user's, with a function, a counter and a set in it."""

    def __init__(self, optimizer: Any, factor: Callable[[int], float]) -> None:
        self.factor, self.turns, self.met = factor, 0, {"start"}
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.turns += 1
        return [rate * self.factor(self.turns) for rate in self.base_lrs]


Case = tuple[Callable[..., Any], Callable[..., Any], str]
CASES: dict[str, Case] = {
    "StepLR": (sgd, lambda o: torchs.StepLR(o, 2, 0.3), "epoch"),
    "StepLR by step": (sgd, lambda o: torchs.StepLR(o, 2, 0.3), "step"),
    "MultiStepLR": (sgd, lambda o: torchs.MultiStepLR(o, [1, 3], 0.5), "epoch"),
    "OneCycleLR": (sgd, lambda o, total_steps: torchs.OneCycleLR(o, [0.4, 0.3], total_steps), "step"),
    "OneCycleLR, betas": (adam, lambda o: torchs.OneCycleLR(o, 0.05, STEPS), "step"),
    "restarts": (sgd, lambda o: torchs.CosineAnnealingWarmRestarts(o, 2, 2), "step"),
    "sequential": (sgd, sequential, "epoch"),
    "sequential by step": (adam_with_tensor, sequential, "step"),
    "by group": (sgd, lambda o: torchs.LambdaLR(o, [lambda t: 0.9**t, lambda t: 1 / (1 + t)]), "epoch"),
    "cyclic": (sgd, lambda o: torchs.CyclicLR(o, 0.01, 0.1, 2, scale_fn=lambda x: 0.5), "step"),
    "chained": (
        sgd,
        lambda o: torchs.ChainedScheduler([torchs.ExponentialLR(o, 0.9), torchs.ConstantLR(o, 0.5, 2)]),
        "step",
    ),
    "two of one": (sgd, lambda o: [torchs.ExponentialLR(o, 0.9), torchs.StepLR(o, 3)], "step"),
    "own": (adam, lambda o: Halves(o, lambda turns: 0.5**turns), "epoch"),
}
PLATEAU: Case = (sgd, lambda o: torchs.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.2), "epoch")


def scheduled(case: Case, **given: Any) -> TrainJob:
    optimizer, scheduler, interval = case
    settings = {"epochs": EPOCHS, "scheduler_interval": interval, **given}
    made = job(mlp(), DATA, optimizer=optimizer, validation=HELD_OUT, **settings)
    return dataclasses.replace(made, scheduler=scheduler)


def plain_rates(case: Case) -> list[float]:
    """The learning rates of a loop without Paceline, step by step."""
    make, scheduler, interval = case
    optimizer = make(list(mlp().parameters()))
    asks = "total_steps" in scheduler.__code__.co_varnames
    made = scheduler(optimizer, total_steps=STEPS) if asks else scheduler(optimizer)
    several = made if isinstance(made, list) else [made]
    rates = []
    for step in range(STEPS):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if interval == "step" or step % STEPS_OF_EPOCH == STEPS_OF_EPOCH - 1:
            for one in several:
                one.step()
    return rates


@pytest.mark.parametrize("name", CASES)
def test_the_rates_are_those_of_a_plain_loop_and_the_bits_the_same_on_any_number_of_ranks(name: str) -> None:
    given = scheduled(CASES[name])
    ended = train(given)
    rates = [record.learning_rate for record in ended.history.steps]
    assert rates == plain_rates(CASES[name])
    assert len(set(rates)) > 1
    assert set(hashes(given, (2, 3, 4) if name.startswith("OneCycle") else (3,))) == {ended.hash}


@pytest.mark.parametrize(
    "name",
    [
        "MultiStepLR",
        "OneCycleLR, betas",
        "sequential by step",
        "by group",
        "own",
        "plateau",
        "plateau by step",
    ],
)
def test_a_run_continues_from_any_version_with_the_same_bits(tmp_path: Path, name: str) -> None:
    """From between the last step of an epoch and its end, from its end, and from the middle of another."""
    case, more = CASES.get(name, PLATEAU), {}
    if name == "plateau by step":
        case, more = (*PLATEAU[:2], "step"), {"evaluate_every": 3}
    run = tmp_path / "run"
    given = {
        "run_dir": run,
        "checkpoint": CheckpointConfig(every_steps=1, every_epochs=1, keep_last=50),
        **more,
    }
    expected = train(scheduled(case, **given))
    versions = CheckpointStore(run / "checkpoints").manifests()
    chosen = [versions[2], versions[3], versions[6]]
    assert [(one.info.step, one.info.epoch) for one in chosen] == [(3, 0), (3, 1), (6, 1)]
    for version, workers in zip(chosen, (2, 1, 1), strict=True):
        ended = train(scheduled(case, resume=version.version, **given), workers)
        assert ended.hash == expected.hash
        assert ended.losses[-6:] == expected.losses[-6:]


def test_a_plateau_follows_the_evaluations_of_the_run() -> None:
    ended = train(scheduled(PLATEAU))
    rates = [record.learning_rate for record in ended.history.steps[::STEPS_OF_EPOCH]]
    optimizer = sgd(list(mlp().parameters()))
    plateau, expected = PLATEAU[1](optimizer), []
    for evaluation in ended.history.evaluations:
        expected.append(optimizer.param_groups[0]["lr"])
        plateau.step(evaluation.metrics["loss"])
    assert rates == expected
    assert len(set(rates)) > 1
    assert set(hashes(scheduled(PLATEAU), (2, 3, 4))) == {ended.hash}
    # With evaluations between steps, those at the end of epochs are made for its sake.
    between = train(scheduled(PLATEAU, evaluate_every=2))
    assert between.hash == ended.hash
    assert {evaluation.step for evaluation in between.history.evaluations} >= {3, 6, 9, 12}


def test_a_plateau_by_step_is_stepped_with_each_evaluation() -> None:
    case = (*PLATEAU[:2], "step")
    ended = train(scheduled(case, evaluate_every=2))
    optimizer = sgd(list(mlp().parameters()))
    plateau, expected = PLATEAU[1](optimizer), []
    losses = {one.step: one.metrics["loss"] for one in ended.history.evaluations}
    for step in range(1, STEPS + 1):
        expected.append(optimizer.param_groups[0]["lr"])
        if step in losses:
            plateau.step(losses[step])
    assert [record.learning_rate for record in ended.history.steps] == expected
    assert len(set(expected)) > 1


def test_factors_of_the_settings_multiply_the_rates_of_the_scheduler() -> None:
    case = CASES["StepLR by step"]
    ended = train(scheduled(case, warmup_steps=4, schedule=lambda step: 0.5))
    factors = [0.5 * min(1.0, (step + 1) / 4) for step in range(STEPS)]
    rates = [record.learning_rate for record in ended.history.steps]
    assert rates == [rate * factor for rate, factor in zip(plain_rates(case), factors, strict=True)]
    tensor = train(scheduled(CASES["sequential by step"], schedule=lambda step: 0.5)).history.steps
    assert [one.learning_rate for one in tensor] == pytest.approx(
        [rate * 0.5 for rate in plain_rates(CASES["sequential by step"])], rel=1e-6
    )


def test_steps_that_change_no_weight_do_not_count_for_a_scheduler_by_step() -> None:
    """The first two overflow, here and on any number of ranks; epochs count in any case."""
    scaling = {"precision": "fp16", "loss_scaling": LossScaling(initial=2.0**40, backoff=2.0**-16)}
    by_step = scheduled(CASES["StepLR by step"], **scaling)
    ended = train(by_step)
    skipped = [record.skipped for record in ended.history.steps]
    assert skipped[0]
    assert not skipped[-1]
    expected = iter(plain_rates(CASES["StepLR by step"]))
    rates = [record.learning_rate for record in ended.history.steps if not record.skipped]
    assert rates == [rate for rate, _ in zip(expected, rates, strict=False)]
    assert set(hashes(by_step, (2, 4))) == {ended.hash}
    by_epoch = train(scheduled(CASES["StepLR"], **scaling)).history.steps
    assert [one.learning_rate for one in by_epoch] == plain_rates(CASES["StepLR"])


def test_several_optimizers() -> None:
    def two(parameters: Any) -> list[torch.optim.Optimizer]:
        first, *rest = parameters
        return [torch.optim.SGD([first], 0.1), torch.optim.Adam(rest, 0.01)]

    seen: list[int] = []

    def of_list(optimizers: Any) -> list[LRScheduler]:
        seen.append(len(optimizers))
        return [torchs.StepLR(optimizers[0], 1, 0.5), torchs.ExponentialLR(optimizers[1], 0.9)]

    by_list = [lambda o: torchs.StepLR(o, 1, 0.5), lambda o: torchs.ExponentialLR(o, 0.9)]
    as_function, as_list = scheduled((two, of_list, "epoch")), scheduled((two, of_list, "epoch"))
    as_list = dataclasses.replace(as_list, scheduler=by_list)
    assert train(as_function).hash == train(as_list).hash
    assert seen == [2]
    left = dataclasses.replace(as_list, scheduler=[by_list[0], None])
    assert train(left).hash != train(as_list).hash
    with pytest.raises(UsageError, match="1 scheduler function for 2 optimizers"):
        train(dataclasses.replace(as_list, scheduler=by_list[:1]))


def test_another_scheduler_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(scheduled(CASES["StepLR"], run_dir=run))
    other = scheduled(CASES["sequential"], run_dir=run, resume="auto", epochs=6)
    with pytest.raises(UsageError, match="written with StepLR, this run has SequentialLR"):
        train(other)
    with pytest.raises(UsageError, match="written with StepLR, this run has no scheduler"):
        train(dataclasses.replace(other, scheduler=None))
    with pytest.raises(ConfigError, match="scheduler_interval: epoch -> step"):
        train(scheduled((*CASES["StepLR"][:2], "step"), run_dir=run, resume="auto", epochs=6))


def test_another_learning_rate_than_the_checkpoints_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rates, and momenta of a cycle, change while the run lasts: only what the caller gave is compared."""
    for name in ("StepLR", "cyclic"):
        make, function, interval = CASES[name]
        given: dict[str, Any] = {"run_dir": tmp_path / name, "checkpoint": CheckpointConfig(every_steps=2)}
        train(scheduled((make, function, interval), max_steps=4, **given))
        caplog.clear()
        train(scheduled((make, function, interval), max_steps=5, resume="auto", **given))
        assert "the run continues with the settings" not in caplog.text

    def faster(parameters: Any) -> torch.optim.Optimizer:
        made = sgd(parameters)
        made.param_groups[1]["lr"] = 0.7
        return made

    whole = train(scheduled(CASES["StepLR"]))
    other = (faster, *CASES["StepLR"][1:])
    assert train(scheduled(other, run_dir=tmp_path / "StepLR", resume="auto")).hash == whole.hash
    assert "the run continues with the settings of SGD that it had: lr=" in caplog.text
    assert "(here 0.7)" in caplog.text


@pytest.mark.parametrize(
    ("function", "words", "remedy"),
    [
        (lambda o: None, "the scheduler function returned a NoneType|returned None", "StepLR"),
        (lambda o: 0.5, "the scheduler function returned a float", "TrainConfig"),
        (
            lambda o: torchs.StepLR(torch.optim.SGD([torch.zeros(1)], 0.1), 1),
            "StepLR is the scheduler of another optimizer",
            "the optimizer that the function is called with",
        ),
        (lambda o, batches: None, "asks for batches, which a run does not know", "total_steps"),
    ],
)
def test_functions_that_build_no_scheduler_of_the_run(
    function: Callable[..., Any], words: str, remedy: str
) -> None:
    with pytest.raises((UsageError, ConfigError), match=words) as refused:
        train(scheduled((sgd, function, "epoch")))
    assert remedy in refused.value.remedy


def test_a_plateau_without_evaluations_is_refused() -> None:
    with pytest.raises(ConfigError, match="follows the loss of evaluations, and there is no validation data"):
        train(dataclasses.replace(scheduled(PLATEAU), validation=None))
    with pytest.raises(ConfigError, match="evaluate_every is not set"):
        train(scheduled((*PLATEAU[:2], "step")))
    with pytest.raises(UsageError, match="scheduler_metric='f1', and the evaluation has loss"):
        train(scheduled(PLATEAU, scheduler_metric="f1"))


def test_a_scheduler_that_fails_leaves_no_version_of_half_an_epoch(tmp_path: Path) -> None:
    """One that has counted an epoch which did not end: the version before it counts."""

    def until(epoch: int) -> float:
        if epoch == 2:
            raise ValueError("no rate for epoch 2")
        return 1.0

    run = tmp_path / "run"
    case = (sgd, lambda o: torchs.LambdaLR(o, until), "epoch")
    with pytest.raises(UsageError, match="LambdaLR cannot be stepped after step 6: no rate for epoch 2"):
        train(scheduled(case, run_dir=run, checkpoint=CheckpointConfig(every_steps=2)))
    mended = scheduled(
        (sgd, lambda o: torchs.LambdaLR(o, lambda e: 1.0), "epoch"), run_dir=run, resume="auto"
    )
    plain = dataclasses.replace(scheduled(CASES["StepLR"]), scheduler=None)
    assert train(mended).hash == train(plain).hash


def test_a_cycle_that_is_too_short_says_what_it_can_ask_for() -> None:
    case = (sgd, lambda o: torchs.OneCycleLR(o, 0.1, 5), "step")
    with pytest.raises(UsageError, match="OneCycleLR cannot be stepped after step 6") as refused:
        train(scheduled(case))
    assert "lambda optimizer, total_steps" in refused.value.remedy
    assert "a run that is resumed keeps the scheduler that it began with" in refused.value.remedy


def test_an_error_without_a_text_is_named() -> None:
    """Torch's SequentialLR of a ChainedScheduler raises NotImplementedError()."""

    def nested(optimizer: Any) -> Any:
        chained = torchs.ChainedScheduler([torchs.ExponentialLR(optimizer, 0.9)])
        return torchs.SequentialLR(optimizer, [torchs.LinearLR(optimizer), chained], [1])

    with pytest.raises(
        UsageError, match="SequentialLR cannot be stepped after step 1: NotImplementedError\\n"
    ) as refused:
        train(scheduled((sgd, nested, "step")))
    assert "build it for" in refused.value.remedy


def test_numbers_of_a_length_that_is_not_known() -> None:
    stream = dataclasses.replace(scheduled(CASES["OneCycleLR"], epochs=None, max_steps=3), train=_Stream())
    assert len(train(stream).losses) == 3
    asks = dataclasses.replace(stream, scheduler=lambda o, steps_per_epoch: torchs.StepLR(o, steps_per_epoch))
    with pytest.raises(ConfigError, match="asks for steps_per_epoch, and that is not known"):
        train(asks)
    assert math.isfinite(train(stream).losses[-1])


class _Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(list(zip(*DATA, strict=True)))
