"""The history of a run over all of its starts, from its journal: what `paceline report` draws. Pure.

Each step counts once: what a restart went back behind was done again, and the last time counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from paceline.core import events
from paceline.core.events import Event
from paceline.monitor.timeline import TimelineReader
from paceline.train.history import EpochRecord, Evaluation, History, StepLog, StepRecord


def history_of(journal: Iterable[Event], run_dir: str | None = None) -> History:
    """Return the history. `stopped` says why a run has not come to its end; `total_time` counts while workers
    ran."""
    reader = _HistoryReader()
    for event in journal:
        reader.read(event)
    return reader.history(run_dir)


@final
class _HistoryReader:
    def __init__(self) -> None:
        self._timeline = TimelineReader()
        self._steps = StepLog()
        self._epochs: dict[int, EpochRecord] = {}
        self._evaluations: dict[int, Evaluation] = {}
        self._workers = self._shards = 1
        self._ended: events.RunEnded | None = None
        self._stopped: str | None = "it has no step"

    def read(self, event: Event) -> None:
        self._timeline.read(event)
        match event:
            case events.RunStarted():
                self._workers, self._shards = event.workers, event.shards
                self._go_back(0, 0)
            case events.RunResumed():
                self._workers = event.workers
                self._go_back(event.step, event.epoch)
            case events.ViewChanged():
                self._workers = len(event.members)
            case events.StepCommitted():
                self._steps.put(StepRecord.of(event))
            case events.Evaluated():
                self._evaluations[event.step] = Evaluation.of(event)
            case events.EpochEnded():
                self._epochs[event.epoch] = EpochRecord.of(event)
            case events.RunEnded():
                self._ended = event
                self._stopped = None if event.reason == "finished" else event.reason
            case events.RunFailed():
                self._stopped = f"failed: {event.reason}"

    def _go_back(self, step: int, epoch: int) -> None:
        self._ended, self._stopped = None, "the journal has no end"
        self._steps.forget_from(step + 1)
        self._epochs = {number: record for number, record in self._epochs.items() if number < epoch}
        self._evaluations = {at: found for at, found in self._evaluations.items() if at <= step}

    def history(self, run_dir: str | None) -> History:
        return History(
            total_time=self._timeline.timeline.seconds,
            state_hash="" if self._ended is None else self._ended.hash,
            steps=tuple(self._steps),
            epochs=tuple(self._epochs[number] for number in sorted(self._epochs)),
            evaluations=tuple(self._evaluations[step] for step in sorted(self._evaluations)),
            workers=self._workers,
            shards=self._shards,
            run_dir=run_dir,
            stopped=self._stopped,
        )
