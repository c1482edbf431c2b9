"""Real event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import paceline
from paceline.core.events import MetricReported
from paceline.train.callbacks import RunInfo
from paceline.train.history import Evaluation, History, StepRecord
from paceline.train.settings.train_config import TrainConfig

pytest.importorskip("tensorboard")

Scalars = dict[str, list[tuple[int, float]]]


def scalars(folder: Path) -> Scalars:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        name: [(event.step, event.value) for event in reader.Scalars(name)]
        for name in reader.Tags()["scalars"]
    }


def record(step: int, **more: float) -> StepRecord:
    fields = {"loss": 1.0 / step, "seconds": 0.5, "learning_rate": 0.1, **more}
    return StepRecord(step=step, epoch=0, samples=32, **fields)  # type: ignore[arg-type]


def start(tracker: paceline.TensorBoard, folder: Path, first_step: int = 0) -> None:
    config = TrainConfig(log_every=4)
    tracker.on_start(RunInfo(config=config, workers=3, run_dir=str(folder), first_step=first_step))


def test_what_is_measured_is_in_the_file(tmp_path):
    tracker = paceline.TensorBoard(tmp_path / "logs", every=2)
    start(tracker, tmp_path)
    tracker.on_step(record(1))
    tracker.on_step(record(2, grad_norm=3.0, comm_time=0.1, data_time=0.05, compute_efficiency=0.7))
    tracker.on_evaluation(Evaluation(step=2, epoch=0, metrics={"loss": 0.25, "accuracy": 0.5}))
    tracker.on_metric(MetricReported(time=7.0, name="tokens", value=4.0, rank=1, step=2, tags={"split": "a"}))
    tracker.on_workers(2)
    tracker.on_step(record(3, loss=math.nan))
    tracker.on_end(History(total_time=2.0, state_hash="", steps=(record(1),), workers=2))
    assert (tracker.dropped, tracker.failed) == (0, 0)
    found = scalars(tmp_path / "logs")
    expected: Scalars = {
        "train/loss": [(2, 0.5), (3, math.nan)],
        "train/learning_rate": [(2, 0.1), (3, 0.1)],
        "train/grad_norm": [(2, 3.0)],
        "train/samples_per_second": [(2, 64.0), (3, 64.0)],
        "train/step_seconds": [(2, 0.5), (3, 0.5)],
        "train/comm_time": [(2, 0.1)],
        "train/data_time": [(2, 0.05)],
        "train/communication_share": [(2, 0.2)],
        "train/data_share": [(2, 0.1)],
        "train/compute_efficiency": [(2, 0.7)],
        "train/workers": [(2, 3.0), (3, 2.0)],
        "train/epoch": [(2, 0.0), (3, 0.0)],
        "validation/loss": [(2, 0.25)],
        "validation/accuracy": [(2, 0.5)],
        "tokens/rank_1/split_a": [(2, 4.0)],
        "run/total_time": [(3, 2.0)],
        "run/final_loss": [(3, 1.0)],
        "run/samples_per_second": [(3, 64.0)],
    }
    assert found.keys() == expected.keys()
    for name, points in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points]
        assert [v for _, v in found[name]] == pytest.approx([v for _, v in points], nan_ok=True)


def test_without_settings_the_runs_folder_and_its_interval(tmp_path):
    tracker = paceline.TensorBoard()
    start(tracker, tmp_path)
    for step in range(1, 10):
        tracker.on_step(record(step))
    tracker.on_failure(None)
    assert [step for step, _ in scalars(tmp_path / "tensorboard")["train/loss"]] == [4, 8, 9]


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path):
    for first in (0, 2):
        tracker = paceline.TensorBoard(tmp_path, every=1)
        start(tracker, tmp_path, first_step=first)
        for step in range(first + 1, 5):
            tracker.on_step(record(step, loss=float(first + step)))
        tracker.on_failure(None)
    assert scalars(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 5.0), (4, 6.0)]


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    tracker = paceline.TensorBoard(tmp_path / "file" / "logs", every=1)
    start(tracker, tmp_path)
    tracker.on_step(record(1))
    tracker.on_failure(None)
    assert tracker.failed == 3  # to open, the row, the end
    assert len(caplog.records) == 1
    assert "TensorBoard failed: NotADirectoryError" in caplog.text
