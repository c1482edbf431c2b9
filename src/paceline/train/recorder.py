"""What is known about steps, and when: numbers come from the device a little later than the step is done.

A step's record is complete once its loss has arrived. On a GPU that is a step or two behind, so that nobody
waits for the device; on the CPU at once. Records go to the history, the journal and the observers, in order.
Must not know how a step is computed.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias, TypeGuard, final

import torch
from torch import Tensor

from paceline.core import events
from paceline.train.callbacks import Callbacks
from paceline.train.history import EpochRecord, Evaluation, StepRecord
from paceline.train.step_log import StepLog

_log = logging.getLogger(__name__)

_REMEMBERED = 256  # events that can be told again in any case
_MOST_REMEMBERED = 8192  # and of those that the journal may lack
# Between a step and its way into the journal: far longer than that takes while somebody writes it.
_TELLING_SECONDS = 2.0
_BEHIND = 2  # steps whose numbers may still be on their way from a GPU


@final
@dataclass(frozen=True)
class CommittedStep:
    """A step that was applied, with its numbers still on the device."""

    step: int
    epoch: int
    samples: int
    learning_rate: float
    skipped: bool
    hash: str | None
    offset: int  # in its epoch, before it
    taken: int  # positions of the epoch
    generation: int
    names: tuple[str, ...]  # of numbers after the loss and, where it was measured, the norm
    has_norm: bool
    numbers: Tensor
    sample: str | None = None  # of the weights that it was computed with


@final
class EpochSums:
    """What the records of one epoch add up to; saved with checkpoints, so that it survives a resume."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        state = state or {}
        self.steps = int(state.get("steps", 0))
        self.samples = int(state.get("samples", 0))
        self.loss = float(state.get("loss", 0.0))
        self.seconds = float(state.get("seconds", 0.0))
        self.metrics: dict[str, float] = dict(state.get("metrics", {}))

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.samples += record.samples
        self.loss += record.loss * record.samples
        self.seconds += record.seconds
        for name, value in record.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value * record.samples

    def record(self, epoch: int, validation: dict[str, float]) -> EpochRecord:
        total = max(self.samples, 1)
        means = {name: value / total for name, value in self.metrics.items()}
        return EpochRecord(
            epoch=epoch,
            steps=self.steps,
            samples=self.samples,
            loss=self.loss / total,
            seconds=self.seconds,
            metrics=means,
            validation=validation,
        )

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))


Tell = Callable[[events.Event], None]
_Kept: TypeAlias = events.StepCommitted | events.RunResumed


def _nowhere(event: events.Event) -> None:
    """A run without a folder has no journal."""


@final
class Recorder:
    """Turns committed steps into records, on every rank; the main rank tells them to the journal and to the
    observers among its callbacks. Which rank that is may change.

    `heard_at`: when the journal was last known to have what had been told, on this process's clock. What is
    newer goes into checkpoints, so that nothing is missing in the journal when all are killed.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        tell: Tell | None,
        device: torch.device,
        is_main: Callable[[], bool] = lambda: True,
        heard_at: Callable[[], float] = time.monotonic,
    ) -> None:
        self._callbacks = callbacks
        self._tell = tell or _nowhere
        self._is_main, self._heard_at = is_main, heard_at
        self._behind = _BEHIND if device.type == "cuda" else 0
        self._waiting: deque[tuple[CommittedStep, Tensor, torch.cuda.Event | None, float]] = deque()
        self._last = time.perf_counter()
        self.steps = StepLog()
        self.epochs: list[EpochRecord] = []
        self.evaluations: list[Evaluation] = []
        self.sums = EpochSums()
        self._said_not_finite = False
        self._events: deque[tuple[float, _Kept]] = deque()  # the last ones, with when they were taken in

    def start_clock(self) -> None:
        """What happened before now (loading, evaluating) is not part of the next step's time."""
        self._last = time.perf_counter()

    def commit(self, step: CommittedStep) -> StepRecord | None:
        """Takes a step in; returns its record where that is complete already."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        event = None
        numbers = step.numbers
        if self._behind:
            numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers.copy_(step.numbers, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._waiting.append((step, numbers, event, seconds))
        record = None
        while len(self._waiting) > self._behind:
            record = self._complete()
        return record if not self._behind else None

    def flush(self) -> StepRecord | None:
        """Waits for what is still on its way; the newest record."""
        while self._waiting:
            self._complete()
        return self.steps[-1] if self.steps else None

    def evaluated(self, evaluation: Evaluation) -> None:
        if self.evaluations and self.evaluations[-1].step == evaluation.step:
            self.evaluations.pop()  # done again after a resume
        self.evaluations.append(evaluation)
        self.note(
            events.Evaluated(
                time=time.time(),
                step=evaluation.step,
                epoch=evaluation.epoch,
                samples=evaluation.samples,
                metrics=evaluation.metrics,
                seconds=evaluation.seconds,
            )
        )
        if self._is_main():
            self._callbacks.evaluation(evaluation)

    def end_epoch(self, epoch: int, validation: dict[str, float]) -> EpochRecord:
        record = self.sums.record(epoch, validation)
        self.epochs.append(record)
        self.sums = EpochSums()
        self.note(events.EpochEnded(time=time.time(), **asdict(record)))
        if self._is_main():
            self._callbacks.epoch(record)
        return record

    def note(self, event: events.Event) -> None:
        """Into the journal, by the main rank."""
        if isinstance(event, events.RunResumed):
            self._remember(event)
        if self._is_main():
            self._tell(event)

    def note_here(self, event: events.Event) -> None:
        """Into the journal, by the rank that saw it."""
        self._tell(event)

    def events_after(self, step: int) -> list[events.Event]:
        """What the journal may lack, of the steps after `step`, where another rank was to tell it."""
        return [event for _, event in self._events if _is_step(event) and event.step > step]

    def _unconfirmed(self) -> list[_Kept]:
        """What the journal may lack if everybody is killed now."""
        since = self._heard_at() - _TELLING_SECONDS
        return [event for taken, event in self._events if taken >= since]

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": self.sums.state_dict(),
            "epochs": [asdict(record) for record in self.epochs],
            "evaluations": [asdict(evaluation) for evaluation in self.evaluations],
            "unconfirmed": [events.to_json(event) for event in self._unconfirmed()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = EpochSums(state["sums"])
        self.epochs = [EpochRecord(**record) for record in state["epochs"]]
        self.evaluations = [Evaluation(**evaluation) for evaluation in state["evaluations"]]
        # Until somebody has heard of them here, they are part of what this process saves, too.
        now = time.monotonic()
        lines = map(events.from_json, state.get("unconfirmed", ()))
        self._events = deque(
            (now, e) for e in lines if isinstance(e, events.StepCommitted | events.RunResumed)
        )

    def recall(self) -> list[_Kept]:
        """After a checkpoint was loaded: what it holds for the journal, in case nobody had told it. Its views
        are those of workers that are gone."""
        self._events = deque(
            (now, replace(event, generation=events.RECALLED) if _is_step(event) else event)
            for now, event in self._events
        )
        return [event for _, event in self._events]

    def _complete(self) -> StepRecord:
        step, numbers, event, seconds = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        values: Sequence[float] = numbers.tolist()
        rest = values[2:] if step.has_norm else values[1:]
        record = StepRecord(
            step=step.step,
            epoch=step.epoch,
            loss=values[0],
            samples=step.samples,
            seconds=seconds,
            learning_rate=step.learning_rate,
            grad_norm=values[1] if step.has_norm else None,
            skipped=step.skipped,
            metrics=dict(zip(step.names, rest, strict=True)),
        )
        self.steps.forget_from(record.step)  # all went back to a checkpoint: what follows is done again
        self.steps.put(record)
        self.sums.add(record)
        told = _event(record, step)
        self._remember(told)
        if not math.isfinite(record.loss) and not self._said_not_finite and self._is_main():
            self._said_not_finite = True
            _log.warning(
                "the loss of step %d is %s: this and what follows may be of no use; "
                'TrainConfig(nonfinite="stop") ends a run there',
                record.step,
                record.loss,
            )
        if self._is_main():
            self._tell(told)
            self._callbacks.step(record)
        return record

    def _remember(self, event: _Kept) -> None:
        last = event.step - _is_step(event)
        while self._events and self._events[-1][1].step > last:
            self._events.pop()  # all went back to a checkpoint: later steps never were
        now = time.monotonic()
        self._events.append((now, event))
        while len(self._events) > _REMEMBERED and (
            len(self._events) > _MOST_REMEMBERED or self._events[0][0] < self._heard_at() - _TELLING_SECONDS
        ):
            self._events.popleft()


def _is_step(event: _Kept) -> TypeGuard[events.StepCommitted]:
    return isinstance(event, events.StepCommitted)


def _event(record: StepRecord, step: CommittedStep) -> events.StepCommitted:
    return events.StepCommitted(
        time=time.time(),
        step=record.step,
        epoch=record.epoch,
        loss=record.loss,
        samples=record.samples,
        seconds=record.seconds,
        hash=step.hash,
        sample=step.sample,
        offset=step.offset,
        taken=step.taken,
        learning_rate=record.learning_rate,
        grad_norm=record.grad_norm,
        skipped=record.skipped,
        metrics=record.metrics,
        generation=step.generation,
    )
