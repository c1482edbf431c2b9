"""A supervised run of two workers, one of which is killed, with trackers, sinks, reported numbers and log
records with rank and step: one writer, each step once, and the same bits as without any of them.
"""

from __future__ import annotations

import csv
import dataclasses
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.train import small_run
from torch import nn

import paceline
from paceline.core import events, journal
from paceline.monitor.trackers.measurements import TrackedRow
from paceline.monitor.trackers.tracker import OpenBackend, Tracker
from paceline.train.callbacks import RunInfo, SavedCheckpoint
from paceline.train.history import History

_FORMAT = logging.Formatter("%(rank)d %(step)d %(message)s")


def objective(model: nn.Module, batch: Any) -> Any:
    record = logging.getLogger("users.own").makeRecord("users.own", 20, "f", 1, "hello", (), None)
    rank, step, _ = _FORMAT.format(record).split()
    paceline.metrics.report("seen", float(step), {"rank_of_record": rank})
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


class Hanging(Tracker):
    """A tracker whose service does not answer until the test ends."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(every=1, flush_seconds=0.0)
        self.gate = gate

    def _plan(self, run: RunInfo) -> OpenBackend:
        return lambda: self

    def write(self, row: TrackedRow) -> None:
        assert self.gate.wait(60)

    def save(self, saved: SavedCheckpoint) -> None: ...

    def flush(self) -> None: ...

    def end(self, history: History | None) -> None: ...


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder, self.gate = folder, threading.Event()
        self.table = paceline.CsvLog()
        self.hanging = Hanging(self.gate)
        self.received: list[tuple[str, float, dict[str, str]]] = []
        sink = paceline.metrics.add_sink(lambda *report: self.received.append(report))
        broken = paceline.metrics.add_sink(lambda name, value: None)  # type: ignore[arg-type,misc]
        try:
            care = paceline.FaultTolerance(chaos="kill rank=1 step=7")
            config = small_run.settings(folder, fault_tolerance=care, log_every=5)
            self.history = small_run.fit(config, [self.table, self.hanging], objective=objective)
        finally:
            paceline.metrics.remove_sink(sink)
            paceline.metrics.remove_sink(broken)
        self.events = list(journal.iterate(folder / "journal.jsonl"))

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("tracked") / "run")
    yield run
    run.gate.set()


def test_the_bits_are_those_of_a_run_without(run, tmp_path):
    config = dataclasses.replace(
        small_run.settings(tmp_path / "plain", 1), fault_tolerance=small_run.UNATTENDED
    )
    assert small_run.fit(config).state_hash == run.history.state_hash
    assert run.of(events.FaultInjected)


def test_one_writer_and_each_step_once(run):
    with (run.folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [row for row in rows if row["loss"]]
    assert [int(row["step"]) for row in steps] == list(range(1, small_run.STEPS + 1))
    assert [float(row["loss"]) for row in steps] == [record.loss for record in run.history.steps]
    assert all(0.0 <= float(row["compute_efficiency"]) <= 1.0 for row in steps)
    # One row per step: the means over its steps are the step's own.
    for row, record in zip(steps, run.history.steps, strict=True):
        assert (float(row["comm_time"]), float(row["data_time"])) == (record.comm_time, record.data_time)
        assert float(row["grad_norm"]) == record.grad_norm  # measured because a tracker writes it
    assert sum(bool(row["validation/loss"]) for row in rows) == len(run.history.evaluations)


def test_a_tracker_that_hangs_costs_nothing_and_is_counted(run):
    assert run.hanging.dropped > small_run.STEPS  # rows of steps, evaluations, epochs, reports


def test_reported_numbers_are_in_the_journal_with_rank_and_step(run):
    reported = run.of(events.MetricReported)
    assert {one.rank for one in reported} == {0, 1}
    # `%(rank)d` and `%(step)d` of any logger are those of the worker and of the step that it computes.
    assert all(one.value == one.step for one in reported)
    assert all(one.tags == {"rank_of_record": str(one.rank)} for one in reported)
    assert {one.step for one in reported} >= set(range(1, small_run.STEPS + 1))


def test_sinks_of_the_caller_receive_what_workers_report(run):
    assert run.received == [(one.name, one.value, one.tags) for one in run.of(events.MetricReported)]


def test_where_the_time_of_each_step_went(run):
    steps = run.of(events.StepCommitted)
    for step in steps:
        assert step.comm_time >= 0.0
        assert step.data_time >= 0.0
        # Rounded to a microsecond each; what is left is the loop's own.
        assert (
            step.comm_time + step.data_time + step.compute_efficiency * step.seconds
            < step.seconds * 1.001 + 1e-4
        )
    assert 0.0 < run.history.communication_share < 1.0
    assert 0.0 < run.history.compute_efficiency < 1.0
    assert run.history.data_share < 1.0
    last = run.history.steps[-1]
    assert (last.comm_time, last.data_time) == (steps[-1].comm_time, steps[-1].data_time)


def test_the_journal_of_a_step_stays_small(run):
    lines = (run.folder / "journal.jsonl").read_bytes().splitlines()
    sizes = sorted(len(line) for line in lines if b'"step_committed"' in line)
    assert sizes[len(sizes) // 2] < 400


def test_trackers_of_a_session_have_the_norm_in_their_rows(tmp_path):
    """In those of both intervals, and in no step that neither writes."""
    model, inputs = nn.Linear(6, 3), small_run.data()
    config = small_run.settings(tmp_path / "run", 1, epochs=2)
    tables = [paceline.CsvLog(tmp_path / f"{every}.csv", every=every) for every in (4, 6)]
    with paceline.session(model, small_run.adam(model.parameters()), config, callbacks=tables) as run:
        for micro in run.microbatches(inputs):
            x, y = micro.data
            run.backward(nn.functional.cross_entropy(model(x), y))
    assert run.history is not None
    measured = [record.step for record in run.history.steps if record.grad_norm is not None]
    assert measured == [2, 4, 6, 8, 10]
    for every, expected in ((4, [4, 8, 10]), (6, [6, 10])):
        with (tmp_path / f"{every}.csv").open(newline="") as file:
            assert [int(row["step"]) for row in csv.DictReader(file) if row["grad_norm"]] == expected
