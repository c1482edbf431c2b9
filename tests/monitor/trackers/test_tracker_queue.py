"""The queue between a run and its tracker: order, bounds, failures, and a tracker that hangs."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import nullcontext
from functools import partial

import pytest
from tests.virtual_clock import VirtualClock
from tests.waiting import wait_for

from paceline.core import log
from paceline.monitor.trackers.measurements import TrackedRow
from paceline.monitor.trackers.tracker import OpenBackend, Tracker, TrackerBackend
from paceline.monitor.trackers.tracker_queue import TrackerQueue
from paceline.train.callbacks import RunInfo, SavedCheckpoint
from paceline.train.history import History, StepRecord
from paceline.train.settings.train_config import TrainConfig


class Gate:
    """Work that waits until it may go on; always opened at the end of a test."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.opened.set()
    for thread in threading.enumerate():
        if thread.name.startswith("paceline-"):
            thread.join(60)


def test_work_is_done_in_order_and_flushed_before_the_end():
    done: list[object] = []
    queue = TrackerQueue("Test", lambda: done.append("flush"))
    for number in range(100):
        queue.put(partial(done.append, number))
    assert queue.close(60)
    assert [one for one in done if one != "flush"] == list(range(100))
    assert done[-1] == "flush"
    assert (queue.dropped, queue.failed) == (0, 0)


def test_a_full_queue_drops_counts_and_says_so_once(gate, caplog):
    done: list[int] = []
    queue = TrackerQueue("Test", capacity=3)
    queue.put(gate)
    assert gate.reached.wait(60)
    for number in range(10):
        queue.put(partial(done.append, number))
    assert queue.dropped == 7
    gate.opened.set()
    assert queue.close(60)
    assert done == [0, 1, 2]
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "Test is too slow: 3 records wait for it, and what comes now is dropped; training goes on",
        "Test: 7 records of this run did not reach it",
    ]


def test_the_last_work_finds_room_in_a_full_queue(gate):
    done: list[str] = []
    queue = TrackerQueue("Test", capacity=1)
    queue.put(gate)
    assert gate.reached.wait(60)
    for name in ("a", "b"):
        queue.put(partial(done.append, name))
    queue.put(lambda: done.append("end"), however_full=True)
    gate.opened.set()
    assert queue.close(60)
    assert done == ["a", "end"]


def test_work_that_raises_is_counted_and_said_once(caplog):
    done: list[int] = []

    def fails() -> None:
        raise ConnectionError("refused\nat port 5000")

    queue = TrackerQueue("Test")
    for number in range(3):
        queue.put(fails)
        queue.put(partial(done.append, number))
    assert queue.close(60)
    assert done == [0, 1, 2]
    assert queue.failed == 3
    assert [record.getMessage() for record in caplog.records] == [
        "Test failed: ConnectionError: refused; training goes on, and further failures are only counted"
    ]


def test_one_that_hung_for_long_is_abandoned_at_once(gate, caplog):
    clock, done = VirtualClock(0.0), list[int]()
    queue = TrackerQueue("Test", clock=clock)
    queue.put(gate)
    assert gate.reached.wait(60)
    queue.put(lambda: done.append(1))
    clock.advance(1000.0)
    assert not queue.close(999.0)  # would be waited for really, were it not for the time that has passed
    assert not queue.close(999.0)
    assert queue.dropped == 2
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "Test does not answer and is abandoned: 2 records of this run did not reach it"
    ]
    gate.opened.set()
    wait_for(lambda: all(thread.name != "paceline-Test" for thread in threading.enumerate()), seconds=60)
    assert done == []


@pytest.mark.parametrize("rank", [None, 0])
def test_the_thread_gives_way_to_the_workers_and_not_in_a_rank(rank):
    found: list[int] = []
    with log.labelled(rank, lambda: 1) if rank is not None else nullcontext():
        queue = TrackerQueue("Test")
        own = os.getpriority(os.PRIO_PROCESS, 0)
        queue.put(lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
        assert queue.close(60)
    assert found == [own if rank is not None else max(own, 10)]


def test_what_comes_after_the_end_is_dropped():
    queue = TrackerQueue("Test")
    assert queue.close(60)
    queue.put(lambda: pytest.fail("done after the end"))
    assert queue.dropped == 1


class Slow(Tracker):
    """Opens its backend behind a gate, in the first run only."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(every=1, flush_seconds=0.0)
        self.gates = [gate]
        self.written: list[tuple[str, int]] = []

    def _plan(self, run: RunInfo) -> OpenBackend:
        name, gates = run.device, [self.gates.pop()] if self.gates else []

        def opening() -> TrackerBackend:
            for gate in gates:
                gate()
            return Named(name, self.written)

        return opening


class Named:
    def __init__(self, name: str, written: list[tuple[str, int]]) -> None:
        self.name, self.written = name, written

    def write(self, row: TrackedRow) -> None:
        self.written.append((self.name, row.step))

    def save(self, saved: SavedCheckpoint) -> None: ...

    def flush(self) -> None: ...

    def end(self, history: History | None) -> None: ...


def test_an_abandoned_backend_that_comes_back_does_not_get_the_rows_of_the_next_run(gate):
    tracker = Slow(gate)
    tracker.on_start(RunInfo(config=TrainConfig(), workers=1, device="first"))
    assert gate.reached.wait(60)
    tracker.on_step(StepRecord(step=1, epoch=0, loss=1.0, samples=1))
    tracker.on_failure(None)
    assert tracker.dropped == 3  # to open, the row, the end
    tracker.flush_seconds = 60.0
    tracker.on_start(RunInfo(config=TrainConfig(), workers=1, device="second"))
    gate.opened.set()
    wait_for(lambda: sum(thread.name == "paceline-Slow" for thread in threading.enumerate()) == 1)
    tracker.on_step(StepRecord(step=7, epoch=0, loss=1.0, samples=1))
    tracker.on_failure(None)
    tracker.on_failure(None)  # a run that could not be saved after its end: told once
    assert tracker.written == [("second", 7)]
    assert (tracker.dropped, tracker.failed) == (0, 0)
