"""The records of a run's steps, packed: days of short steps are kept in megabytes, not gigabytes.

A step's record is six numbers, and metrics where it has some. In here they are columns of machine numbers;
who asks for a record gets it made. Must not know where records come from.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, final, overload

from paceline.train.history import StepRecord

_SKIPPED, _HAS_NORM = 1, 2


@final
class StepLog(Sequence[StepRecord]):
    """Records by growing step, each step once."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._epochs = array("q")
        self._samples = array("q")
        self._marks = array("b")
        self._losses = array("d")
        self._seconds = array("d")
        self._rates = array("d")
        self._norms = array("d")
        self._metrics: dict[int, dict[str, float]] = {}

    def _columns(self) -> tuple[array[int] | array[float], ...]:
        return (
            self._steps,
            self._epochs,
            self._samples,
            self._marks,
            self._losses,
            self._seconds,
            self._rates,
            self._norms,
        )

    def put(self, record: StepRecord) -> bool:
        """Whether the step is new; one that is done again takes the place of what it was."""
        step = record.step
        at = len(self._steps) if not self._steps or step > self._steps[-1] else bisect_left(self._steps, step)
        new = at == len(self._steps) or self._steps[at] != step
        norm = record.grad_norm
        marks = _SKIPPED * record.skipped + _HAS_NORM * (norm is not None)
        whole = (step, record.epoch, record.samples, marks)
        real = (record.loss, record.seconds, record.learning_rate, 0.0 if norm is None else norm)
        columns: Any = self._columns()
        for column, value in zip(columns, (*whole, *real), strict=True):
            if new:
                column.insert(at, value)
            else:
                column[at] = value
        self._metrics.pop(step, None)
        if record.metrics:
            self._metrics[step] = record.metrics
        return new

    def forget_from(self, step: int) -> None:
        """This step and later ones never were."""
        if not self._steps or self._steps[-1] < step:
            return
        at = bisect_left(self._steps, step)
        for gone in self._steps[at:]:
            self._metrics.pop(gone, None)
        for column in self._columns():
            del column[at:]

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...

    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        step, marks = self._steps[index], self._marks[index]
        return StepRecord(
            step=step,
            epoch=self._epochs[index],
            loss=self._losses[index],
            samples=self._samples[index],
            seconds=self._seconds[index],
            learning_rate=self._rates[index],
            grad_norm=self._norms[index] if marks & _HAS_NORM else None,
            skipped=bool(marks & _SKIPPED),
            metrics=dict(self._metrics.get(step, ())),
        )
