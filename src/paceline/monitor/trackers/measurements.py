"""What trackers write of a run: records turned into rows of named numbers. Pure.

Names are paths, as TensorBoard and MLflow group them: train/, validation/, epoch/, gpu/ and those that the
user's code reports.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from paceline.core.events import MetricReported
from paceline.train.history import EpochRecord, Evaluation, History, StepRecord

TRAIN, VALIDATION, EPOCH = "train", "validation", "epoch"
_UNUSUAL = re.compile(r"[^A-Za-z0-9_\-./ ]")


@final
@dataclass(frozen=True)
class TrackedRow:
    """Numbers of one moment: after `step`, at `time` (seconds since 1970)."""

    step: int
    time: float
    values: Mapping[str, float]


@final
@dataclass
class StepWindow:
    """The steps since the last row: rates are over all of them, everything else is that of the newest."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    comm_time: float = 0.0
    data_time: float = 0.0
    compute_time: float = 0.0
    timed: float = 0.0  # seconds of those steps whose parts were measured
    timed_steps: int = 0
    newest: StepRecord | None = None

    def add(self, record: StepRecord) -> None:
        self.newest = record
        self.steps += 1
        self.samples += record.samples
        self.seconds += record.seconds
        if record.comm_time is not None:
            self.timed += record.seconds
            self.timed_steps += 1
            self.comm_time += record.comm_time
            self.data_time += record.data_time or 0.0
            self.compute_time += (record.compute_efficiency or 0.0) * record.seconds

    def values(self, workers: int) -> dict[str, float]:
        """Return the row's numbers; what was not measured is left out."""
        record = self.newest
        assert record is not None
        found: dict[str, float | None] = {
            "loss": record.loss,
            **record.metrics,
            "learning_rate": record.learning_rate,
            "grad_norm": record.grad_norm,
            "samples_per_second": self.samples / self.seconds if self.seconds > 0.0 else None,
            "step_seconds": self.seconds / self.steps if self.seconds > 0.0 else None,
            "comm_time": self._mean(self.comm_time),
            "data_time": self._mean(self.data_time),
            "communication_share": self._share(self.comm_time),
            "data_share": self._share(self.data_time),
            "compute_efficiency": self._share(self.compute_time),
            "workers": workers,
            "epoch": record.epoch,
        }
        return {f"{TRAIN}/{name}": float(value) for name, value in found.items() if value is not None}

    def _mean(self, seconds: float) -> float | None:
        return seconds / self.timed_steps if self.timed_steps else None

    def _share(self, seconds: float) -> float | None:
        return seconds / self.timed if self.timed > 0.0 else None


def evaluation_values(evaluation: Evaluation) -> dict[str, float]:
    return {f"{VALIDATION}/{name}": value for name, value in evaluation.metrics.items()}


def epoch_values(record: EpochRecord) -> dict[str, float]:
    values = {"loss": record.loss, **record.metrics, "seconds": record.seconds}
    return {f"{EPOCH}/{name}": value for name, value in values.items()}


def reported_name(metric: MetricReported) -> str:
    """Return the name of a reported metric with its tags, and with its rank if that is not the first: several
    ranks may report the same name in the same step."""
    tags = dict(metric.tags) | ({"rank": str(metric.rank)} if metric.rank else {})
    return "/".join([metric.name, *(f"{key}_{tags[key]}" for key in sorted(tags))])


def plain_name(name: str) -> str:
    """Return a name in letters that every service takes."""
    return _UNUSUAL.sub("_", name)


def summary(history: History) -> dict[str, float]:
    """Return the figures of a whole run. The speed-up is an estimate: the workers times the share of time in
    which they computed, not a comparison with a run on one worker."""
    efficiency = history.compute_efficiency
    found = {
        "total_time": history.total_time,
        "final_loss": history.final_loss,
        "best_accuracy": history.best_accuracy,
        "samples_per_second": history.samples_per_second,
        "communication_share": history.communication_share,
        "data_share": history.data_share,
        "compute_efficiency": efficiency,
        "speedup_estimate": None if efficiency is None else history.workers * efficiency,
    }
    return {name: v for name, v in found.items() if v is not None and not math.isnan(v)}
