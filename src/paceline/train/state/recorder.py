"""Record committed steps: their numbers come from the device a little later than the step is done.

A step's record is complete once its loss has arrived. On a GPU that is a step or two behind, so that the loop
does not wait for the device; on the CPU at once. Records go to the history, the journal and the observers, in
order.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, TypeAlias, TypeGuard, final

import torch
from torch import Tensor

from paceline.core import events
from paceline.core.clock import Clock, MonotonicClock
from paceline.train.callbacks import Callbacks, Observer
from paceline.train.history import EpochRecord, Evaluation, StepLog, StepRecord
from paceline.train.phases import StepTimes

_log = logging.getLogger(__name__)

_REMEMBERED = 256  # events that can be sent again in any case
_MOST_REMEMBERED = 8192  # and of those that the journal may lack
# From a step to its line in the journal: far longer than that takes while a supervisor writes it.
_JOURNAL_LAG_SECONDS = 2.0
_BEHIND = 2  # steps whose numbers may still be on their way from a GPU
_AT_NONFINITE = '; TrainConfig(nonfinite="stop") ends a run there, and "skip" leaves such steps out'


@final
@dataclass(frozen=True)
class PendingStep:
    """A step that was applied, with its numbers still on the device: what its event lacks."""

    event: events.StepCommitted
    numbers: Tensor  # the loss, the gradient's norm where it was measured, the metrics
    has_norm: bool
    names: tuple[str, ...]  # of the metrics

    def completed(
        self, values: Sequence[float], seconds: float, times: StepTimes | None = None
    ) -> events.StepCommitted:
        metrics = values[2:] if self.has_norm else values[1:]
        comm = waited = efficiency = None
        if times is not None and seconds > 0.0:
            # In microseconds and hundredths of a percent: digits beyond are noise, and bytes of every line.
            comm, waited = round(times.communication, 6), round(times.data, 6)
            efficiency = round(min(1.0, times.computing / seconds), 4)
        # As dataclasses.replace, which would take as long as all that was measured.
        event = object.__new__(events.StepCommitted)
        vars(event).update(
            vars(self.event),
            time=time.time(),
            loss=values[0],
            seconds=seconds,
            grad_norm=values[1] if self.has_norm else None,
            metrics=dict(zip(self.names, metrics, strict=True)),
            comm_time=comm,
            data_time=waited,
            compute_efficiency=efficiency,
        )
        return event


@final
@dataclass
class EpochSums:
    """Sums over the records of one epoch; saved with checkpoints, so that they survive a resume."""

    steps: int = 0
    samples: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    skipped: int = 0
    left_out: int = 0  # samples whose numbers are no part of the means

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.samples += record.samples
        self.seconds += record.seconds
        self.skipped += record.skipped
        if record.is_spoiled:
            self.left_out += record.samples
            return
        self.loss += record.loss * record.samples
        for name, value in record.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value * record.samples

    def record(self, epoch: int, validation: dict[str, float]) -> EpochRecord:
        total = max(self.samples - self.left_out, 1)
        means = {name: value / total for name, value in self.metrics.items()}
        return EpochRecord(
            epoch=epoch,
            steps=self.steps,
            samples=self.samples,
            loss=self.loss / total if self.left_out < self.samples or not self.samples else math.nan,
            seconds=self.seconds,
            skipped=self.skipped,
            metrics=means,
            validation=validation,
        )


Tell = Callable[[events.Event], None]
_AwaitedNumbers: TypeAlias = tuple[PendingStep, Tensor, torch.cuda.Event | None, float, StepTimes | None]
_Kept: TypeAlias = events.StepCommitted | events.RunResumed | events.Evaluated | events.EpochEnded
_KEPT: Final = (events.StepCommitted, events.RunResumed, events.Evaluated, events.EpochEnded)


@final
class Recorder:
    """Completes committed steps on every rank; the main rank, which may change, sends them to the journal and
    to the observers among its callbacks.

    `acked_at`: when the journal was last known to have what had been sent, on `clock`; None: at once. What is
    newer goes into checkpoints, so that nothing is missing in the journal when all are killed.
    `take_times` returns what the time since its last call was spent on. `at_nonfinite` goes on after the
    warning about a loss that is not finite: what can be done.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        tell: Tell | None,
        device: torch.device,
        is_main: Callable[[], bool] = lambda: True,
        acked_at: Callable[[], float] | None = None,
        clock: Clock | None = None,
        take_times: Callable[[], StepTimes | None] = lambda: None,
        at_nonfinite: str = _AT_NONFINITE,
    ) -> None:
        self._take_times, self._at_nonfinite = take_times, at_nonfinite
        self._clock: Clock = clock or MonotonicClock()
        self._callbacks = callbacks
        self._tell = tell or (lambda event: None)  # a run without a folder has no journal
        self._is_main, self._acked_at = is_main, acked_at or self._clock.now
        self._behind = _BEHIND if device.type == "cuda" else 0
        self._waiting: deque[_AwaitedNumbers] = deque()
        self._last = self._clock.now()
        self.steps = StepLog()
        self.epochs: list[EpochRecord] = []
        self.evaluations: list[Evaluation] = []
        self.sums = EpochSums()
        self._said_not_finite = False
        # The last ones, with when they were recorded, and after which step.
        self._events: deque[tuple[float, int, _Kept]] = deque()

    def start_clock(self) -> None:
        """Start the next step's time now: loading and evaluating before it do not count."""
        self._last = self._clock.now()
        self._take_times()

    def commit(self, step: PendingStep) -> StepRecord | None:
        """Record a committed step; return its record where that is complete already."""
        now = self._clock.now()
        seconds, self._last = now - self._last, now
        times = self._take_times()
        event = None
        numbers = step.numbers
        if self._behind:
            numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers.copy_(step.numbers, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._waiting.append((step, numbers, event, seconds, times))
        record = None
        while len(self._waiting) > self._behind:
            record = self._complete()
        return record if not self._behind else None

    def flush(self) -> StepRecord | None:
        """Wait for numbers that are still on their way; return the newest record."""
        while self._waiting:
            self._complete()
        return self.steps[-1] if self.steps else None

    def evaluated(self, event: events.Evaluated) -> None:
        if self.evaluations and self.evaluations[-1].step == event.step:
            self.evaluations.pop()  # done again after a resume
        self.evaluations.append(Evaluation.of(event))
        self.note(event)
        if self._is_main():
            self._callbacks.notify(Observer.on_evaluation, self.evaluations[-1])

    def end_epoch(self, epoch: int, validation: dict[str, float]) -> EpochRecord:
        record = self.sums.record(epoch, validation)
        self.epochs.append(record)
        self.sums = EpochSums()
        self.note(events.EpochEnded(time=time.time(), **asdict(record)))
        if self._is_main():
            self._callbacks.notify(Observer.on_epoch, record)
        return record

    def note(self, event: events.Event) -> None:
        """Send an event to the journal if this is the main rank."""
        if isinstance(event, _KEPT):
            self._remember(event)
        if self._is_main():
            self._tell(event)

    def note_here(self, event: events.Event) -> None:
        """Send an event to the journal from this rank."""
        self._tell(event)

    def events_after(self, step: int) -> list[events.Event]:
        """Return the steps after `step`, with evaluations and ends of epochs from there on, that the journal
        may lack, where another rank had to send them."""
        return [
            event
            for _, place, event in self._events
            if not isinstance(event, events.RunResumed) and place >= step + _is_step(event)
        ]

    def state_dict(self) -> dict[str, Any]:
        since = self._acked_at() - _JOURNAL_LAG_SECONDS
        return {
            "sums": asdict(self.sums),
            "epochs": [asdict(record) for record in self.epochs],
            "evaluations": [asdict(evaluation) for evaluation in self.evaluations],
            # The events that the journal may lack if all workers are killed now.
            "unconfirmed": [events.to_json(event) for taken, _, event in self._events if taken >= since],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = EpochSums(**state["sums"])
        self.epochs = [EpochRecord(**record) for record in state["epochs"]]
        self.evaluations = [Evaluation(**evaluation) for evaluation in state["evaluations"]]
        # Until the journal is known to have them, they are part of what this process saves, too.
        self._events.clear()
        for event in map(events.from_json, state.get("unconfirmed", ())):
            if isinstance(event, _KEPT):
                self._remember(event)

    def recall(self, after: int | None = None) -> list[_Kept]:
        """Record the events of a loaded checkpoint, which the journal may lack. Their views are those of
        workers that are gone. `after`: the last step of a journal that no supervisor writes, which has what
        came before."""
        self._events = deque(
            (now, place, replace(event, generation=events.RECALLED) if _is_step(event) else event)
            for now, place, event in self._events
        )
        if after is None:
            return [event for *_, event in self._events]
        return [e for _, place, e in self._events if place > after and not isinstance(e, events.RunResumed)]

    def _complete(self) -> StepRecord:
        step, numbers, event, seconds, times = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        committed = step.completed(numbers.tolist(), seconds, times)
        record = StepRecord.of(committed)
        self.steps.forget_from(record.step)  # all went back to a checkpoint: what follows is done again
        self.steps.put(record)
        self.sums.add(record)
        self._remember(committed)
        if not math.isfinite(record.loss) and not self._said_not_finite and self._is_main():
            self._said_not_finite = True
            _log.warning(
                "the loss of step %d is %s: the step changed no weight"
                if record.skipped
                else f"the loss of step %d is %s: this and what follows may be of no use{self._at_nonfinite}",
                record.step,
                record.loss,
            )
        if self._is_main():
            self._tell(committed)
            self._callbacks.notify(Observer.on_step, record)
        return record

    def _remember(self, event: _Kept) -> None:
        before = self._events[-1][1] if self._events else 0
        place = before if isinstance(event, events.EpochEnded) else event.step
        while self._events and self._events[-1][1] > place - _is_step(event):
            self._events.pop()  # all went back to a checkpoint: later steps never were
        self._events.append((self._clock.now(), place, event))
        while len(self._events) > _REMEMBERED and (
            len(self._events) > _MOST_REMEMBERED
            or self._events[0][0] < self._acked_at() - _JOURNAL_LAG_SECONDS
        ):
            self._events.popleft()


def _is_step(event: _Kept) -> TypeGuard[events.StepCommitted]:
    return isinstance(event, events.StepCommitted)
