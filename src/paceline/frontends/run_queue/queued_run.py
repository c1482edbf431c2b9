"""A run in the queue: the request as it was added, and what became of it. Plain data, written as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, final

from paceline.core.wording import counted

QueueState = Literal["waiting", "running", "stopping", "held", "finished", "failed", "cancelled"]
Intent = Literal["run", "hold", "cancel", "kill"]
"""What the user wants: that it runs, that it is stopped and kept, that it is stopped for good, that it is
killed."""

ENDED: Final = ("finished", "failed", "cancelled")
ACTIVE: Final = ("running", "stopping")
_KEPT_NOTES: Final = 20


@final
@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What `paceline queue add` was asked for.

    options      of `paceline train`, with the script among them; `arguments` are those behind --
    folder       in which the script is started, by `python`
    environment  variables that are added to those of the server
    run_dir      the run's folder, the same at every start
    least, most  workers; with an engine multiples of `per_node`, the workers of one of its nodes
    """

    script: str
    options: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    folder: str
    python: str
    environment: Mapping[str, str] = field(default_factory=dict)
    run_dir: str
    name: str
    priority: int = 0
    least: int = 1
    most: int = 1
    per_node: int = 0

    @property
    def size(self) -> str:
        """The number of workers as people write it."""
        return str(self.most) if self.least == self.most else f"{self.least}-{self.most}"


@final
@dataclass(frozen=True, kw_only=True)
class RunNote:
    """Something that happened to the run, with the wall-clock time."""

    time: float
    text: str


@final
@dataclass(frozen=True, kw_only=True)
class QueuedRun:
    """One run of the queue.

    since      wall-clock time at which it came into its state
    workers    granted to it; 0 unless it runs or is stopping
    begun_with workers of its last start
    attempt    how often it was started
    floor      fewest workers that this start accepts
    host       on which it was started, with the time of that machine's start (core.host)
    crashes    in a row without a step between them; `crash_step` is the step of the last one
    not_before wall-clock time before which it is not started again
    signalled  the attempt that was sent SIGTERM: a second one would end it without saving
    reason     of its state, in a sentence; `tail` are the last lines of its output if it failed
    """

    id: int
    request: RunRequest
    added: float
    since: float
    state: QueueState = "waiting"
    intent: Intent = "run"
    workers: int = 0
    begun_with: int = 0
    attempt: int = 0
    floor: int = 0
    host: str = ""
    crashes: int = 0
    crash_step: int = 0
    not_before: float = 0.0
    signalled: int = 0
    code: int | None = None
    reason: str = ""
    tail: tuple[str, ...] = ()
    notes: tuple[RunNote, ...] = ()

    @property
    def label(self) -> str:
        return f"run {self.id} ({self.request.name})"

    def noted(self, now: float, text: str) -> QueuedRun:
        """Return it with one more note, and without the oldest where there are many."""
        return replace(self, notes=(*self.notes, RunNote(time=now, text=text))[-_KEPT_NOTES:])

    def moved(self, now: float, state: QueueState, reason: str = "") -> QueuedRun:
        """Return it in another state, with a note."""
        text = f"{state}: {reason}" if reason else state
        workers = self.workers if state in ACTIVE else 0
        return replace(self, state=state, since=now, reason=reason, workers=workers).noted(now, text)

    def started(self, now: float, workers: int, host: str) -> QueuedRun:
        """Return it as it is just before its process is started."""
        begun = replace(
            self,
            workers=workers,
            begun_with=workers,
            attempt=self.attempt + 1,
            floor=self.request.least,
            host=host,
            code=None,
            tail=(),
            not_before=0.0,
        )
        again = "" if begun.attempt == 1 else f", start {begun.attempt}"
        moved = begun.moved(now, "running", f"{counted(workers, 'worker')}{again}")
        return replace(moved, reason="")


@final
@dataclass(frozen=True, kw_only=True)
class QueueContent:
    """All of the queue. `capacity`: the workers that a server was told to use; 0: those of its machine, of
    which the server that serves now has counted `counted`."""

    runs: tuple[QueuedRun, ...] = ()
    next_id: int = 1
    capacity: int = 0
    counted: int = 0

    def with_run(self, run: QueuedRun) -> QueueContent:
        """Return the queue with this run in the place of the one of its number, or at the end."""
        known = any(one.id == run.id for one in self.runs)
        runs = tuple(run if one.id == run.id else one for one in self.runs) if known else (*self.runs, run)
        return replace(self, runs=runs, next_id=max(self.next_id, run.id + 1))

    def updated(self, number: int, change: Callable[[QueuedRun], QueuedRun]) -> QueueContent:
        """Return the queue with this run as `change` makes it; as it is where the run is gone."""
        runs = tuple(change(one) if one.id == number else one for one in self.runs)
        return replace(self, runs=runs)

    @property
    def has_work(self) -> bool:
        """Whether a server has something to do, or to wait for."""
        return any(run.state in ("waiting", *ACTIVE) for run in self.runs)
