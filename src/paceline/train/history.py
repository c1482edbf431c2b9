"""History of a run: records of its steps, epochs and evaluations, and the figures that follow from them.

Plain frozen data that goes to JSON and back.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import Any, Self, final, overload

from paceline.core import atomic_file, type_conversion
from paceline.core.errors import PlatformError, UsageError
from paceline.core.events import Event

_FORMAT = 1
_ROW = Struct("=qqbdddd")  # of a step: see StepLog
_SKIPPED, _HAS_NORM = 1, 2


class EventView:
    """A record that observers and histories hold: the fields of a journal event that describe what happened,
    without those of the journal (time, view)."""

    __slots__ = ()

    @classmethod
    def of(cls, event: Event, **more: Any) -> Self:
        """Return the view of an event; `more` are fields that the journal does not have."""
        names: Sequence[str] = cls.__dataclass_fields__  # type: ignore[attr-defined]
        values = vars(event)
        return cls(**{name: values[name] for name in names if name not in more}, **more)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(EventView):
    """One applied step. `step` counts from 1, `samples` are those of this step, `loss` is their mean.

    `skipped` is a step whose gradient overflowed in fp16 and that changed no weight.
    """

    step: int
    epoch: int
    loss: float
    samples: int
    seconds: float = 0.0
    learning_rate: float = math.nan
    grad_norm: float | None = None
    skipped: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    def timeless(self) -> StepRecord:
        """Return the same without `seconds`, which differ from rank to rank: what modifiers may decide by."""
        return dataclasses.replace(self, seconds=0.0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(EventView):
    """The model on the validation data after `step` steps; `metrics` has at least the mean "loss"."""

    step: int
    epoch: int
    metrics: dict[str, float]
    samples: int = 0
    seconds: float = 0.0

    @property
    def loss(self) -> float:
        return self.metrics.get("loss", math.nan)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord(EventView):
    """One pass over the training data, counted from 0; `metrics` are means over its samples.

    `validation` are the metrics of the evaluation that followed it, if one did.
    """

    epoch: int
    steps: int
    samples: int
    loss: float
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)


@final
@dataclass(frozen=True, kw_only=True)
class History:
    """The outcome of `fit`. `stopped`: why it ended early; None: it came to its end.

    `state_hash` is the SHA-256 over parameters and buffers in name order.
    """

    total_time: float
    state_hash: str
    steps: tuple[StepRecord, ...] = ()
    epochs: tuple[EpochRecord, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    workers: int = 1
    shards: int = 1
    run_dir: str | None = None
    stopped: str | None = None
    unfinished: EpochRecord | None = None  # the epoch that was under way when the run ended

    @property
    def final_loss(self) -> float:
        """Mean training loss over the samples of the last epoch, whether it came to its end or not; also over
        those of its steps that an earlier start of the run did. Never the loss on validation data."""
        whole = self.unfinished or (self.epochs[-1] if self.epochs else None)
        if not self.steps:
            return math.nan if whole is None else whole.loss
        last = [record for record in self.steps if record.epoch == self.steps[-1].epoch]
        samples = sum(record.samples for record in last)
        if whole is not None and whole.epoch == last[-1].epoch and whole.samples > samples:
            return whole.loss
        if samples == 0:
            return self.steps[-1].loss
        return math.fsum(record.loss * record.samples for record in last) / samples

    @property
    def best_accuracy(self) -> float | None:
        """The highest "accuracy" on the validation data, else on the training data; None without one."""
        best = _best(self._measured("accuracy"), highest=True)
        return None if best is None else best[1]

    @property
    def best_epoch(self) -> int | None:
        """The epoch, from 0, with the highest accuracy; without accuracies the one with the lowest loss."""
        best = _best(self._measured("accuracy"), highest=True) or _best(self._measured("loss"), highest=False)
        if best is None:
            best = _best([(record.epoch, record.loss) for record in self.epochs], highest=False)
        return None if best is None else best[0]

    @property
    def samples_per_second(self) -> float:
        """Training samples over the time of the steps; NaN for a run without a step."""
        seconds = math.fsum(record.seconds for record in self.steps)
        return sum(record.samples for record in self.steps) / seconds if seconds > 0.0 else math.nan

    def _measured(self, metric: str) -> list[tuple[int, float]]:
        on_validation = [(ev.epoch, ev.metrics[metric]) for ev in self.evaluations if metric in ev.metrics]
        if on_validation:
            return on_validation
        return [(record.epoch, record.metrics[metric]) for record in self.epochs if metric in record.metrics]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: the records and the figures that follow from them."""
        figures = ("final_loss", "best_accuracy", "best_epoch", "samples_per_second")
        plain = dataclasses.asdict(self)
        records = {name: list(plain.pop(name)) for name in ("epochs", "evaluations", "steps")}
        return {
            "format": _FORMAT,
            **{name: getattr(self, name) for name in figures},
            **plain,
            **records,
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON; NaN and infinities, which JSON lacks, become strings that `load` understands."""
        target = Path(path)
        text = json.dumps(type_conversion.finite(self.to_dict()), allow_nan=False, indent=1)
        with writing("history", target):
            atomic_file.replace(target, [f"{text}\n".encode()], durable=False)
        return target

    @staticmethod
    def from_dict(data: Mapping[str, Any], origin: str = "this") -> History:
        """Return what `to_dict` returned, as a history again."""
        if data.get("format") != _FORMAT:
            raise UsageError(
                f"{origin} is not a history of format {_FORMAT}: found {data.get('format')!r}",
                remedy="give what this version's History wrote",
            )
        known = type_conversion.fields_of(History)
        try:
            history = type_conversion.convert({key: data[key] for key in known if key in data}, History, "")
        except type_conversion.ConversionError as error:
            raise UsageError(f"{origin} is damaged: {error}", remedy="save the history again") from error
        assert isinstance(history, History)
        return history

    @staticmethod
    def load(path: str | os.PathLike[str]) -> History:
        """Read what `save` wrote."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}", remedy="check the path") from error
        except ValueError as error:
            raise UsageError(f"{path} is not JSON: {error}", remedy="give a file of History.save") from error
        found = data if isinstance(data, dict) else {"format": type(data).__name__}
        return History.from_dict(found, str(path))

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the curves to a PNG, SVG or PDF (needs matplotlib) or to an HTML report (needs nothing)."""
        # The one arrow of the tree that points up, which the tests of the architecture list: the charts read
        # histories.
        drawn: Path = importlib.import_module("paceline.monitor.plot").draw([self], path)
        return drawn


@final
class StepLog(Sequence[StepRecord]):
    """Records by growing step, each step once. Packed, 57 bytes each, so that days of short steps are kept in
    megabytes; a record is made when it is asked for."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._rows = bytearray()
        self._metrics: dict[int, dict[str, float]] = {}

    def put(self, record: StepRecord) -> bool:
        """Add a record, or replace that of a step that was repeated; return whether the step is new."""
        step, norm = record.step, record.grad_norm
        at = len(self._steps) if not self._steps or step > self._steps[-1] else bisect_left(self._steps, step)
        new = at == len(self._steps) or self._steps[at] != step
        if new:
            self._steps.insert(at, step)
        marks = _SKIPPED * record.skipped + _HAS_NORM * (norm is not None)
        numbers = (record.loss, record.seconds, record.learning_rate, 0.0 if norm is None else norm)
        row = _ROW.pack(record.epoch, record.samples, marks, *numbers)
        self._rows[at * _ROW.size : (at + (not new)) * _ROW.size] = row
        self._metrics.pop(step, None)
        if record.metrics:
            self._metrics[step] = record.metrics
        return new

    def forget_from(self, step: int) -> None:
        """Drop this step and later ones."""
        if not self._steps or self._steps[-1] < step:
            return
        at = bisect_left(self._steps, step)
        for gone in self._steps[at:]:
            self._metrics.pop(gone, None)
        del self._steps[at:]
        del self._rows[at * _ROW.size :]

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...

    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        step, at = self._steps[index], range(len(self._steps))[index] * _ROW.size
        epoch, samples, marks, loss, seconds, rate, norm = _ROW.unpack_from(self._rows, at)
        return StepRecord(
            step=step,
            epoch=epoch,
            loss=loss,
            samples=samples,
            seconds=seconds,
            learning_rate=rate,
            grad_norm=norm if marks & _HAS_NORM else None,
            skipped=bool(marks & _SKIPPED),
            metrics=dict(self._metrics.get(step, ())),
        )


@contextmanager
def writing(what: str, target: Path) -> Iterator[None]:
    """Make the folder of a file that is written inside; an error names the file."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise PlatformError(
            f"the {what} cannot be written to {target}: {error.strerror}",
            remedy="check that its folder may be written to and that the disk has space",
        ) from error


def _best(measured: Sequence[tuple[int, float]], *, highest: bool) -> tuple[int, float] | None:
    """Return the first of the best; what is not a number cannot win."""
    real = [pair for pair in measured if not math.isnan(pair[1])]
    return (max if highest else min)(real, key=lambda pair: pair[1], default=None)
