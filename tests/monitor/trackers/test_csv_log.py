"""The table of a run."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

import paceline
from paceline.train.callbacks import RunInfo
from paceline.train.history import Evaluation, StepRecord
from paceline.train.settings.train_config import TrainConfig


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(tracker: paceline.CsvLog, steps: range, first_step: int = 0, folder: Path | None = None) -> None:
    run_dir = None if folder is None else str(folder)
    tracker.on_start(RunInfo(config=TrainConfig(), workers=2, first_step=first_step, run_dir=run_dir))
    for step in steps:
        tracker.on_step(StepRecord(step=step, epoch=0, loss=0.1 * step, samples=8, seconds=0.25))
        if step == 2:
            tracker.on_evaluation(Evaluation(step=2, epoch=0, metrics={"loss": math.inf}))
    tracker.on_failure(None)
    assert (tracker.dropped, tracker.failed) == (0, 0)


def test_a_line_per_step_and_a_column_for_what_comes_later(tmp_path):
    run(paceline.CsvLog(), range(1, 4), folder=tmp_path)
    found = rows(tmp_path / "metrics.csv")
    assert [row["step"] for row in found] == ["1", "2", "2", "3"]
    assert [float(row["loss"]) for row in found if row["loss"]] == [0.1 * step for step in (1, 2, 3)]
    assert [row["validation/loss"] for row in found] == ["", "", "inf", ""]
    assert {row["samples_per_second"] for row in found} == {"32.0", ""}


def test_every_other_step(tmp_path):
    run(paceline.CsvLog(tmp_path / "new" / "table.csv", every=2), range(3, 8), first_step=2)
    assert [row["step"] for row in rows(tmp_path / "new" / "table.csv")] == ["4", "6", "7"]


def test_a_resumed_run_continues_the_table_after_its_checkpoint(tmp_path):
    path = tmp_path / "table.csv"
    run(paceline.CsvLog(path), range(1, 5))
    with path.open("a") as file:
        file.write("17.0,5,0.")  # of a process that was killed
    run(paceline.CsvLog(path), range(3, 6), first_step=2)
    assert [row["step"] for row in rows(path)] == ["1", "2", "2", "3", "4", "5"]
    assert all(None not in row.values() for row in rows(path))


def test_an_evaluation_that_is_done_again_has_one_row(tmp_path):
    path = tmp_path / "table.csv"
    run(paceline.CsvLog(path), range(1, 5))
    tracker = paceline.CsvLog(path)
    tracker.on_start(RunInfo(config=TrainConfig(), workers=2, first_step=2))
    tracker.on_evaluation(Evaluation(step=2, epoch=0, metrics={"loss": 3.0}))
    tracker.on_evaluation(Evaluation(step=2, epoch=0, metrics={"loss": 3.0, "f1": 0.5}))  # another one
    tracker.on_failure(None)
    assert [(row["step"], row["validation/loss"]) for row in rows(path)] == [
        ("1", ""),
        ("2", ""),
        ("2", "3.0"),
        ("2", "3.0"),
    ]


def test_a_run_that_begins_anew_has_a_table_of_its_own(tmp_path):
    path = tmp_path / "table.csv"
    run(paceline.CsvLog(path), range(1, 5))
    run(paceline.CsvLog(path), range(1, 2))
    assert [row["step"] for row in rows(path)] == ["1"]


@pytest.mark.parametrize("every", [0, -1])
def test_steps_are_counted_from_one(every):
    with pytest.raises(paceline.UsageError, match="every="):
        paceline.CsvLog(every=every)
