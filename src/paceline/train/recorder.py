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
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor

from paceline.core import events
from paceline.train.callbacks import Callbacks
from paceline.train.history import EpochRecord, Evaluation, StepRecord
from paceline.train.step_log import StepLog

_log = logging.getLogger(__name__)

_REMEMBERED = 256  # steps whose events can be told again
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


def _nowhere(event: events.Event) -> None:
    """A run without a folder has no journal."""


@final
class Recorder:
    """Turns committed steps into records, on every rank; the main rank tells them to the journal and to the
    observers among its callbacks. Which rank that is may change."""

    def __init__(
        self,
        callbacks: Callbacks,
        tell: Tell | None,
        device: torch.device,
        is_main: Callable[[], bool] = lambda: True,
    ) -> None:
        self._callbacks = callbacks
        self._tell = tell or _nowhere
        self._is_main = is_main
        self._behind = _BEHIND if device.type == "cuda" else 0
        self._waiting: deque[tuple[CommittedStep, Tensor, torch.cuda.Event | None, float]] = deque()
        self._last = time.perf_counter()
        self.steps = StepLog()
        self.epochs: list[EpochRecord] = []
        self.evaluations: list[Evaluation] = []
        self.sums = EpochSums()
        self._said_not_finite = False
        self._places: dict[int, tuple[int, int, int, str | None]] = {}

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
        if self._is_main():
            self._tell(event)

    def note_here(self, event: events.Event) -> None:
        """Into the journal, by the rank that saw it."""
        self._tell(event)

    def events_after(self, step: int) -> list[events.Event]:
        """What the journal may lack, of the steps after `step`, where another rank was to tell it."""
        since = [record for record in self.steps[-_REMEMBERED:] if record.step > step]
        return [_event(record, self._places[record.step]) for record in since if record.step in self._places]

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": self.sums.state_dict(),
            "epochs": [asdict(record) for record in self.epochs],
            "evaluations": [asdict(evaluation) for evaluation in self.evaluations],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = EpochSums(state["sums"])
        self.epochs = [EpochRecord(**record) for record in state["epochs"]]
        self.evaluations = [Evaluation(**evaluation) for evaluation in state["evaluations"]]

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
        self._places[step.step] = (step.offset, step.taken, step.generation, step.hash)
        self._places.pop(step.step - _REMEMBERED, None)
        if not math.isfinite(record.loss) and not self._said_not_finite and self._is_main():
            self._said_not_finite = True
            _log.warning(
                "the loss of step %d is %s: this and what follows may be of no use", record.step, record.loss
            )
        if self._is_main():
            self._tell(_event(record, self._places[step.step]))
            self._callbacks.step(record)
        return record


def _event(record: StepRecord, place: tuple[int, int, int, str | None]) -> events.StepCommitted:
    offset, taken, generation, digest = place
    return events.StepCommitted(
        time=time.time(),
        step=record.step,
        epoch=record.epoch,
        loss=record.loss,
        samples=record.samples,
        seconds=record.seconds,
        hash=digest,
        offset=offset,
        taken=taken,
        learning_rate=record.learning_rate,
        grad_norm=record.grad_norm,
        skipped=record.skipped,
        metrics=record.metrics,
        generation=generation,
    )
