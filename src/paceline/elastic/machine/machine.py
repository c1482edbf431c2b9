"""The deciding machine: `step(state, event, now) -> (state, actions, reason)`, and nothing else decides.

Pure: no clock, no sockets, no randomness but what the seed gives. It never raises: an event that makes no
sense in the job's phase changes nothing, and the reason says so. The invariants (checked by invariants.py
after every event in tests and in the simulation):

 1. A view is a list of distinct members, ordered by slot. While it is installed or in use, all of its members
    live, and no other worker is a member.
 2. Member numbers are given once. A slot has at most one worker that is not about to leave.
 3. Generations only grow, and one generation is one view. A message of another generation changes nothing.
 4. In a view, every shard is assigned to exactly one member.
 5. State comes from one member with the largest progress, to all members with less; or all restore.
 6. A slot that is wanted has a worker or a time for the next start, until its budget is spent.
 7. A member that is waited for lives and was asked, and there is a time at which waiting ends.
 8. The end is final, and there is one EndJob: the last action of its step.
 9. Every decision has a reason, and every message and probe a member that it is for.
10. A worker comes into a view only with peers that it has met, each having reached the other; those of one
    host need no proof.

The table below lists which event is taken in which phase and where it can lead; docs/machine.md is drawn from
it. Handlers are in member_event_handlers.py and job_event_handlers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias, final

from paceline.control import messages
from paceline.elastic.machine import (
    job_event_handlers as external,
    machine_events as events,
    member_event_handlers as members,
)
from paceline.elastic.machine.actions import Action
from paceline.elastic.machine.machine_events import FromMember, MachineEvent, SupervisorBegan
from paceline.elastic.machine.state import NOT_IN_VIEW, JobPhase, JobState

Handler: TypeAlias = Callable[..., str]
"""Takes (job, member, message) of a member's message, (job, event) of other events; returns the reason."""

_S, _R, _P, _I = JobPhase.STARTING, JobPhase.RUNNING, JobPhase.PREPARING, JobPhase.INSTALLING
_T, _B, _E = JobPhase.STOPPING, JobPhase.RETURNING, JobPhase.ENDED


@final
@dataclass(frozen=True)
class TransitionRow:
    """Transitions that an event can cause. In phases that are not listed the event changes nothing."""

    event: type[Any]
    handler: Handler
    says: str
    leads: Mapping[JobPhase, tuple[JobPhase, ...]]


_stay: dict[JobPhase, tuple[JobPhase, ...]] = {
    phase: (phase,) for phase in JobPhase if phase is not JobPhase.ENDED
}
_after_loss: dict[JobPhase, tuple[JobPhase, ...]] = {
    _S: (_S, _I, _E),
    _R: (_R, _P, _S, _I, _E),
    _P: (_P, _I, _S, _E),
    _I: (_I, _P, _S, _E),
    _T: (_T, _P, _E),
    _B: (_B, _R, _T, _P, _S, _I, _E),
}

TABLE: tuple[TransitionRow, ...] = (
    TransitionRow(events.SupervisorBegan, external.on_began, "the supervisor begins", {_S: (_S, _B, _E)}),
    TransitionRow(
        messages.MemberHello,
        members.on_hello,
        "a worker says hello",
        {_S: (_S, _I), _R: (_R, _P), _P: (_P,), _I: (_I, _R, _T, _P), _T: (_T, _P), _B: (_B, _R, _T, _P, _E)},
    ),
    TransitionRow(
        messages.DialResult,
        members.on_dial_result,
        "a worker dialed a peer",
        {**_after_loss, _R: (_R, _P, _E), _I: (_I, _E), _T: (_T, _E)},
    ),
    TransitionRow(messages.Heartbeat, members.on_heartbeat, "a heartbeat", _stay),
    TransitionRow(
        events.ProcessProbed, external.on_probed, "the process of a silent worker was probed", _stay
    ),
    TransitionRow(messages.MemberReport, members.on_report, "a member stopped", {_P: (_P, _I, _S, _E)}),
    TransitionRow(
        messages.ViewInstalled, members.on_installed, "a member is in the view", {_I: (_I, _R, _T, _P)}
    ),
    TransitionRow(
        messages.CollectiveFailed,
        members.on_collective_failed,
        "a collective failed",
        {**{phase: to for phase, to in _after_loss.items() if phase is not _S}, _B: (_B,)},
    ),
    TransitionRow(events.WorkerLost, external.on_lost, "a worker is gone", _after_loss),
    TransitionRow(messages.WorkerException, members.on_exception, "a worker's code raised", _after_loss),
    TransitionRow(
        messages.StepReceipt,
        members.on_receipt,
        "steps were committed, with hashes of the state",
        {_R: (_R, _P, _E), _I: (_I, _P, _E), _T: (_T, _P, _E), _P: (_P,), _B: (_B,)},
    ),
    TransitionRow(
        messages.LeaveRequest,
        members.on_leave_request,
        "a worker was asked to go",
        {_S: (_S, _I, _E), _R: (_R, _P, _T, _E), _P: (_P, _I, _S, _E), _I: (_I, _E), _T: (_T,), _B: (_B, _E)},
    ),
    TransitionRow(
        messages.MemberFinished,
        members.on_finished,
        "a member is at the end",
        {_R: (_R, _E), _T: (_T, _E), _I: (_I, _E), _P: (_P, _E), _B: (_B, _R, _T, _P, _E)},
    ),
    TransitionRow(events.AgentJoined, external.on_agent_joined, "a host offers workers", _stay),
    TransitionRow(events.AgentLost, external.on_agent_lost, "a host left", _after_loss),
    TransitionRow(
        events.ScaleRequested,
        external.on_scale,
        "another size is wanted",
        {_S: (_S, _I), _R: (_R, _P), _P: (_P, _I, _S, _E), _I: (_I,), _T: (_T,), _B: (_B,)},
    ),
    TransitionRow(
        events.StopRequested,
        external.on_stop,
        "the job was asked to stop",
        {_S: (_E,), _R: (_T,), _P: (_P, _I, _S, _E), _I: (_I,), _T: (_T,), _B: (_B,)},
    ),
    TransitionRow(
        events.Tick,
        external.on_tick,
        "time has passed",
        {**_after_loss, _R: (_R, _P, _T, _S, _I, _E)},
    ),
)

_rows = {(phase, row.event): row for row in TABLE for phase in row.leads}


def kind_of(event: MachineEvent) -> type[Any]:
    """Return the class that the table knows an event by: a member's message, or the event itself."""
    return type(event.message) if isinstance(event, FromMember) else type(event)


def step(state: JobState, event: MachineEvent, now: float) -> tuple[JobState, tuple[Action, ...], str]:
    """Take one event: return the next state, the actions in their order, and the reason."""
    kind = kind_of(event)
    row = _rows.get((state.phase, kind))
    if row is None:
        return state, (), f"{kind.__name__} changes nothing while the job is {state.phase.value}"
    job = state.copy()
    job.now, job.actions = now, []
    if isinstance(event, FromMember):
        reason = row.handler(job, event.member, event.message)
    else:
        reason = row.handler(job, event)
    return job, tuple(job.actions), reason


def next_deadline(state: JobState) -> float | None:
    """Return when a Tick is due at the latest; None: never. The shell delivers what has arrived before it
    ticks."""
    return state.next_tick_at if state.next_tick_at < inf else None


def allowed(before: JobPhase, kind: type[Any], after: JobPhase) -> bool:
    """Return whether the table knows this transition, on an event of this class (see `kind_of`)."""
    row = _rows.get((before, kind))
    return after in row.leads[before] if row is not None else after is before


def snapshot(state: JobState) -> SupervisorBegan:
    """Return the event with which the next supervisor begins, should this one die. Written before actions are
    carried out."""
    doubted = state.restore or state.dispute is not None
    return SupervisorBegan(
        generation=state.generation,
        members={worker.number: (worker.slot, worker.agent_id) for worker in state.workers.values()},
        next_member=state.next_member,
        starting=tuple(w.number for w in state.workers.values() if w.status in NOT_IN_VIEW),
        view=state.view,
        slots={
            slot.number: (slot.agent_id, slot.failures, slot.weight, slot.given_up)
            for slot in state.slots.values()
            if slot.wanted
        },
        preemptions=state.preemptions,
        committed=state.committed,
        shard_seconds=state.shard_seconds,
        agreed_step=state.agreed_step,
        restore=state.restore,
        restore_before=state.restore_before,
        tainted_until=state.tainted_until,
        stop_reason=state.stop_reason,
        fatal_failure=state.fatal_failure,
        lineage=dict(state.lineage),
        dispute=state.dispute,
        dispute_count=state.dispute_count,
        # Else they come with every audited step, and say nothing that the members cannot say again.
        votes=tuple((*hash_key, dict(cast)) for hash_key, cast in state.votes.items()) if doubted else (),
        trails=dict(state.trails) if doubted else {},
    )
