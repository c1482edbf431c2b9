"""`dry_run=True`: everything once, and nothing left of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.frontends.session_parts import X, Y, build, config
from tests.one_thread import one_thread as one_thread
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import paceline
from paceline.comm.context import DistributedContext
from paceline.core.errors import ConfigError
from paceline.frontends.dry_run import dry_settings
from paceline.frontends.spawn import spawn
from paceline.testing.process_engine import ProcessEngine
from paceline.train.callbacks import Modifier, Observer
from paceline.train.history import StepRecord


class Tells(Observer):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step(self, record: StepRecord) -> None:
        self.seen.append(record.step)


class Counts(Modifier):
    def __init__(self) -> None:
        self.steps = 0

    def stop(self, record: StepRecord) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]


def trainer(model: nn.Module, callbacks: Any = (), **given: Any) -> paceline.Trainer:
    return paceline.Trainer(
        model,
        nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.01),
        scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=1e9),
        config=config(**{"epochs": 9, "warmup_steps": 20, "dry_run": True, **given}),
        callbacks=callbacks,
    )


def test_everything_is_done_once_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.chdir(tmp_path)
    model, tells, counts = build(), Tells(), Counts()
    before = paceline.state_hash(model)
    url = str(tmp_path / "versions")
    history = trainer(
        model,
        [tells, counts],
        workers=2,
        run_dir=tmp_path / "run",
        checkpoint=paceline.CheckpointConfig(url=url, every_epochs=None),
    ).fit((X, Y), (X[:20], Y[:20]))
    # Two epochs of a step, each with its end: evaluation, scheduler, checkpoint; the settings stay the run's.
    assert [(one.step, one.epoch) for one in history.steps] == [(1, 0), (2, 1)]
    assert [(one.step, one.samples) for one in history.evaluations] == [(1, 12), (2, 12)]
    # Of a warmup of 20 steps; the scheduler takes a tenth after each epoch.
    assert [one.learning_rate for one in history.steps] == pytest.approx([0.01 / 20, 0.001 * 2 / 20])
    assert history.run_dir is None
    assert (paceline.state_hash(model), tells.seen, counts.steps) == (before, [], 0)
    assert os.listdir(place) == []
    assert os.listdir(tmp_path) == ["temporary"]


def test_traces_of_a_real_run_stay_and_none_are_written(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    trace = traces / "rank-0.step-2.pt.trace.json"
    trace.write_text("of a real run")
    trainer(build(), profile=str(traces)).fit((X, Y), (X[:20], Y[:20]))
    trainer(build()).fit((X, Y), (X[:20], Y[:20]), profile=traces)
    assert list(traces.iterdir()) == [trace]
    assert trace.read_text() == "of a real run"


def test_a_run_of_one_epoch_is_tried_for_one_step() -> None:
    history = trainer(build(), epochs=1, warmup_steps=1).fit((X, Y), (X[:20], Y[:20]))
    assert [len(history.steps), len(history.epochs), len(history.evaluations)] == [1, 1, 1]


def test_on_an_engine_whose_nodes_do_not_see_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url = paceline.CheckpointConfig(url="s3://bucket/run")
    given = config(dry_run=True, engine=ProcessEngine(nodes=2), checkpoint=url)
    settled = dry_settings(given)
    assert (settled.run_dir, settled.checkpoint.enabled) == (False, False)
    assert dry_settings(config(dry_run=True, checkpoint=url)).checkpoint.enabled
    history = trainer(build(), engine=given.engine, checkpoint=url).fit((X, Y), (X[:20], Y[:20]))
    assert (len(history.steps), history.workers) == (2, 2)
    assert os.listdir(tmp_path) == []


def in_a_job(context: DistributedContext, folder: str) -> list[Any]:
    tempfile.tempdir = folder
    model, counts = build(), Counts()
    before = paceline.state_hash(model)
    history = trainer(model, [counts]).fit((X, Y), (X[:20], Y[:20]))
    return [len(history.steps), paceline.state_hash(model) == before, counts.steps]


def test_in_a_job_the_callers_module_is_left_alone(tmp_path: Path) -> None:
    assert spawn(in_a_job, str(tmp_path), workers=2, threads=1) == [[2, True, 0]] * 2
    assert os.listdir(tmp_path) == []


def test_a_mistake_leaves_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    wrong = trainer(build(), fault_tolerance=paceline.FaultTolerance(enabled=False))
    with pytest.raises(Exception, match="size"):
        wrong.fit((X, Y[:, :1].repeat(1, 3)), (X, Y))
    assert os.listdir(tmp_path) == []
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = paceline.session(model, optimizer, config(dry_run=True))
    with pytest.raises(ConfigError, match="dry_run in a session"):
        session.__enter__()
