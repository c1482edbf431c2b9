"""The state of a run at one moment, read from its journal as it grows: for `paceline monitor`. Pure.

Speed and the share of communication are those of the last steps, so that they follow what the run does now.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from paceline.core import events
from paceline.core.events import Event
from paceline.monitor.timeline import TimelineEvent, TimelineReader, WorkerLifetime

RECENT_STEPS: Final = 50
SHOWN_LOSSES: Final = 4096
"""Losses that are kept for the curve: every one of a short run, every second, fourth, ... of a longer one."""

OverviewPhase = Literal["starting", "training", "finished", "stopped", "failed"]


@final
@dataclass(frozen=True)
class OverviewWorker:
    """A rank as the journal shows it now. `processes` counts all that ever had the rank."""

    rank: int
    pid: int
    host: str
    condition: Literal["starting", "training", "left", "failed", "ended"]
    processes: int
    shards: tuple[int, ...] = ()
    remark: str = ""


@final
class RunOverview:
    """Figures of a run; `read` takes one event after the other. `settings` are those of its config.toml."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self._settings = settings or {}
        self._reader = TimelineReader()
        self._recent: deque[events.StepCommitted] = deque(maxlen=RECENT_STEPS)
        self._shards: dict[int, tuple[int, ...]] = {}
        self._total: int | None = None
        self._every = 1
        self.phase: OverviewPhase = "starting"
        self.reason = ""
        self.step = 0
        self.epoch = 0
        self.losses: list[float] = []
        self.validation: dict[str, float] = {}
        self.failures = 0
        self.repair_seconds: list[float] = []
        self.version: int | None = None
        self.state_hash = ""
        self.first_time = self.last_time = math.nan

    def read(self, event: Event) -> None:
        """Take the next event of the journal."""
        self._reader.read(event)
        if math.isfinite(event.time):
            self.first_time = event.time if math.isnan(self.first_time) else self.first_time
            self.last_time = event.time
        match event:
            case events.RunStarted():
                self._total = _planned_steps(self._settings, event)
                self._begin_again(0)
            case events.RunResumed():
                self._begin_again(event.step)
                self.epoch = event.epoch
            case events.SupervisorStarted():
                self.phase, self.reason = "starting", ""
            case events.ViewChanged():
                self._shards = {
                    rank: tuple(shards) for rank, shards in zip(event.members, event.shards, strict=False)
                }
            case events.StepCommitted():
                self._take_step(event)
            case events.Evaluated():
                self.validation = dict(event.metrics)
            case events.WorkerFailed():
                self.failures += event.cause not in ("preempted", "unattended", "restart")
            case events.Repaired():
                self.repair_seconds.append(event.seconds)
            case events.CheckpointSaved():
                self.version = event.version
            case events.RunEnded():
                self.phase = "finished" if event.reason == "finished" else "stopped"
                self.reason, self.state_hash = event.reason, event.hash
            case events.RunFailed():
                self.phase, self.reason = "failed", event.reason

    @property
    def is_over(self) -> bool:
        """Return whether the journal has the end of the run."""
        return self.phase in ("finished", "stopped", "failed")

    @property
    def total_steps(self) -> int | None:
        """The step at which the run ends, where its settings and its data say so."""
        return self._total

    @property
    def seconds(self) -> float:
        """How long workers have run, over all starts."""
        return self._reader.timeline.seconds

    @property
    def happened(self) -> list[TimelineEvent]:
        """What happened, oldest first."""
        return self._reader.timeline.events

    @property
    def loss(self) -> float:
        return self._recent[-1].loss if self._recent else math.nan

    @property
    def learning_rate(self) -> float:
        return self._recent[-1].learning_rate if self._recent else math.nan

    @property
    def samples_per_second(self) -> float:
        """Of the last steps, without the first of the run where there are others: it warms up."""
        measured = [step for step in self._recent if step.step > 1] or list(self._recent)
        seconds = math.fsum(step.seconds for step in measured)
        return sum(step.samples for step in measured) / seconds if seconds > 0.0 else math.nan

    @property
    def communication_share(self) -> float | None:
        """The part of the last steps' time that was spent on communication; None where it is not measured."""
        measured = [(step.comm_time, step.seconds) for step in self._recent if step.comm_time is not None]
        whole = math.fsum(seconds for _, seconds in measured)
        return math.fsum(seconds for seconds, _ in measured) / whole if whole > 0.0 else None

    @property
    def workers(self) -> list[OverviewWorker]:
        """The newest process of every rank."""
        newest: dict[int, WorkerLifetime] = {}
        for lifetime in self._reader.timeline.lifetimes:
            newest[lifetime.rank] = lifetime
        return [self._worker(newest[rank]) for rank in sorted(newest)]

    def _worker(self, lifetime: WorkerLifetime) -> OverviewWorker:
        shards: tuple[int, ...] = ()
        condition: Literal["starting", "training", "left", "failed", "ended"]
        if lifetime.cause:
            condition = "failed"
        elif self.is_over:
            condition = "ended"
        elif lifetime.end is not None:
            condition = "left"
        elif lifetime.joined is None and self._shards:
            condition = "starting"
        else:
            condition, shards = "training", self._shards.get(lifetime.rank, ())
        return OverviewWorker(
            rank=lifetime.rank,
            pid=lifetime.pid,
            host=lifetime.host,
            condition=condition,
            processes=lifetime.incarnation + 1,
            shards=shards,
            remark=lifetime.reason,
        )

    def _begin_again(self, step: int) -> None:
        self.phase, self.reason, self.step = "training", "", step
        self._recent.clear()
        del self.losses[step // self._every :]

    def _take_step(self, event: events.StepCommitted) -> None:
        self.phase = "training"
        self.step, self.epoch = event.step, event.epoch
        self._recent.append(event)
        if event.step % self._every == 0:
            self.losses.append(event.loss)
        if len(self.losses) >= SHOWN_LOSSES:
            self.losses = self.losses[1::2]
            self._every *= 2


def _planned_steps(settings: Mapping[str, Any], started: events.RunStarted) -> int | None:
    most, epochs = settings.get("max_steps"), settings.get("epochs")
    limits = [most] if isinstance(most, int) else []
    batch = started.definition.get("global_batch")
    dynamic = started.definition.get("dynamic_batch")
    if isinstance(epochs, int) and isinstance(batch, int) and started.samples is not None and not dynamic:
        left = started.samples % batch
        whole = started.samples // batch
        limits.append(epochs * (whole + bool(left and not started.definition.get("drop_last"))))
    return min(limits, default=None)
