"""Decide what a worker does about its membership: `step(state, event, now) -> (state, actions)`, pure.

                 MemberAccepted       View           ViewOpened, StateReady
        joining --------------> waiting ---> opening ---------------------> in view
                                ^  ^            |  GroupLeft                |  |  RunFinished
                                |  +------------+---------------------------+  +-----> finished
                                +--- Prepare: others need its state ----------------------+
        waiting    also from joining: Prepare; from every phase: CodeRaised with a state to save
        opening    also from joining: View
        leaving    from every phase: Dismissed; CodeRaised without a state              (the end)
        orphaned   from waiting and finished: SupervisorAway for too long               (the end)

Two threads of a worker feed the machine: the control thread brings messages as they arrive, the training
thread brings what became of its work. `SendMessage`, `Interrupt`, `RequestStop` and `StopReconnecting` are
carried out at once, by the thread that fed the event; all others are TrainingActions and wait for the
training thread, in their order. After an `Interrupt` the training thread leaves its group, wherever it is,
and feeds `GroupLeft`.

`train/member/machine_shell.py` steps the machine of a real worker, `elastic/simulation/simulated_process.py`
that of a simulated one; what both decide besides it is in member_shell_rules.py. DialRequest and
ShardComputed never reach it: both mean the same in every phase.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from paceline.control.member_state import (
    CodeRaised,
    Decision,
    Exit,
    GroupLeft,
    Interrupt,
    KeepState,
    LeaveRequested,
    MemberAction,
    MemberEvent,
    MemberPhase,
    MemberState,
    OpenView,
    ReceiveState,
    RequestStop,
    Restore,
    RunFinished,
    SendMessage,
    SendReport,
    SendState,
    StateReady,
    StopReconnecting,
    SupervisorAway,
    Train,
    ViewOpened,
)
from paceline.control.messages import (
    CollectiveFailed,
    ControlMessage,
    Dismissed,
    LeaveRequest,
    MemberAccepted,
    MemberFinished,
    Prepare,
    Stop,
    View,
    ViewInstalled,
    WorkerException,
)

_RESTART_WAIT_SECONDS: Final = 2.0
"""The longest wait for other members where no supervisor is there and a new start of the run is waiting."""

_P = MemberPhase
_IN_GROUP: Final = (_P.OPENING, _P.IN_VIEW)


def step(state: MemberState, event: MemberEvent, now: float) -> Decision:
    """Return the state after `event`, and what to do. What has no place in a phase changes nothing."""
    if state.ended:
        return state, ()
    match event:
        case MemberAccepted():
            return _accepted(state)
        case Prepare():
            return _prepare(state, event)
        case View():
            return _view(state, event)
        case Stop():
            return state, (RequestStop(event.reason),)
        case Dismissed():
            return _dismissed(state, event)
        case ViewOpened():
            return _view_opened(state)
        case StateReady():
            return _state_ready(state, event)
        case GroupLeft():
            return _group_left(state, event.failure)
        case CodeRaised():
            return _code_raised(state, event.exception)
        case RunFinished():
            return _run_finished(state, event.message)
        case LeaveRequested() if state.leave is None:
            return replace(state, leave=event.reason), (SendMessage(LeaveRequest(reason=event.reason)),)
        case SupervisorAway():
            return _supervisor_away(state, event, now)
    return state, ()


# messages


def _accepted(state: MemberState) -> Decision:
    if state.phase is _P.JOINING:
        return replace(state, phase=_P.WAITING), ()
    # The connection is back. What the supervisor has acknowledged is not sent again by the client, but the
    # supervisor may have been restarted since, and remembers neither who is finished nor who wants to leave.
    again: list[ControlMessage] = [] if state.leave is None else [LeaveRequest(reason=state.leave)]
    if state.unanswered is not None:
        again.append(state.unanswered)
    return state, tuple(SendMessage(message) for message in again)


def _prepare(state: MemberState, prepare: Prepare) -> Decision:
    # Messages of a supervisor that was replaced may arrive late, and a new one repeats what it is not sure
    # was received: what is older than the view this worker was invited to, or than the request that it
    # knows, is void.
    known = state.prepare
    if prepare.generation <= _invited(state) or (known and prepare.generation < known.generation):
        return state, ()
    if state.phase in _IN_GROUP:
        # An abort counts also where a pause for the same generation was asked for before; a pause changes
        # nothing where an abort was.
        if known and prepare.generation == known.generation and not prepare.abort:
            return state, ()
        # No report yet: what this worker holds is certain only once the training thread has left the group
        # (`GroupLeft`), by itself after the next common step, or interrupted.
        state = replace(state, prepare=prepare)
        return _interrupt(state, prepare.reason) if prepare.abort else (state, ())
    # Also where it was asked before: the report may be lost, with the supervisor that it was sent to.
    # A finished worker waits again: it is not announced as finished after a reconnect, and may have to train.
    unanswered = None if isinstance(state.unanswered, MemberFinished) else state.unanswered
    state = replace(state, phase=_P.WAITING, prepare=prepare, unanswered=unanswered)
    return state, (SendReport(prepare.generation),)


def _view(state: MemberState, view: View) -> Decision:
    # In a group, or finished, a worker is asked to report before it gets a view: this one is not meant for
    # the state that it is in.
    outside = state.phase in (_P.JOINING, _P.WAITING)
    if not outside or view.generation <= _invited(state) or state.member not in view.members:
        return state, ()
    # The view of an earlier attempt: the supervisor has asked for a later one since, so this one is over.
    if state.prepare is not None and state.prepare.generation > view.generation:
        return state, ()
    # `view` stays the group that was left until the connections are made: reports speak of that one.
    state = replace(state, phase=_P.OPENING, invited=view, prepare=None, interrupted=None, unanswered=None)
    return state, (OpenView(view),)


def _dismissed(state: MemberState, dismissed: Dismissed) -> Decision:
    # The interrupt first: the training thread, which carries out `Exit`, may be blocked in a collective.
    leave = Exit(dismissed.reason, dismissed.code)
    state, interrupt = _interrupt(state, dismissed.reason) if state.phase in _IN_GROUP else (state, ())
    return replace(state, phase=_P.LEAVING), (*interrupt, leave)


# the training thread


def _view_opened(state: MemberState) -> Decision:
    if state.phase is not _P.OPENING:
        return state, ()
    view = state.invited
    assert view is not None
    state = replace(state, view=view)
    if state.interrupted is not None:
        # Interrupted between the last connection and now: the training thread comes back with `GroupLeft`.
        return state, ()
    if view.restore:
        restore = Restore(view.restore_before, view.generation == 1, state.fresh, state.trained)
        # A group that breaks in the middle of it leaves neither the old state nor the new one.
        return replace(state, has_state=False, fresh=False), (restore,)
    if state.index in view.stale_indexes:
        # A group that breaks in the middle of it may leave the source's weights: the initial ones are gone.
        return replace(state, trained=True, fresh=False), (ReceiveState(view.source),)
    if state.index == view.source:
        return state, (SendState(view.stale_indexes),)
    return state, (KeepState(),)


def _state_ready(state: MemberState, ready: StateReady) -> Decision:
    if state.phase is not _P.OPENING or state.view is not state.invited:
        return state, ()
    view = state.view
    assert view is not None
    # Journal lines that the supervisor lacks come from a member that was there when the steps were committed:
    # the first member may be new. A restore has left this worker without a state, and so without lines.
    writes = state.has_state and state.index == (view.source if view.stale_indexes else 0)
    installed = ViewInstalled(generation=view.generation, progress=ready.progress)
    state = replace(state, phase=_P.IN_VIEW, has_state=True, trained=True, fresh=False)
    return state, (SendMessage(installed), Train(view.ends, view.journaled if writes else -1))


def _group_left(state: MemberState, failure: CollectiveFailed | None) -> Decision:
    if state.phase not in _IN_GROUP:
        return state, ()
    if failure is None and state.interrupted is not None:
        failure = CollectiveFailed(generation=_invited(state), reason=state.interrupted)
    state = replace(state, phase=_P.WAITING, interrupted=None)
    # `prepare` stays until its view comes: it refuses the views of earlier attempts.
    prepare, actions = state.prepare, list[MemberAction]()
    if failure is not None and (prepare is None or not prepare.abort):
        # After an abort the supervisor knows that the view is over. After a request to pause it does not, and
        # the other members may wait for this worker in the collective until the supervisor interrupts them.
        state = replace(state, unanswered=failure)
        actions.append(SendMessage(failure))
    if prepare is not None:
        actions.append(SendReport(prepare.generation))
    return state, tuple(actions)


def _code_raised(state: MemberState, exception: WorkerException) -> Decision:
    # Without a state to save in a view there is nothing to wait for: the thread that raised ends by itself,
    # and needs no `Exit`.
    state = replace(state, phase=_P.WAITING if exception.holds else _P.LEAVING, unanswered=exception)
    if state.prepare is not None and exception.holds:
        return state, (SendMessage(exception), SendReport(state.prepare.generation))
    return state, (SendMessage(exception),)


def _run_finished(state: MemberState, message: MemberFinished) -> Decision:
    if state.phase is not _P.IN_VIEW:
        return state, ()
    if state.prepare is not None:
        # The others stopped before the end, or lost a member: they need this worker's state.
        return replace(state, phase=_P.WAITING), (SendMessage(message), SendReport(state.prepare.generation))
    return replace(state, phase=_P.FINISHED, unanswered=message), (SendMessage(message),)


# time


def _supervisor_away(state: MemberState, event: SupervisorAway, now: float) -> Decision:
    away = now - event.lost_at
    actions: list[MemberAction] = []
    if event.replaced and state.invited is None:
        actions.append(StopReconnecting("the run has ended, or was started again meanwhile"))
    reason = _orphaned_reason(state, away, event.restarting)
    # In no group, so no other member waits for this worker. One that is opening a view continues: the others
    # may be there, and where it stays blocked it is interrupted below.
    if reason is not None and state.phase in (_P.WAITING, _P.FINISHED):
        return replace(state, phase=_P.ORPHANED), (*actions, Exit(reason, orphaned=True))
    if reason is not None and state.phase is _P.IN_VIEW:
        # With its group, which is whole: all members save and finish together.
        actions.append(RequestStop(reason))
    if event.blocked_since is not None and state.phase in _IN_GROUP:
        # Blocked for as long as the supervisor is away: this worker is cut off from the others as well, and
        # no supervisor will end the wait.
        alone = min(away, now - event.blocked_since)
        if alone > state.patience or (alone > _RESTART_WAIT_SECONDS and event.restarting):
            state, interrupt = _interrupt(state, "the supervisor stayed away")
            actions += interrupt
    return state, tuple(actions)


def _orphaned_reason(state: MemberState, away: float, restarting: bool) -> str | None:
    if away > state.patience:
        return f"the supervisor stayed away for {away:.0f} s"
    if away > 0.0 and restarting:
        return "the supervisor is gone, and the run is being started again"
    return None


def _interrupt(state: MemberState, reason: str) -> Decision:
    if state.interrupted is not None:
        return state, ()
    return replace(state, interrupted=reason), (Interrupt(reason),)


def _invited(state: MemberState) -> int:
    return 0 if state.invited is None else state.invited.generation
