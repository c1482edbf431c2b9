"""What a Tune trial is told of a run, and when: real runs, with lists in place of Ray's reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.frontends.ray_trainer import tune_report
from paceline.frontends.ray_trainer.tune_report import TuneReport

Reports = list[tuple[int, bool]]


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reports:
    """Every report as its epoch and whether it had a checkpoint."""
    found: Reports = []
    monkeypatch.setattr(tune_report, "current_trial", lambda: tmp_path)
    monkeypatch.setattr(
        tune_report, "_report", lambda metrics, folder: found.append((metrics["epoch"], folder is not None))
    )
    return found


def train(tmp_path: Path, report: TuneReport, **settings: Any) -> paceline.History:
    """Train up to three epochs of four steps."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(16, 2), torch.randn(16, 1))
    chosen = {"global_batch": 4, "epochs": 3, "progress": False, "resume": "auto", **settings}
    trainer = paceline.Trainer(
        nn.Linear(2, 1),
        nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01),
        config=paceline.TrainConfig(run_dir=str(tmp_path / "run"), **chosen),
        callbacks=[report],
    )
    return trainer.fit(data)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [(0, False), (1, False), (2, True)]),
        ({"max_steps": 8}, [(0, False), (1, True)]),  # the end of an epoch that is not the last
        ({"max_steps": 6}, [(0, False), (1, True)]),  # inside of one
    ],
)
def test_the_last_epoch_is_reported_once_with_the_checkpoint(
    tmp_path: Path, reports: Reports, settings: dict[str, Any], expected: Reports
) -> None:
    report = TuneReport(holds_last=True)
    train(tmp_path, report, **settings)
    assert reports == expected[:-1]
    report.finish(tmp_path)
    assert reports == expected


def test_a_trial_that_starts_again_after_its_last_epoch_reports_that(
    tmp_path: Path, reports: Reports
) -> None:
    train(tmp_path, TuneReport(holds_last=True))
    reports.clear()
    again = TuneReport(holds_last=True)
    assert len(train(tmp_path, again).epochs) == 3
    again.finish(tmp_path)
    assert reports == [(2, True)]


def test_without_a_checkpoint_to_come_every_epoch_is_reported_at_its_end(
    tmp_path: Path, reports: Reports
) -> None:
    train(tmp_path, TuneReport())
    assert reports == [(0, False), (1, False), (2, False)]
