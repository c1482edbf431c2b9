"""`paceline.TensorBoard`: event files of TensorBoard, one per start of a run, written by its own package."""

from __future__ import annotations

import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any, final

from paceline.monitor.trackers.measurements import TrackedRow, summary
from paceline.monitor.trackers.tracker import OpenBackend, Tracker, check_installed
from paceline.train.callbacks import RunInfo, SavedCheckpoint
from paceline.train.history import History

_FOLDER = "tensorboard"
_numbers = itertools.count()


@final
class TensorBoard(Tracker):
    """Writes to `log_dir` (default: `tensorboard/` in the run's folder): `tensorboard --logdir DIR` shows it.

    A run that resumes writes another file, which replaces the steps after its checkpoint.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, every: int | None = None) -> None:
        super().__init__(every=every)
        check_installed("tensorboard", "tensorboard")
        self.log_dir = None if log_dir is None else Path(log_dir)

    def _plan(self, run: RunInfo) -> OpenBackend:
        folder = self.log_dir or Path(run.run_dir or "runs") / _FOLDER
        return lambda: _EventFile(folder, run.first_step)


@final
class _EventFile:
    """One event file. Without the package's own asynchronous writer: this runs in a thread already."""

    def __init__(self, folder: Path, first_step: int) -> None:
        # The package is optional, and takes half a second to import.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._last_step = first_step
        folder.mkdir(parents=True, exist_ok=True)
        # The name that TensorBoard looks for; two starts within a second differ in the last two numbers.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = (folder / name).open("wb")
        self._records: Any = RecordWriter(self._file)
        self._add(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        if first_step:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            # What an earlier start wrote from this step on is no longer shown.
            self._add(self._event(wall_time=time.time(), step=first_step + 1, session_log=start))

    def write(self, row: TrackedRow) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        self._last_step = max(self._last_step, row.step)
        self._add(self._event(wall_time=row.time, step=row.step, summary=self._summary(value=values)))

    def save(self, saved: SavedCheckpoint) -> None:
        """Do nothing: TensorBoard keeps no files."""

    def flush(self) -> None:
        self._file.flush()

    def end(self, history: History | None) -> None:
        if history is not None:
            values = {f"run/{name}": value for name, value in summary(history).items()}
            self.write(TrackedRow(self._last_step, time.time(), values))
        self._file.close()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
