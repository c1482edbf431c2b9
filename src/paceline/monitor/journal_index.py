"""Index a journal for an audit, in one pass: which commit of a step counts, and the evidence for each.

A journal may hold several starts of a run. Each supervisor that begins a run counts generations from 1, so
*sessions* distinguish them; generation 0 is a run without a supervisor. A *restart* (run_started or
run_resumed) names the step that the run went back to: earlier entries for later steps were done again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from paceline.core import events
from paceline.core.events import Event

Member: TypeAlias = tuple[int, int, int]
"""A worker process: its rank, its pid, and how many processes of this rank and pid failed before it: in
containers
the next process of a rank often has the pid of the last one."""

ViewKey: TypeAlias = tuple[int, int]
"""A session and a generation of it."""


@dataclass(frozen=True)
class CommittedEntry:
    """A step_committed, with its position in the journal."""

    event: events.StepCommitted
    session: int
    index: int

    @property
    def view(self) -> ViewKey:
        return self.session, self.event.generation


@dataclass
class RunRestart:
    """The run begins, or continues, after `step`; `view` is that of the first step that followed. `disowned`:
    steps after `step` that were computed before may have been wrong."""

    step: int
    index: int
    disowned: bool = False
    view: ViewKey | None = None


@dataclass(frozen=True)
class RecordedReceipt:
    """A worker's receipt: it committed first..last and computed these shards of each."""

    member: Member
    view: ViewKey
    first: int
    last: int
    shards: tuple[int, ...]
    index: int


@dataclass(frozen=True)
class ViewMembers:
    """The processes of a view, and the shards of each. `given` are those that received the state."""

    shards: dict[Member, tuple[int, ...]]
    step: int
    given: frozenset[Member] = frozenset()


@dataclass
class AuditRecord:
    """An indexed journal. `steps` are the commits that count, `lost` those that were done again."""

    started: events.RunStarted | None = None
    ended: events.RunEnded | None = None
    failed: events.RunFailed | None = None
    steps: dict[int, CommittedEntry] = field(default_factory=dict)
    lost: list[CommittedEntry] = field(default_factory=list)
    disowned: set[int] = field(default_factory=set)  # of those that were lost, where they stand
    doubled: list[tuple[CommittedEntry, CommittedEntry]] = field(default_factory=list)
    restarts: list[RunRestart] = field(default_factory=list)
    views: dict[ViewKey, ViewMembers] = field(default_factory=dict)
    view_doubled: list[ViewKey] = field(default_factory=list)
    receipts: list[RecordedReceipt] = field(default_factory=list)
    failures: list[tuple[int, events.WorkerFailed, Member]] = field(default_factory=list)  # with session
    repairs: list[tuple[int, events.Repaired]] = field(default_factory=list)
    skipped: list[tuple[int, events.SampleSkipped]] = field(default_factory=list)  # with their index
    shard_hashes: list[tuple[int, events.ShardHashed]] = field(default_factory=list)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)  # metrics by step
    distrusted: list[int] = field(default_factory=list)  # where a worker was found to compute other bits
    ended_sessions: set[int] = field(default_factory=set)
    supervisors: int = 0

    @property
    def definition(self) -> dict[str, Any]:
        return {} if self.started is None else self.started.definition

    @property
    def size(self) -> int | None:
        """The number of samples in the data, if it is known and not a stream."""
        return None if self.started is None else self.started.samples

    @cached_property
    def last(self) -> int:
        return max(self.steps, default=0)

    @cached_property
    def first(self) -> int:
        return min(self.steps, default=0)

    def commit(self, step: int) -> events.StepCommitted | None:
        """Return the commit of a step that counts."""
        return self.steps[step].event if step in self.steps else None

    def shard_hash(self, step: int, shard: int) -> events.ShardHashed | None:
        """Return the last hash of a shard, without those of work that was lost."""
        for index, event in reversed(self.shard_hashes):
            if (event.step, event.shard) == (step, shard) and not self.superseded(step, index):
                return event
        return None

    def computed_by(self, step: int, shard: int) -> int | None:
        """Return the rank that a shard of a committed step was assigned to, if the journal has it."""
        members = self.views.get(self.steps[step].view)
        assigned = {} if members is None else members.shards
        return next((member[0] for member, shards in assigned.items() if shard in shards), None)

    @cached_property
    def done_again(self) -> frozenset[int]:
        """The first step of each view but the first: an earlier view may have begun it."""
        return frozenset(members.step + 1 for view, members in self.views.items() if view[1] > 1)

    def superseded_after(self, receipt: RecordedReceipt) -> int | None:
        """Return the step after which a receipt is about work that was lost and done again; None: all counts.

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
        """Return whether a line of the journal about `step` is about work that was lost."""
        return any(index < restart.index and restart.step < step for restart in self.restarts)


def read(journal: Iterable[Event]) -> AuditRecord:
    """Sort a journal."""
    record = AuditRecord()
    session = generation = 0
    lives: Counter[tuple[int, int, int]] = Counter()  # failures by session, rank and pid
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
                _take_view(record, event, session, lives)
                generation = event.generation
            case events.RunStarted():
                record.started = event
                _restart(record, RunRestart(0, index, event.disowned))
            case events.RunResumed():
                _restart(record, RunRestart(event.step, index, event.disowned))
            case events.StepCommitted():
                if event.generation == 0 and generation > 0:
                    session, generation = session + 1, 0
                _take_step(record, CommittedEntry(event, session, index))
            case events.StepsReceived():
                view = (session, event.generation)
                member = _member_of(record, view, event.rank, event.pid, lives)
                shards = tuple(sorted(event.shards))
                record.receipts.append(RecordedReceipt(member, view, event.first, event.last, shards, index))
            case events.WorkerFailed():
                process = (session, event.rank, event.pid)
                record.failures.append((session, event, (event.rank, event.pid, lives[process])))
                lives[process] += 1
                if event.cause in ("dissent", "corrupt"):
                    record.distrusted.append(index)
            case events.Repaired():
                record.repairs.append((session, event))
            case events.SampleSkipped():
                record.skipped.append((index, event))
            case events.Evaluated():
                record.evaluations[event.step] = event.metrics
            case events.ShardHashed():
                record.shard_hashes.append((index, event))
            case events.RunFailed():
                record.failed = event
            case events.RunEnded():
                record.ended = event
                record.ended_sessions.add(session)
    return record


def _restart(record: AuditRecord, restart: RunRestart) -> None:
    record.restarts.append(restart)
    record.ended = record.failed = None
    for step in sorted(step for step in record.steps if step > restart.step):
        record.lost.append(record.steps.pop(step))
        if restart.disowned:
            record.disowned.add(record.lost[-1].index)


def _take_step(record: AuditRecord, commit: CommittedEntry) -> None:
    for restart in reversed(record.restarts):
        # What is known from a checkpoint says nothing about the view that follows.
        if restart.view is not None or commit.event.generation == events.RECALLED:
            break
        restart.view = commit.view
    before = record.steps.setdefault(commit.event.step, commit)
    if before is not commit:
        record.doubled.append((before, commit))


def _member_of(
    record: AuditRecord, view: ViewKey, rank: int, pid: int, lives: Counter[tuple[int, int, int]]
) -> Member:
    """Return whose receipt it is. It may come after its sender ended; the view knows which that was."""
    members = record.views.get(view)
    if members is not None:
        for member in members.shards:
            if member[:2] == (rank, pid):
                return member
    return rank, pid, lives[view[0], rank, pid]


def _take_view(
    record: AuditRecord, event: events.ViewChanged, session: int, lives: Counter[tuple[int, int, int]]
) -> None:
    view = (session, event.generation)
    if view in record.views:
        record.view_doubled.append(view)
    shards: dict[Member, tuple[int, ...]] = {}
    for position, rank in enumerate(event.members):
        pid = event.pids[position] if position < len(event.pids) else 0
        member = rank, pid, lives[session, rank, pid]
        shards[member] = tuple(sorted(event.shards[position])) if position < len(event.shards) else ()
    given = frozenset(member for member in shards if member[0] in event.behind)
    record.views[view] = ViewMembers(shards, event.step, given)
