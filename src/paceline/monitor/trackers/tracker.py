"""Trackers as observers: what all of them share.

A `Tracker` is called by the run and only puts rows into its queue; its `TrackerBackend` writes them, in the
queue's thread. There is one writer however many workers there are, because observers are called in one
process: the caller's under a supervisor, else the first rank's.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib.util
import math
import time
from collections.abc import Callable
from typing import Any, Protocol, final

from paceline.core.errors import UnavailableError, UsageError
from paceline.core.events import MetricReported
from paceline.monitor.trackers import measurements
from paceline.monitor.trackers.gpu_readings import GpuReadings
from paceline.monitor.trackers.measurements import StepWindow, TrackedRow
from paceline.monitor.trackers.tracker_queue import TrackerQueue
from paceline.train.callbacks import Observer, RunInfo, SavedCheckpoint
from paceline.train.history import EpochRecord, Evaluation, History, StepRecord
from paceline.train.settings.train_config import TrainConfig


class TrackerBackend(Protocol):
    """Writes to one place, called in the tracker's thread only. What it raises is counted, and said once."""

    def write(self, row: TrackedRow) -> None:
        """Write a row; it may be kept until `flush`."""

    def save(self, saved: SavedCheckpoint) -> None:
        """Keep a checkpoint that has become durable, where the place keeps files."""

    def flush(self) -> None:
        """Make visible what was written; called about once a second while there is something new."""

    def end(self, history: History | None) -> None:
        """Write the figures of the whole run and close; None: the run failed."""


OpenBackend = Callable[[], TrackerBackend]


class Tracker(Observer, abc.ABC):
    """An observer that writes a row every `every` steps (default: TrainConfig.log_every), one for the last
    step, and one for every evaluation, epoch and reported metric.

    `flush_seconds`: how long the end of a run may wait for a tracker that does not answer.
    """

    def __init__(self, *, every: int | None, flush_seconds: float = 10.0) -> None:
        if every is not None and (not isinstance(every, int) or every < 1):
            raise UsageError(
                f"every={every!r}: it counts the steps between two rows", remedy="give 1 or more"
            )
        if not (0.0 <= flush_seconds < math.inf):
            raise UsageError(f"flush_seconds={flush_seconds!r}: it is a number of seconds, 0 or more")
        self.every, self.flush_seconds = every, flush_seconds
        self._queue: TrackerQueue | None = None
        self._writer: _RunWriter | None = None  # None: no run is under way
        self._window = StepWindow()
        self._interval = every or 1
        self._workers = 1
        self._step = 0

    @abc.abstractmethod
    def _plan(self, run: RunInfo) -> OpenBackend:
        """Return what opens the backend, in the queue's thread. Called in the run's."""

    @property
    def dropped(self) -> int:
        """Rows of the last run that the tracker was too slow for."""
        return 0 if self._queue is None else self._queue.dropped

    @property
    def failed(self) -> int:
        """Rows of the last run that the tracker raised an error for."""
        return 0 if self._queue is None else self._queue.failed

    def grad_norm_every(self, config: TrainConfig) -> int:
        return self.every or config.log_every

    def on_start(self, run: RunInfo) -> None:
        self._interval = self.every or run.config.log_every
        self._workers, self._step, self._window = run.workers, run.first_step, StepWindow()
        if self._queue is not None:
            self._queue.close(0.0)
        self._writer = writer = _RunWriter(type(self).__name__, self._plan(run))
        self._queue = TrackerQueue(type(self).__name__, writer.flush)
        self._queue.put(writer.open)

    def on_workers(self, workers: int) -> None:
        self._workers = workers

    def on_step(self, record: StepRecord) -> None:
        self._window.add(record)
        self._step = record.step
        if record.step % self._interval == 0:
            self._put_window()

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._put(evaluation.step, measurements.evaluation_values(evaluation))

    def on_epoch(self, record: EpochRecord) -> None:
        self._put(self._step, measurements.epoch_values(record))

    def on_metric(self, metric: MetricReported) -> None:
        self._put(metric.step, {measurements.reported_name(metric): metric.value}, metric.time)

    def on_checkpoint(self, saved: SavedCheckpoint) -> None:
        queue, writer = self._queue, self._writer
        if queue is not None and writer is not None:
            queue.put(lambda: writer.opened().save(saved))

    def on_end(self, history: History) -> None:
        self._put_window()
        self._close(history)

    def on_failure(self, error: BaseException | None) -> None:
        self._put_window()
        self._close(None)

    # inside

    def __getstate__(self) -> dict[str, Any]:
        """Leave the thread of an earlier run behind: without a supervisor, trackers travel to a rank."""
        return {**vars(self), "_queue": None, "_writer": None}

    def _put_window(self) -> None:
        if self._window.newest is not None:
            window, self._window = self._window, StepWindow()
            self._put(self._step, window.values(self._workers), with_gpus=True)

    def _put(
        self, step: int, values: dict[str, float], at: float | None = None, *, with_gpus: bool = False
    ) -> None:
        queue, writer = self._queue, self._writer
        if queue is not None and writer is not None and values:
            row = TrackedRow(step, time.time() if at is None else at, values)
            queue.put(lambda: writer.write(row, with_gpus))

    def _close(self, history: History | None) -> None:
        queue, writer, self._writer = self._queue, self._writer, None
        if queue is not None and writer is not None:
            queue.put(lambda: writer.end(history), however_full=True)
            queue.close(self.flush_seconds)


@final
class _RunWriter:
    """The backend of one run, in the queue's thread. Not the tracker's: one that was abandoned may come back
    while the tracker writes the next run."""

    def __init__(self, name: str, opening: OpenBackend) -> None:
        self._name, self._opening = name, opening
        self._backend: TrackerBackend | None = None
        self._gpus = GpuReadings()

    def open(self) -> None:
        self._backend = self._opening()

    def opened(self) -> TrackerBackend:
        if self._backend is None:
            raise UnavailableError(f"{self._name} could not be opened")
        return self._backend

    def write(self, row: TrackedRow, with_gpus: bool) -> None:
        backend = self.opened()
        if with_gpus:
            row = dataclasses.replace(row, values={**row.values, **self._gpus.read()})
        backend.write(row)

    def flush(self) -> None:
        if self._backend is not None:
            self._backend.flush()

    def end(self, history: History | None) -> None:
        backend, self._backend = self.opened(), None
        backend.end(history)


def check_installed(package: str, extra: str) -> None:
    """Refuse a tracker whose package is missing, before a worker starts."""
    if importlib.util.find_spec(package) is None:
        raise UnavailableError(
            f"the package {package} is not installed", remedy=f'pip install "paceline[{extra}]"'
        )
