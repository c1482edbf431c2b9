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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import Any, Self, final, overload

from paceline.core import atomic_file, journal, type_conversion
from paceline.core.errors import PlatformError, UsageError
from paceline.core.events import Event, StepCommitted
from paceline.core.wording import counted
from paceline.train.trace_summary import TraceSummary

_FORMAT = 1
_ROW = Struct("=qqbddddddd")  # of a step: see StepLog
_SKIPPED, _HAS_NORM, _HAS_TIMES = 1, 2, 4
_NO_TIMES = (0.0, 0.0, 0.0)


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

    `skipped` is a step that changed no weight: its gradient overflowed in fp16, or was not finite under
    `nonfinite="skip"`. Of `seconds`, the reporting rank was in the exchange with the other ranks for
    `comm_time` and waited for data for `data_time`; `compute_efficiency` is the share that it computed. All
    are None where they are not known.
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
    comm_time: float | None = None
    data_time: float | None = None
    compute_efficiency: float | None = None

    @property
    def is_spoiled(self) -> bool:
        """Whether it was skipped with a loss that is no number: means leave it out."""
        return self.skipped and not math.isfinite(self.loss)

    def timeless(self) -> StepRecord:
        """Return the same without times, which differ from rank to rank: what modifiers may decide by."""
        return dataclasses.replace(self, seconds=0.0, comm_time=None, data_time=None, compute_efficiency=None)


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

    `validation` are the metrics of the evaluation that followed it, if one did; `skipped` counts its steps
    that changed no weight.
    """

    epoch: int
    steps: int
    samples: int
    loss: float
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    skipped: int = 0


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class History:
    """The outcome of `fit`. `stopped`: why it ended early; None: it came to its end.

    The records are those of all starts of the run, also of those before a resume; `total_time` are the
    seconds of the last. `state_hash` is the SHA-256 over parameters and buffers in name order.
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
    restored: int | None = None  # the step of the best evaluation, whose weights early stopping brought back
    unfinished: EpochRecord | None = None  # the epoch that was under way when the run ended
    profile_dir: str | None = None

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
        last = [record for record in last if not record.is_spoiled]
        samples = sum(record.samples for record in last)
        if samples == 0:
            return self.steps[-1].loss
        return math.fsum(record.loss * record.samples for record in last) / samples

    @property
    def skipped_steps(self) -> int:
        """Steps that changed no weight: an overflow of fp16, or not finite under `nonfinite="skip"`."""
        return sum(record.skipped for record in self.steps)

    @property
    def best_accuracy(self) -> float | None:
        """The highest "accuracy" on the validation data; None where none was measured."""
        measured = [(ev.epoch, ev.metrics["accuracy"]) for ev in self.evaluations if "accuracy" in ev.metrics]
        best = _best(measured, highest=True)
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

    @property
    def profile(self) -> TraceSummary:
        """The traces that `fit(profile=DIR)` had the workers write: `history.profile.table()`."""
        if self.profile_dir is None:
            raise UsageError("this run was not profiled", remedy="give a folder: fit(..., profile=DIR)")
        return TraceSummary(Path(self.profile_dir))

    @property
    def communication_share(self) -> float | None:
        """Share of the steps' time in which the reporting rank exchanged with the others, or waited for
        them; None where no step was measured."""
        return self._share(lambda record: record.comm_time)

    @property
    def data_share(self) -> float | None:
        """Share of the steps' time in which the reporting rank waited for data."""
        return self._share(lambda record: record.data_time)

    @property
    def compute_efficiency(self) -> float | None:
        """Share of the steps' time in which the reporting rank computed."""
        return self._share(
            lambda record: (
                None if record.compute_efficiency is None else record.compute_efficiency * record.seconds
            )
        )

    def _share(self, part: Callable[[StepRecord], float | None]) -> float | None:
        measured = [(found, record.seconds) for record in self.steps if (found := part(record)) is not None]
        whole = math.fsum(seconds for _, seconds in measured)
        return math.fsum(found for found, _ in measured) / whole if whole > 0.0 else None

    def _measured(self, metric: str) -> list[tuple[int, float]]:
        on_validation = [(ev.epoch, ev.metrics[metric]) for ev in self.evaluations if metric in ev.metrics]
        if on_validation:
            return on_validation
        return [(record.epoch, record.metrics[metric]) for record in self.epochs if metric in record.metrics]

    def __repr__(self) -> str:
        """Return one line for a shell or a notebook, however long the run was."""
        parts = [
            counted(len(self.steps), "step"),
            counted(len(self.epochs), "epoch"),
            f"loss {self.final_loss:.4g}",
            *([] if self.best_accuracy is None else [f"best accuracy {self.best_accuracy:.4g}"]),
            *([] if self.stopped is None else [f"stopped: {self.stopped}"]),
            f"{self.total_time:.1f} s",
            counted(self.workers, "worker"),
            *([] if self.run_dir is None else [self.run_dir]),
        ]
        return f"History({', '.join(parts)})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: the records and the figures that follow from them."""
        figures = (
            *("final_loss", "best_accuracy", "best_epoch", "samples_per_second", "skipped_steps"),
            *("communication_share", "data_share", "compute_efficiency"),
        )
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


def earlier_steps(file: Path, before: int) -> list[StepRecord]:
    """Return the steps up to `before` that a journal knows; of a repeated step the last record counts."""
    steps = (event for event in journal.iterate(file) if isinstance(event, StepCommitted))
    found = {event.step: StepRecord.of(event) for event in steps if event.step <= before}
    return [found[step] for step in sorted(found)]


@final
class StepLog(Sequence[StepRecord]):
    """Records by growing step, each step once. Packed, 81 bytes each, so that days of short steps are kept in
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
        timed = record.comm_time is not None
        marks = _SKIPPED * record.skipped + _HAS_NORM * (norm is not None) + _HAS_TIMES * timed
        numbers = (record.loss, record.seconds, record.learning_rate, 0.0 if norm is None else norm)
        times = (record.comm_time, record.data_time, record.compute_efficiency) if timed else _NO_TIMES
        row = _ROW.pack(record.epoch, record.samples, marks, *numbers, *times)
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
        epoch, samples, marks, loss, seconds, rate, norm, *times = _ROW.unpack_from(self._rows, at)
        comm, waited, efficiency = times if marks & _HAS_TIMES else (None, None, None)
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
            comm_time=comm,
            data_time=waited,
            compute_efficiency=efficiency,
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
