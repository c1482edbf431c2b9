"""Observers in the caller's own process, fed by the journal of a run that a supervisor looks after.

The workers come and go; the caller stays. What observers keep is in the caller's objects after the run, and a
lost worker does not take it away. Must not know how the run is carried out. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import final

from paceline.core import events, journal
from paceline.train.callbacks import Callbacks, RunInfo, SavedCheckpoint
from paceline.train.history import EpochRecord, Evaluation, StepRecord
from paceline.train.step_log import StepLog

_READ_BYTES = 1 << 20


@final
class Following:
    """Reads what was appended to a journal and tells the observers, in order."""

    def __init__(self, file: Path, callbacks: Callbacks, info: RunInfo, url: str) -> None:
        self._file = file
        self._callbacks = callbacks
        self._info = info
        self._url = url
        self.started = False  # whether the run has begun or gone on
        # What stands there is of earlier parts of the run; observers are told what happens from now on.
        self._offset = file.stat().st_size if file.exists() else 0
        self.steps = StepLog()
        self.failures: list[events.WorkerFailed] = []
        self.saved: tuple[int, int] | None = None  # the newest version that is known, and its step
        self.workers = info.workers
        self.ranks: set[int] = set()
        self.injected: set[int] = set()  # faults on demand that came, by their place in the chaos

    def mute(self) -> None:
        """From now on no observer is told anything; what is in the journal is still read."""
        self._callbacks = Callbacks([])

    def read(self) -> None:
        """Tells what is new."""
        try:
            if self._file.stat().st_size <= self._offset:
                return
        except FileNotFoundError:
            return
        while True:
            chunk = journal.read(self._file, self._offset, max_bytes=_READ_BYTES)
            for event in chunk.events:
                self._tell(event)
            if chunk.offset == self._offset:
                return
            self._offset = chunk.offset

    def _start(self, event: events.RunStarted | events.RunResumed) -> None:
        if self.started:
            return  # the job lost all its workers since, and goes on from a checkpoint
        self.started = True
        info = dataclasses.replace(self._info, workers=event.workers)
        if isinstance(event, events.RunResumed):
            info = dataclasses.replace(info, first_step=event.step, first_epoch=event.epoch)
        self._callbacks.start(info)

    def _tell(self, event: events.Event) -> None:
        callbacks = self._callbacks
        if isinstance(event, events.StepCommitted):
            record = StepRecord.of(event)
            # After a job that lost all its workers, steps come again from a checkpoint on.
            if self.steps.put(record):
                callbacks.step(record)
        elif isinstance(event, events.RunStarted | events.RunResumed):
            if isinstance(event, events.RunResumed):
                self.saved = event.version, event.step
            self._start(event)
        elif isinstance(event, events.Evaluated):
            callbacks.evaluation(
                Evaluation(
                    step=event.step,
                    epoch=event.epoch,
                    metrics=event.metrics,
                    samples=event.samples,
                    seconds=event.seconds,
                )
            )
        elif isinstance(event, events.EpochEnded):
            callbacks.epoch(
                EpochRecord(
                    epoch=event.epoch,
                    steps=event.steps,
                    samples=event.samples,
                    loss=event.loss,
                    seconds=event.seconds,
                    metrics=event.metrics,
                    validation=event.validation,
                )
            )
        elif isinstance(event, events.CheckpointSaved):
            self.saved = event.version, event.step
            callbacks.checkpoint(
                SavedCheckpoint(
                    version=event.version,
                    step=event.step,
                    epoch=event.epoch,
                    bytes=event.bytes,
                    seconds=event.seconds,
                    url=self._url,
                )
            )
        elif isinstance(event, events.WorkerFailed):
            self.failures.append(event)
        elif isinstance(event, events.WorkerStarted):
            self.ranks.add(event.rank)
        elif isinstance(event, events.FaultInjected):
            self.injected.add(event.index)
        elif isinstance(event, events.ViewChanged):
            before, self.workers = self.workers, len(event.members)
            if self.started and before != self.workers:
                callbacks.workers(self.workers)
