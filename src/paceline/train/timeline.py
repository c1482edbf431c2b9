"""Who worked when, from the journal alone: the life of every worker process, and what happened meanwhile.

Seconds count from when the first worker was ready, and only while somebody ran: between two starts of a run,
and while workers are awaited for the first time, lie none. Pure: no drawing here (timeline_chart.py). Must
not know SVG, HTML or files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, final

from paceline.core import events
from paceline.core.events import Event

Kind = Literal[
    "failed", "repaired", "joined", "left", "checkpoint", "supervisor", "verdict", "resumed", "ended"
]


@final
@dataclass
class Life:
    """One process of a rank: from its start to its end, and from when on it was a member."""

    rank: int
    pid: int
    host: str
    incarnation: int  # of its rank, from 0
    start: float
    joined: float | None = None
    end: float | None = None
    cause: str = ""  # of its failure: one word; empty where it did not fail
    reason: str = ""


@final
@dataclass(frozen=True)
class Happening:
    """Something at a moment; `since` where it began earlier."""

    kind: Kind
    time: float
    text: str
    rank: int | None = None
    since: float | None = None


@final
@dataclass
class Timeline:
    """All of a run."""

    lives: list[Life] = field(default_factory=list)
    happenings: list[Happening] = field(default_factory=list)
    views: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)  # of the second start of the run, the third ...
    seconds: float = 0.0

    @property
    def ranks(self) -> list[int]:
        return sorted({life.rank for life in self.lives})


def timeline(journal: Iterable[Event]) -> Timeline:
    """The timeline of a journal; an empty one where no worker started."""
    reader = _Reader()
    for event in journal:
        if math.isfinite(event.time):
            reader.read(event)
    reader.close()
    return reader.made


@final
class _Reader:
    """Walks through a journal once."""

    def __init__(self) -> None:
        self.made = Timeline()
        self._first: float | None = None
        self._last = 0.0  # wall clock of the newest event
        self._cut = 0.0  # seconds in which nobody ran
        self._awaited = False  # a supervisor has started, and nothing else since
        self._open: dict[int, Life] = {}
        self._lives: dict[int, int] = {}
        self._over = False
        self._step = 0
        self._viewed = False

    def read(self, event: Event) -> None:
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
        self.made.seconds = max(self.made.seconds, now)
        match event:
            case events.WorkerStarted():
                self._begin(event.rank, event.pid, event.host, now)
            case events.ViewChanged():
                self._take_view(event, now)
            case events.WorkerFailed():
                self._fail(event, now)
            case events.Repaired():
                lost = ", ".join(map(str, event.lost))
                text = f"repaired in {_seconds(event.seconds)}" + (f" without rank {lost}" if lost else "")
                self._say("repaired", text, since=max(0.0, now - max(0.0, event.seconds)))
            case events.CheckpointSaved():
                self._say("checkpoint", f"checkpoint {event.version} of step {event.step:,} is durable")
            case events.SupervisorStarted():
                again = "the supervisor starts" if event.attempt <= 1 else "a new supervisor takes over"
                self._say("supervisor", f"{again} (pid {event.pid})")
            case events.Verdict():
                self._say("verdict", event.text or f"rank {event.rank}: {event.action}", rank=event.rank)
            case events.RunResumed():
                self._say("resumed", f"goes on from checkpoint {event.version}, after step {event.step:,}")
            case events.StepCommitted():
                self._step = event.step
                self.made.commits.append(now)
            case events.RunEnded():
                self._over = True
                self._say("ended", f"step {event.step:,}: {event.reason}")

    def close(self) -> None:
        for life in self._open.values():
            life.end = self._now
        self._open = {}

    @property
    def _now(self) -> float:
        return self._last - (self._first or 0.0) - self._cut

    def _say(self, kind: Kind, text: str, *, rank: int | None = None, since: float | None = None) -> None:
        self.made.happenings.append(Happening(kind, self._now, text, rank, since))

    def _begins(self, event: Event) -> bool:
        """Whether somebody starts the run again: another supervisor, or workers where nobody supervises."""
        if isinstance(event, events.SupervisorStarted):
            return event.attempt <= 1 and bool(self.made.lives)
        return self._over and isinstance(event, events.WorkerStarted)

    def _start_again(self, time: float) -> None:
        self.close()
        self._cut += max(0.0, time - self._last)
        self._last = max(self._last, time)
        self._over = self._viewed = False
        self.made.starts.append(self._now)

    def _begin(self, rank: int, pid: int, host: str, now: float) -> Life:
        before = self._open.pop(rank, None)
        if before is not None:
            before.end = now
        number = self._lives.get(rank, 0)
        self._lives[rank] = number + 1
        life = Life(rank, pid, host, number, now)
        self._open[rank] = life
        self.made.lives.append(life)
        return life

    def _take_view(self, event: events.ViewChanged, now: float) -> None:
        self.made.views.append(now)
        hosts = [*event.hosts, *[""] * len(event.members)]
        for rank, pid, host in zip(event.members, event.pids, hosts, strict=False):
            life = self._open.get(rank)
            if life is None or life.pid != pid:
                life = self._begin(rank, pid, host, now)
            if life.joined is None:
                life.joined = now
                if self._viewed:
                    what = "joins" if life.incarnation == 0 else "is replaced"
                    self._say(
                        "joined", f"rank {rank} {what} (pid {pid}) after step {event.step:,}", rank=rank
                    )
        for rank in [rank for rank in self._open if rank not in event.members]:
            if self._open[rank].joined is not None:
                self._open.pop(rank).end = now
                self._say("left", f"rank {rank} leaves after step {event.step:,}", rank=rank)
        self._viewed = True

    def _fail(self, event: events.WorkerFailed, now: float) -> None:
        life = self._open.get(event.rank)
        if life is None or life.pid != event.pid:
            known = [one for one in self.made.lives if (one.rank, one.pid) == (event.rank, event.pid)]
            life = known[-1] if known else self._begin(event.rank, event.pid, event.host, now)
        if self._open.get(event.rank) is life:
            del self._open[event.rank]
            life.end = now
        if event.cause in ("preempted", "unattended", "restart"):
            self._say("left", f"rank {event.rank} leaves after step {self._step:,}", rank=event.rank)
            return
        life.cause, life.reason = event.cause or "failed", event.reason
        phase = f" in {event.phase}" if event.phase else ""
        text = f"rank {event.rank} (pid {event.pid}) fails{phase} after step {self._step:,}: {event.reason}"
        self._say("failed", text, rank=event.rank)


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1.0 else f"{value:.1f} s"
