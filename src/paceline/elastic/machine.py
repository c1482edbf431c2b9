"""The machine that decides: `step(state, event, now) -> (state, actions, reason)`, and nothing else decides.

Pure: no clock, no sockets, no randomness but what the seed gives. It never raises: what makes no sense where
the job is changes nothing, and the reason says so. The laws (checked by `validate` after every event in tests
and in the simulation):

 1. A view is a list of distinct members, ranked by slot. While it is installed or in use, all of its members
    live, and nobody else is a member.
 2. Member numbers are given once. A slot has at most one worker that is not about to leave.
 3. Generations only grow, and one generation is one view. A message of another generation changes nothing.
 4. In a view, every shard is dealt to exactly one member.
 5. State comes from the member that is furthest, to those that are behind; or everybody restores. Never from
    a member that is behind, never from two.
 6. A slot that is wanted has a worker or a time for the next start, until its budget is spent.
 7. Whoever is waited for lives and was asked, and there is a time at which waiting ends.
 8. The end is final, and there is one EndJob.
 9. Every decision has a reason.
10. A worker comes into a view only with peers that it has met, each having reached the other; those of one
    place need no proof.

The table below says which event is heard in which phase and where it can lead; docs/machine.md is drawn from
it. Handlers are in from_members.py and from_outside.py. Must not know sockets, processes, files or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias, final

from paceline.elastic import from_members as members, from_outside as outside
from paceline.elastic.from_outside import why_not_this_size
from paceline.elastic.laws import validate, validate_change, validate_step
from paceline.elastic.model import (
    Action,
    AgentCame,
    AgentLost,
    Beaten,
    Began,
    Event,
    HasBroken,
    HasDialed,
    Hashed,
    HasInstalled,
    HasRaised,
    IsDone,
    Joined,
    Lost,
    Phase,
    Probed,
    Reported,
    ScaleAsked,
    Standing,
    StopAsked,
    Ticked,
    WantsToLeave,
)
from paceline.elastic.state import State, copied, initial

__all__ = [
    "TABLE",
    "Row",
    "allowed",
    "initial",
    "next_deadline",
    "remembered",
    "step",
    "validate",
    "validate_change",
    "validate_step",
    "why_not_this_size",
]

Handler: TypeAlias = Callable[[State, Any, float, list[Action]], str]

_S, _R, _P, _I = Phase.STARTING, Phase.RUNNING, Phase.PREPARING, Phase.INSTALLING
_T, _B, _E = Phase.STOPPING, Phase.RETURNING, Phase.ENDED


@final
@dataclass(frozen=True)
class Row:
    """What an event can lead to. In phases that are not listed it changes nothing."""

    event: type[Any]
    handler: Handler
    says: str
    leads: Mapping[Phase, frozenset[Phase]]


def _row(event: type[Any], handler: Handler, says: str, leads: Mapping[Phase, tuple[Phase, ...]]) -> Row:
    return Row(event, handler, says, {phase: frozenset(to) for phase, to in leads.items()})


_stay: dict[Phase, tuple[Phase, ...]] = {phase: (phase,) for phase in Phase if phase is not Phase.ENDED}
_after_loss: dict[Phase, tuple[Phase, ...]] = {
    _S: (_S, _I, _E),
    _R: (_R, _P, _S, _I, _E),
    _P: (_P, _I, _S, _E),
    _I: (_I, _P, _S, _E),
    _T: (_T, _P, _E),
    _B: (_B, _R, _T, _P, _S, _I, _E),
}

TABLE: tuple[Row, ...] = (
    _row(Began, outside.began, "the supervisor begins", {_S: (_S, _B, _E)}),
    _row(
        Joined,
        members.joined,
        "a worker says hello",
        {
            _S: (_S, _I),
            _R: (_R, _P),
            _P: (_P,),
            _I: (_I, _R, _T, _P),
            _T: (_T, _P),
            _B: (_B, _R, _T, _P, _E),
        },
    ),
    _row(
        HasDialed,
        members.has_dialed,
        "a worker dialed a peer",
        {**_after_loss, _R: (_R, _P, _E), _I: (_I, _E), _T: (_T, _E)},
    ),
    _row(Beaten, members.beaten, "a heartbeat", _stay),
    _row(Probed, outside.probed, "a silent worker's process was looked at", _stay),
    _row(Reported, members.reported, "a member stopped", {_P: (_P, _I, _S, _E)}),
    _row(HasInstalled, members.has_installed, "a member is in the view", {_I: (_I, _R, _T, _P)}),
    _row(
        HasBroken,
        members.has_broken,
        "a collective failed",
        {**{phase: to for phase, to in _after_loss.items() if phase is not _S}, _B: (_B,)},
    ),
    _row(Lost, members.lost, "a worker is gone", _after_loss),
    _row(HasRaised, members.has_raised, "a worker's code raised", _after_loss),
    _row(
        Hashed,
        members.hashed,
        "a hash of the state after a step",
        {_R: (_R, _P, _E), _I: (_I, _P, _E), _T: (_T, _P, _E), _P: (_P,), _B: (_B,)},
    ),
    _row(
        WantsToLeave,
        members.wants_to_leave,
        "a worker was asked to go",
        {
            _S: (_S, _I, _E),
            _R: (_R, _P, _T, _E),
            _P: (_P, _I, _S, _E),
            _I: (_I, _E),
            _T: (_T,),
            _B: (_B, _E),
        },
    ),
    _row(
        IsDone,
        members.is_done,
        "a member is at the end",
        {_R: (_R, _E), _T: (_T, _E), _I: (_I, _E), _P: (_P, _E), _B: (_B, _R, _T, _P, _E)},
    ),
    _row(AgentCame, outside.agent_came, "a machine offers workers", _stay),
    _row(AgentLost, outside.agent_lost, "a machine left", _after_loss),
    _row(
        ScaleAsked,
        outside.scale_asked,
        "another size is wanted",
        {_S: (_S, _I), _R: (_R, _P), _P: (_P, _I, _S, _E), _I: (_I,), _T: (_T,), _B: (_B,)},
    ),
    _row(
        StopAsked,
        outside.stop_asked,
        "the job is to stop",
        {_S: (_E,), _R: (_T,), _P: (_P, _I, _S, _E), _I: (_I,), _T: (_T,), _B: (_B,)},
    ),
    _row(
        Ticked,
        outside.ticked,
        "time has passed",
        {**_after_loss, _R: (_R, _P, _T, _S, _I, _E)},
    ),
)

_rows = {(phase, row.event): row for row in TABLE for phase in row.leads}


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...], str]:
    """What follows from an event: the next state, what is to be done, in this order, and why."""
    row = _rows.get((state.phase, type(event)))
    if row is None:
        return state, (), f"{type(event).__name__} changes nothing while the job is {state.phase.value}"
    job = copied(state)
    actions: list[Action] = []
    reason = row.handler(job, event, now, actions)
    return job, tuple(actions), reason


def next_deadline(state: State) -> float | None:
    """When a Ticked is wanted at the latest; None: never. The shell hears what has come before it ticks."""
    return state.due if state.due < inf else None


def allowed(before: Phase, event: Event, after: Phase) -> bool:
    """Whether the table knows this transition."""
    row = _rows.get((before, type(event)))
    return after in row.leads[before] if row is not None else after is before


def remembered(state: State) -> Began:
    """What the next supervisor begins with, should this one die. Kept before actions are carried out."""
    fresh = (Standing.STARTING, Standing.READY)
    doubted = state.restore or state.dispute is not None
    return Began(
        generation=state.generation,
        members={worker.number: (worker.slot, worker.place) for worker in state.workers.values()},
        next_member=state.next_member,
        starting=tuple(sorted(w.number for w in state.workers.values() if w.standing in fresh)),
        view=state.view,
        slots={
            slot.number: (slot.place, slot.failures, slot.weight, slot.given_up)
            for slot in state.slots.values()
            if slot.wanted
        },
        preemptions=state.preemptions,
        committed=state.committed,
        shard_seconds=state.shard_seconds,
        agreed=state.agreed,
        restore=state.restore,
        restore_before=state.restore_before,
        tainted=state.tainted,
        stop=state.stop,
        failing=state.failing,
        lineage=dict(state.lineage),
        dispute=state.dispute,
        disputes=state.disputes,
        # Else they come with every audited step, and say nothing that the members cannot say again.
        votes=tuple((*ballot, dict(cast)) for ballot, cast in state.votes.items()) if doubted else (),
        trails=dict(state.trails) if doubted else {},
    )
