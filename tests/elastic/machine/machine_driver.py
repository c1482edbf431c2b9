"""Drives the machine by hand: says what members would say, and checks the invariants after each word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.control.field_types import Progress
from paceline.control.messages import (
    CollectiveFailed,
    ControlMessage,
    DialResult,
    Heartbeat,
    LeaveRequest,
    MemberFinished,
    MemberHello,
    MemberReport,
    Prepare,
    StepReceipt,
    ViewInstalled,
    ViewPlan,
    WorkerException,
)
from paceline.elastic.machine import invariants, machine
from paceline.elastic.machine.actions import Action, InstallView, RequestDial, Send, StartWorker
from paceline.elastic.machine.hash_votes import Trail
from paceline.elastic.machine.machine_events import FromMember, MachineEvent, SupervisorBegan, Tick
from paceline.elastic.machine.settings import MachineSettings
from paceline.elastic.machine.state import JobPhase, JobState, WorkerStatus, in_view

A = TypeVar("A")


class Driven:
    """A job whose members do what they are told, when the test says so."""

    def __init__(
        self, workers: int = 4, shards: int = 8, began: SupervisorBegan | None = None, **settings: object
    ):
        self.state: JobState = JobState(MachineSettings(workers=workers, shards=shards, **settings))  # type: ignore[arg-type]
        self.now = 100.0
        self.actions: list[Action] = []
        self.reason = ""
        self.tell(began if began is not None else SupervisorBegan())

    def tell(self, event: MachineEvent, after: float = 0.0) -> list[Action]:
        """One event; the invariants hold, the state that was given is as it was, and there is a reason."""
        self.now += after
        before = self.state
        kept = _snapshot(before)
        self.state, actions, self.reason = machine.step(before, event, self.now)
        self.actions = list(actions)
        assert _snapshot(before) == kept, f"step changed its argument on {event}"
        broken = invariants.validate(self.state)
        broken += invariants.validate_step(before, self.state, actions, self.reason)
        assert broken == [], f"{event}: {broken}"
        assert machine.allowed(before.phase, machine.kind_of(event), self.state.phase), (
            f"{before.phase} {event} {self.state.phase}"
        )
        return self.actions

    def wait(self, seconds: float, beating: bool = True) -> list[Action]:
        """Let time pass with a tick whenever one is due, while all members beat or none does."""
        until = self.now + seconds
        told: list[Action] = []
        while self.now < until:
            due = machine.next_deadline(self.state)
            next_beat = self.now + self.state.settings.heartbeat
            self.now = min([until, next_beat] + ([max(due, self.now)] if due is not None else []))
            if beating and self.now == next_beat:
                for number in list(self.state.heartbeats):
                    told += self.tell(FromMember(number, self.state.heartbeats[number]))
            due = machine.next_deadline(self.state)
            if due is not None and self.now >= due:
                told += self.tell(Tick())
            if due is None:
                break
        return told

    def running(self) -> Driven:
        """All came, and are in their first view."""
        self.join_all()
        self.install_all()
        assert self.state.phase is JobPhase.RUNNING
        return self

    def join_all(self, meet: bool = True) -> list[Action]:
        """All who were started come; `meet`: those of other places reach their peers, and are reached."""
        told: list[Action] = []
        for worker in list(self.state.workers.values()):
            if worker.status is WorkerStatus.STARTING:
                told += self.tell(hello_of(worker.number, worker.slot, worker.agent_id))
        return told + self.meet_all(told) if meet else told

    def meet_all(self, told: Sequence[Action]) -> list[Action]:
        """Every probe that was asked for succeeds, in both directions."""
        more: list[Action] = []
        for action in some(told, RequestDial):
            for peer in action.peers:
                more += self.tell(dial_of(action.member, peer))
                more += self.tell(dial_of(peer, action.member))
        return more

    def report_all(self, progress: Progress | None = (5, 0, 0), **held: tuple[int, ...]) -> list[Action]:
        """All who are asked report; joiners have nothing. `held` by "m3" for member 3."""
        told: list[Action] = []
        for number in sorted(self.state.pending):
            new = self.state.workers[number].status is WorkerStatus.READY
            have = None if new else progress
            told += self.tell(report_of(number, self.state.generation, have, held.get(f"m{number}", ())))
        return told

    def install_all(self) -> list[Action]:
        told: list[Action] = []
        for number in sorted(self.state.pending):
            told += self.tell(installed_by(number, self.state.generation))
        return told

    def form_view(self, progress: Progress | None = (5, 0, 0), **held: tuple[int, ...]) -> ViewPlan:
        """All report and install what follows."""
        assert self.state.phase is JobPhase.PREPARING, self.state.phase
        told = self.report_all(progress, **held)
        plan = only(told, InstallView).plan
        self.install_all()
        return plan

    def beat_all(self, steps: int = 5, phase: str = "forward", **of: FromMember) -> None:
        """A heartbeat of every member of the view."""
        for worker in in_view(self.state):
            mine = of.get(f"m{worker.number}")
            self.tell(mine or beat_of(worker.number, phase, 0.01, (steps, 0, 0), (), 0.01, 0.02))

    @property
    def members(self) -> list[int]:
        return sorted(worker.number for worker in in_view(self.state))

    def of_slot(self, slot: int) -> int:
        number = self.state.slots[slot].worker
        assert number is not None
        return number


def _snapshot(state: JobState) -> dict[str, object]:
    """The fields, dictionaries copied: what is in them are frozen values."""
    fields = dict(state.__dict__)
    for name, value in fields.items():
        if isinstance(value, dict):
            fields[name] = dict(value)
    fields["votes"] = {step: dict(cast) for step, cast in state.votes.items()}
    return fields


def only(actions: Sequence[object], kind: type[A]) -> A:
    """The one action of this kind."""
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, f"{len(found)} of {kind.__name__} in {actions}"
    return found[0]


def some(actions: Sequence[object], kind: type[A]) -> list[A]:
    """All actions of this kind."""
    return [action for action in actions if isinstance(action, kind)]


def started(actions: Sequence[object]) -> list[int]:
    """The slots that workers were asked for."""
    return [action.slot for action in some(actions, StartWorker)]


@dataclass(frozen=True)
class Sent:
    """A message and the members it goes to; its fields are those of the message too."""

    members: tuple[int, ...]
    message: ControlMessage

    @property
    def member(self) -> int:
        (one,) = self.members
        return one

    def __getattr__(self, name: str) -> Any:
        return getattr(self.message, name)


def sent(actions: Sequence[object], kind: type[ControlMessage]) -> list[Sent]:
    """All messages of this kind."""
    return [Sent(a.members, a.message) for a in some(actions, Send) if isinstance(a.message, kind)]


def only_sent(actions: Sequence[object], kind: type[ControlMessage]) -> Sent:
    """The one message of this kind."""
    found = sent(actions, kind)
    assert len(found) == 1, f"{len(found)} of {kind.__name__} in {actions}"
    return found[0]


def asked(actions: Sequence[object]) -> Sent:
    return only_sent(actions, Prepare)


# messages of members


def hello_of(
    member: int, slot: int = 0, agent: int = 0, generation: int = 0, progress: Progress | None = None
) -> FromMember:
    return FromMember(
        member,
        MemberHello(
            member=member,
            slot=slot,
            pid=1,
            host="",
            hostname="",
            endpoint=("", 0),
            generation=generation,
            progress=progress,
        ),
    )


def dial_of(member: int, peer: int, trouble: str = "", lossy: bool = False) -> FromMember:
    return FromMember(member, DialResult(peer=peer, trouble=trouble, lossy=lossy))


def beat_of(
    member: int,
    phase: str,
    seconds: float,
    progress: Progress | None = None,
    waits_for: tuple[int, ...] = (),
    shard_seconds: float = 0.0,
    step_seconds: float = 0.0,
    longest: float = 0.0,
) -> FromMember:
    return FromMember(
        member,
        Heartbeat(
            phase=phase,
            seconds=seconds,
            progress=progress,
            waits_for=waits_for,
            shard_seconds=shard_seconds,
            step_seconds=step_seconds,
            longest=longest,
        ),
    )


def report_of(
    member: int,
    generation: int,
    progress: Progress | None,
    held_shards: tuple[int, ...] = (),
    has_private_state: bool = False,
    digest: str = "",
    agreed: int = -1,
    **more: Any,
) -> FromMember:
    return FromMember(
        member,
        MemberReport(
            generation=generation,
            progress=progress,
            held_shards=held_shards,
            has_private_state=has_private_state,
            digest=digest,
            agreed=agreed,
            **more,
        ),
    )


def installed_by(member: int, generation: int, progress: Progress | None = None) -> FromMember:
    return FromMember(member, ViewInstalled(generation=generation, progress=progress))


def failure_at(
    member: int,
    generation: int,
    reason: str,
    accused: tuple[int, ...] = (),
    unreachable: tuple[int, ...] = (),
) -> FromMember:
    failed = CollectiveFailed(generation=generation, reason=reason, accused=accused, unreachable=unreachable)
    return FromMember(member, failed)


def exception_of(
    member: int,
    summary: str,
    fault: str,
    step: int,
    shard: int,
    holds: bool = False,
    progress: Progress | None = None,
) -> FromMember:
    return FromMember(
        member,
        WorkerException(
            summary=summary,
            traceback="",
            phase="forward",
            fault=fault,
            step=step,
            shard=shard,
            holds=holds,
            progress=progress,
        ),
    )


def vote_of(
    member: int, step: int, digest: str, generation: int = 0, agreed: int = -1, trail: Trail = ()
) -> FromMember:
    receipt = StepReceipt(
        generation=generation,
        first=step,
        last=step,
        shards=(),
        hashes={str(step): digest},
        agreed=agreed,
        trail=trail,
    )
    return FromMember(member, receipt)


def leave_of(member: int, reason: str) -> FromMember:
    return FromMember(member, LeaveRequest(reason=reason))


def finish_of(
    member: int, progress: Progress, digest: str, stopped: str | None = None, generation: int = 0
) -> FromMember:
    done = MemberFinished(generation=generation, progress=progress, hash=digest, stopped=stopped)
    return FromMember(member, done)
