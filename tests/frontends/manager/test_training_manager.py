"""The manager's calls, one by one, in a process that trains alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.frontends.manager.manager_program import BATCH, SAMPLES, data, model
from torch import nn

import paceline
from paceline import CheckpointGranularity, DistributedTrainingManager, StepMetrics, TrainConfig, UsageError
from paceline.core.errors import ConfigError
from paceline.frontends import announcements

STEPS = SAMPLES // BATCH
ALONE = {"world_size": 1, "local_rank": 0, "batch_size": BATCH}


@contextmanager
def prepared(module: nn.Module, loss_fn: Any = None, **settings: Any) -> Iterator[DistributedTrainingManager]:
    with DistributedTrainingManager({**ALONE, **settings}) as manager:
        assert manager.init_environment() == 0
        assert manager.prepare_training(module, SAMPLES, loss_fn, _sgd) == 0
        yield manager


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def take(manager: DistributedTrainingManager, steps: int) -> list[StepMetrics]:
    """Take this number of further steps, over the data from its beginning to its end again and again."""
    inputs, targets = data()
    found = []
    for _ in range(steps):
        first = manager.next_step * BATCH % SAMPLES
        start, end = manager.get_local_batch(BATCH)
        batch = inputs[first + start : first + end], targets[first + start : first + end]
        found.append(manager.train_step(batch, manager.next_step))
    assert all(one.error_code == manager.SUCCESS for one in found)
    return found


def trained(steps: int = STEPS, **settings: Any) -> str:
    module = model()
    with prepared(module, **settings) as manager:
        take(manager, steps)
    return paceline.state_hash(module)


@pytest.fixture(autouse=True)
def _nothing_was_said() -> None:
    announcements.forget()


# steps


def test_the_bits_are_those_of_a_session() -> None:
    module = model()
    config = TrainConfig(global_batch=BATCH, shuffle=False, progress=False, run_dir=None)
    with paceline.session(module, _sgd(module.parameters()), config) as run:
        for micro in run.microbatches(torch.utils.data.TensorDataset(*data())):
            run.backward(nn.functional.cross_entropy(module(micro.x), micro.y))
    assert trained() == paceline.state_hash(module)


def test_metrics_of_classes() -> None:
    with prepared(model(), warmup_steps=4) as manager:
        metrics = take(manager, 5)
    assert [one.learning_rate for one in metrics] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    for one in metrics:
        assert one.failed_process_rank == -1
        assert one.accuracy is not None
        assert 0.0 <= one.accuracy <= 1.0
        assert one.accuracy * BATCH == pytest.approx(round(one.accuracy * BATCH), abs=1e-4)
        assert 0.0 <= one.comm_time < one.training_time
        assert 0.0 < one.compute_efficiency <= 1.0
    assert metrics[0].loss > 0.0


def test_metrics_of_other_targets() -> None:
    module = nn.Linear(8, 1)
    inputs, _ = data()
    with prepared(module) as manager:
        start, end = manager.get_local_batch(BATCH)
        metrics = manager.train_step((inputs[start:end], inputs[start:end, :1]), 0)
    assert metrics.accuracy is None
    assert metrics.learning_rate == 0.1


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_learning_rate_that_falls(schedule: str) -> None:
    with prepared(model(), schedule=schedule, warmup_steps=1, max_steps=4) as manager:
        rates = [one.learning_rate for one in take(manager, 4)]
    assert rates[0] == rates[1] == pytest.approx(0.1)
    assert 0.0 < rates[3] < rates[2] < rates[1]


def test_a_short_step_and_arrays_and_numbers_from_one() -> None:
    inputs, targets = (part.numpy() for part in data())
    with prepared(model()) as manager:
        assert manager.get_local_batch(8) == (0, 8)
        metrics = manager.train_step((inputs[:8], targets[:8]), 1)
        assert metrics.error_code == 0
        assert manager.next_step == 2


def test_a_step_of_more_than_a_batch_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    inputs, targets = data()
    with prepared(model()) as manager:
        for step in range(2):
            assert manager.get_local_batch(SAMPLES) == (0, SAMPLES)
            assert manager.train_step((inputs, targets), step).error_code == 0
    said = capsys.readouterr().err
    assert said.count(f"one step of {SAMPLES} samples, and batch_size={BATCH}") == 1


def test_an_objective_of_ones_own_and_adamw(capsys: pytest.CaptureFixture[str]) -> None:
    def objective(model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, float]]:
        return nn.functional.cross_entropy(model(batch[0]), batch[1]), {"accuracy": 0.5}

    with DistributedTrainingManager({**ALONE, "learning_rate": 0.25}) as manager:
        manager.init_environment()
        manager.prepare_training(model(), SAMPLES, loss_fn=objective)
        (metrics,) = take(manager, 1)
    assert metrics.accuracy == 0.5
    assert metrics.learning_rate == 0.25
    said = capsys.readouterr().err
    assert "AdamW with learning_rate 0.25" in said
    assert f"batch_size={BATCH} samples on this one process" in said


# activations that are computed again


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return data + torch.tanh(self.inner(data))


def _blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Dropout(0.1), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("granularity", "recomputed"),
    [(CheckpointGranularity.LAYER, 3), (CheckpointGranularity.BLOCK, 2), ("block", 2), ("Linear", 3)],
)
def test_gradient_checkpointing_keeps_the_bits(
    granularity: Any, recomputed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    linear = nn.functional.linear

    def counted(*given: Any) -> torch.Tensor:
        passes.append(1)
        return linear(*given)

    monkeypatch.setattr(nn.functional, "linear", counted)
    found = {}
    for used in (False, True):
        module = _blocks()
        passes.clear()
        settings = {"use_gradient_checkpointing": used, "checkpoint_granularity": granularity, "shards": 1}
        with prepared(module, **settings) as manager:
            take(manager, 1)
        found[used] = paceline.state_hash(module), len(passes)
    assert found[True][0] == found[False][0]
    assert (found[False][1], found[True][1]) == (3, 3 + recomputed)


def test_granularity_that_does_not_fit() -> None:
    settings = {"use_gradient_checkpointing": True, "checkpoint_granularity": CheckpointGranularity.BLOCK}
    with (
        pytest.raises(UsageError, match=r"granularity=BLOCK: no member .* no blocks"),
        prepared(model(), **settings),
    ):
        pass
    settings["checkpoint_granularity"] = "Attention"
    with (
        pytest.raises(UsageError, match=r"granularity='Attention': .* names Attention") as caught,
        prepared(model(), **settings),
    ):
        pass
    assert "Linear" in caught.value.remedy


# checkpoints


def test_save_and_load(tmp_path: Path) -> None:
    directory = {"checkpoint_dir": tmp_path / "kept"}
    with prepared(model(), **directory) as manager:
        take(manager, 2)
        assert manager.save_checkpoint(2) == 0
        assert manager.save_checkpoint(2) == 0
    module = model()
    with prepared(module, **directory) as manager:
        assert manager.load_checkpoint(2) == 0
        assert manager.next_step == 2
        take(manager, STEPS - 2)
    assert paceline.state_hash(module) == trained()
    # Twice the same state is one version.
    assert [path.name for path in sorted((tmp_path / "kept").glob("v*"))] == ["v00000001"]


def test_one_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    module = model()
    with prepared(module, checkpoint_dir=tmp_path / "kept") as manager:
        take(manager, 1)
        manager.save_checkpoint(7)
        take(manager, STEPS - 1)
        there = paceline.state_hash(module)
        assert manager.load_checkpoint(7) == 0
        take(manager, STEPS - 1)
    assert paceline.state_hash(module) == there == trained()


def test_save_interval(tmp_path: Path) -> None:
    with prepared(model(), checkpoint_dir=tmp_path / "kept", save_interval=2) as manager:
        take(manager, 3)
    with prepared(model(), checkpoint_dir=tmp_path / "kept") as manager:
        with pytest.raises(UsageError, match="there is no checkpoint 3") as caught:
            manager.load_checkpoint(3)
        assert caught.value.remedy == "there are 2"
        assert manager.load_checkpoint(2) == 0
    written = (tmp_path / "kept" / "config.toml").read_text()
    assert f"global_batch = {BATCH}" in written


def test_a_checkpoint_that_cannot_be_saved_unasked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with prepared(model(), checkpoint_dir=tmp_path / "kept", save_interval=1) as manager:
        (tmp_path / "kept" / "config.toml").unlink()
        (tmp_path / "kept").rmdir()
        (tmp_path / "kept").write_text("in the way")
        (metrics,) = take(manager, 1)
        assert metrics.error_code == 0
        assert "checkpoint 1 could not be saved" in caplog.text
        with pytest.raises(paceline.PacelineError):
            manager.save_checkpoint(1)


def test_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    with prepared(model(), checkpoint_dir=tmp_path / "kept") as manager:
        take(manager, 1)
        manager.save_checkpoint(1)
    with (
        prepared(model(), checkpoint_dir=tmp_path / "kept", seed=1) as manager,
        pytest.raises(ConfigError, match="seed: 0 -> 1"),
    ):
        manager.load_checkpoint(1)


# mistakes


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda one: one.prepare_training(model(), SAMPLES), "prepare_training before init_environment"),
        (lambda one: one.get_local_batch(8), "get_local_batch before init_environment"),
        (lambda one: one.train_step((), 0), "train_step before init_environment"),
        (lambda one: one.handle_failure(0), "handle_failure before init_environment"),
        (lambda one: one.save_checkpoint(0), "save_checkpoint before init_environment"),
        (lambda one: one.load_checkpoint(0), "load_checkpoint before init_environment"),
    ],
)
def test_calls_in_another_order(call: Callable[..., Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        call(DistributedTrainingManager(ALONE))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda one: one.init_environment(), "called twice"),
        (lambda one: one.get_local_batch(0), "total_samples=0"),
        (lambda one: one.get_local_batch("8"), "total_samples='8'"),
        (lambda one: one.train_step(data(), -1), "step=-1"),
        (lambda one: one.train_step(data(), 0), r"has 96 samples, .* dealt samples 0 to 24 .* 24 samples"),
        (lambda one: one.train_step((), 0), r"has no tensor with samples, .* dealt samples 0 to 24"),
        (lambda one: one.train_step((torch.tensor(1.0),), 0), "has -1 samples"),
        (lambda one: one.save_checkpoint(0), "there is no checkpoint_dir"),
        (lambda one: one.load_checkpoint(0), "there is no checkpoint_dir"),
        (lambda one: one.prepare_training("model", 1), "the model is a str"),
        (lambda one: one.prepare_training(model(), 0), "total_samples=0"),
        (lambda one: one.prepare_training(model(), SAMPLES), "prepared twice"),
    ],
)
def test_arguments_that_cannot_be(call: Callable[..., Any], match: str) -> None:
    with prepared(model()) as manager, pytest.raises(UsageError, match=match):
        call(manager)


def test_steps_out_of_order() -> None:
    inputs, targets = data()
    with prepared(model()) as manager:
        take(manager, 2)
        with pytest.raises(UsageError, match="step 5 was asked for, and the next step is 2"):
            manager.train_step((inputs[:BATCH], targets[:BATCH]), 5)


def test_samples_are_dealt_again_after_a_load(tmp_path: Path) -> None:
    inputs, targets = data()
    with prepared(model(), checkpoint_dir=tmp_path) as manager:
        take(manager, 1)
        manager.save_checkpoint(1)
        manager.load_checkpoint(1)
        with pytest.raises(UsageError, match="not dealt again"):
            manager.train_step((inputs[:BATCH], targets[:BATCH]), 1)


def test_nothing_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    with prepared(model()) as manager, caplog.at_level(logging.WARNING):
        assert manager.handle_failure(0) == 0
        assert "all processes live" in caplog.text
        take(manager, 1)


def test_the_model_stays_with_the_caller(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(ALONE))
    module = model()
    with DistributedTrainingManager(path) as manager:
        assert (manager.world_size, manager.rank, manager.next_step) == (1, 0, 0)
        manager.init_environment()
        manager.prepare_training(module, SAMPLES, nn.CrossEntropyLoss(), _sgd(module.parameters()))
        take(manager, STEPS)
    assert paceline.state_hash(module) == trained()
    assert not paceline.is_initialized()


def test_a_group_of_the_callers_own_stays() -> None:
    context = paceline.init_process_group(world_size=1, rank=0)
    try:
        assert trained() == trained()
        assert DistributedTrainingManager({}).world_size == 1
        with pytest.raises(UsageError, match="local_rank=1, and this process is rank 0 of a group of 1"):
            DistributedTrainingManager({"world_size": 2, "local_rank": 1}).init_environment()
        assert paceline.is_initialized()
        assert context.all_gather(1) == [1]
    finally:
        paceline.destroy_process_group()
