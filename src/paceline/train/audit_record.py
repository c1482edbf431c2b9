"""What an audit needs of a journal, in one pass: which commit of a step counts, and who said what about it.

A journal may hold several starts of a run. Each supervisor that begins a run counts generations from 1, so
they are told apart by *session*; generation 0 is a run that nobody supervised. A *restart* (run_started,
run_resumed) says to which step a run went back: what stands above it for later steps was lost and done again.
Must not judge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from paceline.core import events
from paceline.core.events import Event

Member: TypeAlias = tuple[int, int]
"""A worker process: its rank and its pid."""

View: TypeAlias = tuple[int, int]
"""A session and a generation of it."""


@dataclass(frozen=True)
class Commit:
    """A step_committed, with where it stands in the journal."""

    event: events.StepCommitted
    session: int
    index: int

    @property
    def view(self) -> View:
        return self.session, self.event.generation


@dataclass
class Restart:
    """The run begins, or goes on, after `step`; `view` is that of the first step that followed. `disowned`:
    what was computed after `step` before may have been wrong."""

    step: int
    index: int
    session: int
    disowned: bool = False
    view: View | None = None


@dataclass(frozen=True)
class Receipt:
    """A worker's word: it committed first..last and computed these shards of each."""

    member: Member
    view: View
    first: int
    last: int
    shards: tuple[int, ...]
    index: int


@dataclass(frozen=True)
class Members:
    """The processes of a view, and the shards of each. `given` are those that got the state from another."""

    shards: dict[Member, tuple[int, ...]]
    step: int
    given: frozenset[Member] = frozenset()


@dataclass
class Record:
    """A journal, sorted: not changed once it is read. `steps` are the commits that count, `lost` those that
    were done again."""

    started: events.RunStarted | None = None
    ended: events.RunEnded | None = None
    failed: events.RunFailed | None = None
    steps: dict[int, Commit] = field(default_factory=dict)
    lost: list[Commit] = field(default_factory=list)
    disowned: set[int] = field(default_factory=set)  # of those that were lost, where they stand
    doubled: list[tuple[Commit, Commit]] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    views: dict[View, Members] = field(default_factory=dict)
    view_doubled: list[View] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    failures: list[tuple[int, events.WorkerFailed]] = field(default_factory=list)  # with their session
    repairs: list[tuple[int, events.Repaired]] = field(default_factory=list)
    skipped: list[tuple[int, events.SampleSkipped]] = field(default_factory=list)  # with their index
    shard_hashes: list[tuple[int, events.ShardHashed]] = field(default_factory=list)
    distrusted: list[int] = field(default_factory=list)  # where a worker was found to compute other bits
    ended_sessions: set[int] = field(default_factory=set)
    supervisors: int = 0
    sessions: int = 0

    @cached_property
    def last(self) -> int:
        return max(self.steps, default=0)

    @cached_property
    def done_again(self) -> frozenset[int]:
        """The first step of each view that was not the first: others may have begun it before."""
        return frozenset(members.step + 1 for view, members in self.views.items() if view[1] > 1)

    def superseded_after(self, receipt: Receipt) -> int | None:
        """The step after which this receipt is about work that was lost and done again; None: all counts.

        A restart lost what older views did. A receipt may arrive late, so its view decides where views are
        counted by the same supervisor, else its place in the journal.
        """
        edges = [
            restart.step
            for restart in self.restarts
            if (
                receipt.view < restart.view
                if restart.view is not None and restart.view[0] == receipt.view[0]
                else receipt.index < restart.index
            )
        ]
        return min(edges, default=None)

    def superseded(self, step: int, index: int) -> bool:
        """Whether a line of the journal about `step` is about work that was lost."""
        return any(index < restart.index and restart.step < step for restart in self.restarts)


def read(journal: Iterable[Event]) -> Record:
    """Sort a journal."""
    record = Record()
    session = generation = 0
    for index, event in enumerate(journal):
        match event:
            case events.SupervisorStarted():
                record.supervisors += 1
                # Later attempts look after the same workers.
                if event.attempt <= 1:
                    session, generation = session + 1, 0
            case events.ViewChanged():
                if event.generation < generation:
                    session += 1
                _take_view(record, event, session)
                generation = event.generation
            case events.RunStarted():
                record.started = event
                _restart(record, Restart(0, index, session, event.disowned))
            case events.RunResumed():
                _restart(record, Restart(event.step, index, session, event.disowned))
            case events.StepCommitted():
                if event.generation == 0 and generation > 0:
                    session, generation = session + 1, 0
                _take_step(record, Commit(event, session, index))
            case events.StepsReceived():
                member, view = (event.rank, event.pid), (session, event.generation)
                shards = tuple(sorted(event.shards))
                record.receipts.append(Receipt(member, view, event.first, event.last, shards, index))
            case events.WorkerFailed():
                record.failures.append((session, event))
                if event.cause in ("dissent", "corrupt"):
                    record.distrusted.append(index)
            case events.Repaired():
                record.repairs.append((session, event))
            case events.SampleSkipped():
                record.skipped.append((index, event))
            case events.ShardHashed():
                record.shard_hashes.append((index, event))
            case events.RunFailed():
                record.failed = event
            case events.RunEnded():
                record.ended = event
                record.ended_sessions.add(session)
    record.sessions = session
    return record


def _restart(record: Record, restart: Restart) -> None:
    record.restarts.append(restart)
    record.ended = record.failed = None
    for step in sorted(step for step in record.steps if step > restart.step):
        record.lost.append(record.steps.pop(step))
        if restart.disowned:
            record.disowned.add(record.lost[-1].index)


def _take_step(record: Record, commit: Commit) -> None:
    for restart in reversed(record.restarts):
        # What is known from a checkpoint says nothing about the view that follows.
        if restart.view is not None or commit.event.generation == events.RECALLED:
            break
        restart.session, restart.view = commit.session, commit.view
    before = record.steps.get(commit.event.step)
    if before is not None:
        record.doubled.append((before, commit))
        return
    record.steps[commit.event.step] = commit


def _take_view(record: Record, event: events.ViewChanged, session: int) -> None:
    view = (session, event.generation)
    if view in record.views:
        record.view_doubled.append(view)
    shards: dict[Member, tuple[int, ...]] = {}
    for position, rank in enumerate(event.members):
        pid = event.pids[position] if position < len(event.pids) else 0
        shards[rank, pid] = tuple(sorted(event.shards[position])) if position < len(event.shards) else ()
    given = frozenset(member for member in shards if member[0] in event.behind)
    record.views[view] = Members(shards, event.step, given)
