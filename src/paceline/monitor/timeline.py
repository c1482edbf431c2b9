"""Read a run's timeline from its journal: the lifetime of every worker process, and what happened meanwhile.

Seconds count from when the first worker was ready, and only while workers ran: the time between two starts of
a run, and the first wait for workers, count as none. Pure: timeline_chart.py draws it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, final

from paceline.core import events
from paceline.core.events import Event
from paceline.core.wording import ranks
from paceline.monitor.number_format import duration

TimelineKind = Literal[
    "failed", "repaired", "joined", "left", "checkpoint", "supervisor", "verdict", "resumed", "ended"
]


@final
@dataclass
class WorkerLifetime:
    """One process of a rank: its start, when it became a member, and its end."""

    rank: int
    pid: int
    host: str
    incarnation: int  # of its rank, from 0
    start: float
    joined: float | None = None
    end: float | None = None
    cause: str = ""  # of its failure, one word; empty if it did not fail
    reason: str = ""


@final
@dataclass(frozen=True)
class TimelineEvent:
    """An event at `time`; `since` if it began earlier."""

    kind: TimelineKind
    time: float
    text: str
    rank: int | None = None
    since: float | None = None


@final
@dataclass
class RunTimeline:
    """The timeline of a run."""

    lifetimes: list[WorkerLifetime] = field(default_factory=list)
    events: list[TimelineEvent] = field(default_factory=list)
    views: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)  # of the second start of the run, the third ...
    seconds: float = 0.0


def timeline(journal: Iterable[Event]) -> RunTimeline:
    """Return the timeline of a journal; empty if no worker started."""
    reader = TimelineReader()
    for event in journal:
        reader.read(event)
    reader.close()
    return reader.timeline


@final
class TimelineReader:
    """Builds a timeline from events in their order; one that grows with its journal is never closed."""

    def __init__(self) -> None:
        self.timeline = RunTimeline()
        self._first: float | None = None
        self._last = 0.0  # wall clock of the newest event
        self._cut = 0.0  # seconds in which no worker ran
        self._awaited = False  # a supervisor has started, and nothing has happened since
        self._open: dict[int, WorkerLifetime] = {}
        self._processes: dict[int, int] = {}
        self._over = False
        self._step = 0
        self._viewed = False

    def read(self, event: Event) -> None:
        if not math.isfinite(event.time):
            return
        if self._first is None:
            self._first = self._last = event.time
        elif self._begins(event):
            self._start_again(event.time)
        elif self._awaited:
            self._cut += max(0.0, event.time - self._last)
        self._awaited = isinstance(event, events.SupervisorStarted) and event.attempt <= 1
        # A clock that was set back stands still.
        self._last = max(self._last, event.time)
        now = self._now
        self.timeline.seconds = max(self.timeline.seconds, now)
        match event:
            case events.WorkerStarted():
                self._begin(event.rank, event.pid, event.host, now)
            case events.ViewChanged():
                self._take_view(event, now)
            case events.WorkerFailed():
                self._fail(event, now)
            case events.Repaired():
                lost = f" without {ranks(event.lost)}" if event.lost else ""
                text = f"repaired in {duration(event.seconds)}{lost}"
                self._add("repaired", text, since=max(0.0, now - max(0.0, event.seconds)))
            case events.CheckpointSaved():
                self._add("checkpoint", f"checkpoint {event.version} of step {event.step:,} is durable")
            case events.SupervisorStarted():
                again = "the supervisor starts" if event.attempt <= 1 else "a new supervisor takes over"
                self._add("supervisor", f"{again} (pid {event.pid})")
            case events.Verdict():
                self._add("verdict", event.text or f"rank {event.rank}: {event.action}", rank=event.rank)
            case events.RunResumed():
                self._add("resumed", f"resumed from checkpoint {event.version}, after step {event.step:,}")
            case events.StepCommitted():
                self._step = event.step
                self.timeline.commits.append(now)
            case events.RunEnded():
                self._over = True
                self._add("ended", f"step {event.step:,}: {event.reason}")

    def close(self) -> None:
        for lifetime in self._open.values():
            lifetime.end = self._now
        self._open = {}

    @property
    def _now(self) -> float:
        return self._last - (self._first or 0.0) - self._cut

    def _add(
        self, kind: TimelineKind, text: str, *, rank: int | None = None, since: float | None = None
    ) -> None:
        self.timeline.events.append(TimelineEvent(kind, self._now, text, rank, since))

    def _begins(self, event: Event) -> bool:
        """Return whether the run is started again: by a supervisor, or by workers in a run without one."""
        if isinstance(event, events.SupervisorStarted):
            return event.attempt <= 1 and bool(self.timeline.lifetimes)
        return self._over and isinstance(event, events.WorkerStarted)

    def _start_again(self, time: float) -> None:
        self.close()
        self._cut += max(0.0, time - self._last)
        self._last = max(self._last, time)
        self._over = self._viewed = False
        self.timeline.starts.append(self._now)

    def _begin(self, rank: int, pid: int, host: str, now: float) -> WorkerLifetime:
        before = self._open.pop(rank, None)
        if before is not None:
            before.end = now
        number = self._processes.get(rank, 0)
        self._processes[rank] = number + 1
        lifetime = WorkerLifetime(rank, pid, host, number, now)
        self._open[rank] = lifetime
        self.timeline.lifetimes.append(lifetime)
        return lifetime

    def _take_view(self, event: events.ViewChanged, now: float) -> None:
        self.timeline.views.append(now)
        hosts = [*event.hosts, *[""] * len(event.members)]
        for rank, pid, host in zip(event.members, event.pids, hosts, strict=False):
            lifetime = self._open.get(rank)
            if lifetime is None or lifetime.pid != pid:
                lifetime = self._begin(rank, pid, host, now)
            if lifetime.joined is None:
                lifetime.joined = now
                if self._viewed:
                    what = "joins" if lifetime.incarnation == 0 else "is replaced"
                    self._add(
                        "joined", f"rank {rank} {what} (pid {pid}) after step {event.step:,}", rank=rank
                    )
        for rank in [rank for rank in self._open if rank not in event.members]:
            if self._open[rank].joined is not None:
                self._open.pop(rank).end = now
                self._add("left", f"rank {rank} leaves after step {event.step:,}", rank=rank)
        self._viewed = True

    def _fail(self, event: events.WorkerFailed, now: float) -> None:
        lifetime = self._open.get(event.rank)
        if lifetime is None or lifetime.pid != event.pid:
            known = [one for one in self.timeline.lifetimes if (one.rank, one.pid) == (event.rank, event.pid)]
            lifetime = known[-1] if known else self._begin(event.rank, event.pid, event.host, now)
        if self._open.get(event.rank) is lifetime:
            del self._open[event.rank]
            lifetime.end = now
        if event.cause in ("preempted", "unattended", "restart"):
            self._add("left", f"rank {event.rank} leaves after step {self._step:,}", rank=event.rank)
            return
        lifetime.cause, lifetime.reason = event.cause or "failed", event.reason
        phase = f" in {event.phase}" if event.phase else ""
        text = f"rank {event.rank} (pid {event.pid}) fails{phase} after step {self._step:,}: {event.reason}"
        self._add("failed", text, rank=event.rank)
