"""What a run was: records of its steps, epochs and evaluations, and the figures that follow from them.

Plain frozen data that goes to JSON and back. Must not know how training works, nor how a plot is drawn.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from paceline.core import typed
from paceline.core.errors import PlatformError, UsageError
from paceline.core.events import StepCommitted, finite

_FORMAT = 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
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

    @staticmethod
    def of(event: StepCommitted) -> StepRecord:
        """The record of a step that the journal tells of."""
        return StepRecord(
            step=event.step,
            epoch=event.epoch,
            loss=event.loss,
            samples=event.samples,
            seconds=event.seconds,
            learning_rate=event.learning_rate,
            grad_norm=event.grad_norm,
            skipped=event.skipped,
            metrics=event.metrics,
        )

    def timeless(self) -> StepRecord:
        """The same without its time, which differs from rank to rank: what modifiers may decide by."""
        return dataclasses.replace(self, seconds=0.0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
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
class EpochRecord:
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
    """The outcome of `fit`. `stopped` says why it ended before its time; None is to the end.

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
        """Plain data for JSON: the records and the figures that follow from them."""
        return {
            "format": _FORMAT,
            "total_time": self.total_time,
            "final_loss": self.final_loss,
            "best_accuracy": self.best_accuracy,
            "best_epoch": self.best_epoch,
            "samples_per_second": self.samples_per_second,
            "state_hash": self.state_hash,
            "workers": self.workers,
            "shards": self.shards,
            "run_dir": self.run_dir,
            "stopped": self.stopped,
            "unfinished": None if self.unfinished is None else dataclasses.asdict(self.unfinished),
            "epochs": [dataclasses.asdict(record) for record in self.epochs],
            "evaluations": [dataclasses.asdict(record) for record in self.evaluations],
            "steps": [dataclasses.asdict(record) for record in self.steps],
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON; NaN and infinities, which JSON lacks, become strings that `load` understands."""
        target = Path(path)
        text = json.dumps(finite(self.to_dict()), allow_nan=False, indent=1)
        part = target.with_name(target.name + ".part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(target)
        except OSError as error:
            raise PlatformError(
                f"the history cannot be written to {target}: {error.strerror}",
                remedy="check that its folder may be written to and that the disk has space",
            ) from error
        return target

    @staticmethod
    def from_dict(data: Mapping[str, Any], origin: str = "this") -> History:
        """What `to_dict` returned, as a history again."""
        if data.get("format") != _FORMAT:
            raise UsageError(
                f"{origin} is not a history of format {_FORMAT}: found {data.get('format')!r}",
                remedy="give what this version's History wrote",
            )
        known = typed.fields_of(History)
        try:
            history = typed.convert({key: data[key] for key in known if key in data}, History, "")
        except (typed.MismatchError, typed.UnknownKeyError, typed.MissingKeyError) as error:
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
        if not isinstance(data, dict):
            raise UsageError(
                f"{path} is not a history of format {_FORMAT}: found {type(data).__name__!r}",
                remedy="give a file that this version's History.save wrote",
            )
        return History.from_dict(data, str(path))

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the curves to a PNG, SVG or PDF (needs matplotlib) or to an HTML report (needs nothing)."""
        from paceline.train.plot import draw

        return draw([self], path)


def _best(measured: Sequence[tuple[int, float]], *, highest: bool) -> tuple[int, float] | None:
    """The first of the best; what is not a number cannot win."""
    real = [pair for pair in measured if not math.isnan(pair[1])]
    if not real:
        return None
    return max(real, key=lambda pair: pair[1]) if highest else min(real, key=lambda pair: pair[1])
