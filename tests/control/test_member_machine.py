"""The worker's half of the protocol, without a worker: every phase, every message, in microseconds."""

from __future__ import annotations

import pytest
from tests.control.member_driver import (
    IN_EVERY_PHASE,
    PATIENCE,
    Driver,
    abort,
    accepted,
    at_end,
    exception,
    failure,
    finished,
    in_view,
    opening,
    prepare,
    view,
    waiting,
)

from paceline.control.member_state import (
    CodeRaised,
    Exit,
    GroupLeft,
    Interrupt,
    KeepState,
    LeaveRequested,
    MemberPhase,
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
    Train,
    ViewOpened,
)
from paceline.control.messages import (
    CollectiveFailed,
    DialRequest,
    Dismissed,
    LeaveRequest,
    ShardComputed,
    Stop,
    ViewInstalled,
)

P = MemberPhase
SENT_LEAVE = SendMessage(LeaveRequest(reason="SIGTERM"))
every_phase = pytest.mark.parametrize("phase", IN_EVERY_PHASE)
in_group = pytest.mark.parametrize("phase", [P.OPENING, P.IN_VIEW])


def installed(generation: int, step: int) -> SendMessage:
    return SendMessage(ViewInstalled(generation=generation, progress=(step, 0, 0)))


# joining


def test_a_worker_that_is_accepted_waits_for_a_view():
    driver = Driver()
    assert driver.feed(accepted()) == ()
    assert driver.phase is P.WAITING
    assert driver.state.generation == 0
    assert driver.state.index == -1
    assert not driver.state.has_state


def test_a_worker_that_is_refused_ends_with_the_code():
    driver = Driver()
    (leave,) = driver.feed(Dismissed(reason="another version", code=3))
    assert leave == Exit("another version", 3, orphaned=False)
    assert driver.phase is P.LEAVING


def test_a_worker_is_asked_to_report_and_gets_its_first_view():
    driver = waiting()
    assert driver.feed(prepare(3)) == (SendReport(3),)
    assert driver.feed(view(3)) == (OpenView(view(3)),)
    assert driver.phase is P.OPENING
    assert driver.state.prepare is None
    assert driver.state.index == 1


def test_messages_that_come_before_the_acceptance_count():
    driver = Driver()
    assert driver.feed(prepare(3)) == (SendReport(3),)
    assert driver.phase is P.WAITING
    driver = Driver()
    assert driver.feed(view(3)) == (OpenView(view(3)),)


def test_without_a_supervisor_a_worker_that_joins_goes_on_trying():
    driver = Driver()
    assert driver.away(10 * PATIENCE) == ()
    assert driver.away(10 * PATIENCE, blocked_since=-10 * PATIENCE) == ()
    assert driver.phase is P.JOINING


@pytest.mark.parametrize("make", [Driver, waiting])
def test_a_worker_whose_run_was_started_again_stops_looking_for_its_supervisor(make):
    driver = make()
    (action,) = driver.away(0.1, replaced=True)
    assert isinstance(action, StopReconnecting)
    assert driver.phase is make().phase


@pytest.mark.parametrize("make", [opening, in_view, at_end])
def test_a_worker_that_was_in_a_view_looks_on_for_its_supervisor(make):
    assert make().away(0.1, replaced=True) == ()


# opening a view


def test_the_first_view_restores_and_trains():
    driver = opening(1, restore=True)
    assert driver.feed(ViewOpened()) == (Restore(before=-1, first=True, fresh=True, trained=False),)
    assert driver.state.generation == 1
    assert not driver.state.has_state
    assert driver.feed(StateReady((4, 0, 0))) == (installed(1, 4), Train())
    assert driver.phase is P.IN_VIEW
    assert driver.state.has_state


def test_a_later_restore_is_of_at_most_the_step_that_is_trusted():
    driver = in_view(1)
    driver.feed(abort(2))
    driver.feed(GroupLeft())
    driver.feed(view(2, restore=True, restore_before=12))
    assert driver.feed(ViewOpened()) == (Restore(before=12, first=False, fresh=False, trained=True),)


def test_a_restore_that_breaks_leaves_no_state():
    driver = in_view(1)
    driver.feed(abort(2))
    driver.feed(GroupLeft())
    driver.feed(view(2, restore=True))
    driver.feed(ViewOpened())
    assert driver.feed(GroupLeft(failure(2))) == (SendMessage(failure(2)),)
    assert not driver.state.has_state
    assert driver.state.trained


def test_a_worker_that_breaks_in_its_first_restore_is_no_longer_fresh():
    driver = opening(1, restore=True)
    driver.feed(ViewOpened())
    driver.feed(GroupLeft(failure(1)))
    driver.feed(view(2, restore=True))
    assert driver.feed(ViewOpened()) == (Restore(before=-1, first=False, fresh=False, trained=False),)


def test_a_worker_whose_state_transfer_breaks_may_hold_the_weights_of_the_source():
    driver = opening(2, source=0, stale_indexes=(1,))
    driver.feed(ViewOpened())
    driver.feed(GroupLeft(failure(2)))
    driver.feed(view(3, restore=True))
    assert driver.feed(ViewOpened()) == (Restore(before=-1, first=False, fresh=False, trained=True),)


def test_a_worker_that_received_its_state_is_no_longer_fresh():
    driver = opening(2, source=0, stale_indexes=(1,))
    driver.feed(ViewOpened())
    driver.feed(StateReady((4, 0, 0)))
    driver.feed(abort(3))
    driver.feed(GroupLeft())
    driver.feed(view(3, restore=True))
    assert driver.feed(ViewOpened()) == (Restore(before=-1, first=False, fresh=False, trained=True),)


@pytest.mark.parametrize(
    ("changes", "action"),
    [
        ({"source": 1, "stale_indexes": (0, 2)}, SendState((0, 2))),
        ({"source": 0, "stale_indexes": (1,)}, ReceiveState(0)),
        ({"source": 0, "stale_indexes": (2,)}, KeepState()),
        ({}, KeepState()),
    ],
)
def test_who_sends_the_state_and_who_receives_it(changes, action):
    driver = in_view(1)
    driver.feed(abort(2))
    driver.feed(GroupLeft())
    driver.feed(view(2, **changes))
    assert driver.feed(ViewOpened()) == (action,)


@pytest.mark.parametrize(
    ("changes", "journal_after"),
    [
        ({"source": 1, "stale_indexes": (0,), "journaled": 5}, 5),  # the source, and not the first member
        ({"source": 0, "stale_indexes": (2,), "journaled": 5}, -1),
        ({"members": (4, 5), "journaled": 0}, 0),  # all hold the state: the first member
        ({"members": (3, 4), "journaled": 5}, -1),
        ({"members": (4, 5), "journaled": 5, "restore": True}, -1),
    ],
)
def test_missing_journal_lines_come_from_one_member_that_has_them(changes, journal_after):
    driver = in_view(1)
    driver.feed(abort(2))
    driver.feed(GroupLeft())
    driver.feed(view(2, **changes))
    driver.feed(ViewOpened())
    assert driver.feed(StateReady((6, 0, 0))) == (installed(2, 6), Train(journal_after=journal_after))


def test_a_newcomer_writes_no_journal_lines():
    driver = opening(2, members=(4, 5), source=1, stale_indexes=(0,), journaled=5)
    driver.feed(ViewOpened())
    assert driver.feed(StateReady((6, 0, 0))) == (installed(2, 6), Train())


def test_a_view_that_ends_says_why():
    driver = opening(2, ends="rank 1 raised")
    driver.feed(ViewOpened())
    assert driver.feed(StateReady((6, 0, 0)))[1] == Train("rank 1 raised")


def test_a_view_that_cannot_be_opened_is_announced():
    driver = opening(2)
    assert driver.feed(GroupLeft(failure(2))) == (SendMessage(failure(2)),)
    assert driver.phase is P.WAITING
    assert driver.state.generation == 0


def test_an_abort_while_connecting_wins_over_the_view():
    driver = opening(2)
    assert driver.feed(abort(3)) == (Interrupt("generation 3"),)
    assert driver.feed(ViewOpened()) == ()
    assert driver.state.generation == 2
    assert driver.feed(GroupLeft(failure(2))) == (SendReport(3),)
    assert driver.feed(view(3)) == (OpenView(view(3)),)
    assert driver.state.interrupted is None


def test_an_abort_while_the_state_is_on_its_way():
    driver = opening(2, source=0, stale_indexes=(1,))
    driver.feed(ViewOpened())
    assert driver.feed(abort(3)) == (Interrupt("generation 3"),)
    assert driver.feed(GroupLeft(failure(2))) == (SendReport(3),)


def test_an_abort_that_comes_with_the_last_byte_of_the_state():
    """The state is there and counts; the training thread meets the interrupt with its next collective."""
    driver = opening(2, source=0, stale_indexes=(1,))
    driver.feed(ViewOpened())
    driver.feed(abort(3))
    driver.feed(StateReady((6, 0, 0)))
    assert driver.phase is P.IN_VIEW
    assert driver.state.interrupted == "generation 3"
    assert driver.feed(GroupLeft()) == (SendReport(3),)
    assert driver.state.has_state


def test_a_pause_while_opening_waits_for_the_next_common_step():
    driver = opening(2)
    assert driver.feed(prepare(3)) == ()
    assert driver.feed(ViewOpened()) == (KeepState(),)
    driver.feed(StateReady((6, 0, 0)))
    assert driver.state.prepare == prepare(3)
    assert driver.feed(GroupLeft()) == (SendReport(3),)


# being asked to stop


def test_a_pause_is_kept_until_the_group_agrees_on_it():
    driver = in_view(1)
    assert driver.feed(prepare(2)) == ()
    assert driver.state.prepare == prepare(2)
    assert driver.state.interrupted is None
    assert driver.feed(GroupLeft()) == (SendReport(2),)
    assert driver.phase is P.WAITING


@in_group
def test_abort_and_pause_for_one_generation(phase):
    """The abort counts in either order, once."""
    driver = IN_EVERY_PHASE[phase]()
    assert driver.feed(prepare(2)) == ()
    assert driver.feed(abort(2)) == (Interrupt("generation 2"),)
    assert driver.feed(abort(2)) == ()
    assert driver.feed(prepare(2)) == ()
    assert driver.state.prepare == abort(2)
    assert driver.feed(GroupLeft(failure(1))) == (SendReport(2),)


@in_group
def test_an_abort_for_a_later_generation_than_a_pause(phase):
    driver = IN_EVERY_PHASE[phase]()
    driver.feed(prepare(2))
    assert driver.feed(abort(3)) == (Interrupt("generation 3"),)
    assert driver.feed(prepare(2)) == ()
    assert driver.feed(GroupLeft()) == (SendReport(3),)


@pytest.mark.parametrize("first", [prepare, abort])
def test_a_later_request_replaces_an_earlier_one(first):
    driver = in_view(1)
    driver.feed(first(2))
    assert driver.feed(prepare(3)) == ()
    assert driver.state.prepare == prepare(3)
    # Interrupted, and not asked to abort any longer: the supervisor has to know that the group is broken.
    broken = SendMessage(CollectiveFailed(generation=1, reason="generation 2"))
    assert driver.feed(GroupLeft()) == ((broken, SendReport(3)) if first is abort else (SendReport(3),))


def test_two_view_changes_in_a_row():
    driver = in_view(1)
    driver.feed(abort(2))
    assert driver.feed(GroupLeft(failure(1))) == (SendReport(2),)
    assert driver.state.interrupted is None
    driver.feed(view(2))
    driver.feed(ViewOpened())
    assert driver.feed(abort(3)) == (Interrupt("generation 3"),)
    assert driver.feed(GroupLeft(failure(2))) == (SendReport(3),)
    assert driver.feed(view(3, members=(4,))) == (OpenView(view(3, members=(4,))),)
    driver.feed(ViewOpened())
    assert driver.feed(StateReady((6, 0, 0))) == (installed(3, 6), Train(journal_after=0))
    assert driver.state.generation == 3


def test_two_requests_before_the_first_view_follows():
    driver = waiting()
    assert driver.feed(prepare(2)) == (SendReport(2),)
    assert driver.feed(abort(3)) == (SendReport(3),)
    assert driver.feed(view(2)) == (), "the supervisor asks for a later one already"
    assert driver.feed(view(3)) == (OpenView(view(3)),)


def test_a_request_that_comes_again_is_answered_again():
    """The report may have been lost with the supervisor that it was for."""
    driver = waiting()
    driver.feed(prepare(2))
    assert driver.feed(prepare(2)) == (SendReport(2),)
    assert driver.feed(abort(2)) == (SendReport(2),)


@pytest.mark.parametrize("phase", [P.WAITING, P.OPENING, P.IN_VIEW, P.FINISHED])
def test_messages_of_a_stale_generation_are_ignored(phase):
    driver = IN_EVERY_PHASE[phase]()
    if phase is P.WAITING:
        driver = in_view(1)
        driver.feed(GroupLeft(failure(1)))
    before = driver.state
    for late in (prepare(1), abort(1), prepare(0), abort(0), view(1), view(0)):
        assert driver.feed(late) == ()
    assert driver.state is before


def test_a_request_of_an_earlier_generation_than_the_last_is_ignored():
    driver = waiting()
    driver.feed(prepare(5))
    assert driver.feed(abort(4)) == ()
    assert driver.state.prepare == prepare(5)


def test_a_view_without_this_worker_is_for_others():
    driver = waiting()
    assert driver.feed(view(2, members=(3, 5))) == ()
    assert driver.phase is P.WAITING


@pytest.mark.parametrize("phase", [P.OPENING, P.IN_VIEW, P.FINISHED])
def test_a_view_that_no_request_came_before_is_ignored(phase):
    driver = IN_EVERY_PHASE[phase]()
    assert driver.feed(view(2)) == ()
    assert driver.phase is phase


def test_a_collective_that_failed_is_announced_once_and_reported_when_asked():
    driver = in_view(1)
    assert driver.feed(GroupLeft(failure(1))) == (SendMessage(failure(1)),)
    assert driver.feed(GroupLeft(failure(1))) == ()
    assert driver.feed(abort(2)) == (SendReport(2),)


def test_a_collective_that_fails_where_a_pause_is_due_is_announced_too():
    """The other members may wait in it: only an abort ends their wait."""
    driver = in_view(1)
    driver.feed(prepare(2))
    assert driver.feed(GroupLeft(failure(1))) == (SendMessage(failure(1)), SendReport(2))
    assert driver.feed(abort(3)) == (SendReport(3),)


def test_a_group_that_is_left_without_a_reason_waits():
    driver = in_view(1)
    assert driver.feed(GroupLeft()) == ()
    assert driver.phase is P.WAITING


@every_phase
def test_a_stop_is_passed_on_in_every_phase(phase):
    driver = IN_EVERY_PHASE[phase]()
    assert driver.feed(Stop(reason="enough")) == (RequestStop("enough"),)
    assert driver.phase is phase


@every_phase
def test_dials_and_claims_do_not_concern_the_machine(phase):
    driver = IN_EVERY_PHASE[phase]()
    before = driver.state
    assert driver.feed(DialRequest(peers=())) == ()
    assert driver.feed(ShardComputed(step=1, shard=1, generation=1)) == ()
    assert driver.state is before


# leaving


@every_phase
def test_leaving_in_every_phase_is_announced_once(phase):
    driver = IN_EVERY_PHASE[phase]()
    assert driver.feed(LeaveRequested("SIGTERM")) == (SENT_LEAVE,)
    assert driver.feed(LeaveRequested("SIGUSR1")) == ()
    assert driver.phase is phase


@every_phase
def test_a_worker_is_dismissed_in_every_phase(phase):
    driver = IN_EVERY_PHASE[phase]()
    leave = Exit("no longer needed", 5)
    interrupt = (Interrupt("no longer needed"),) if phase in (P.OPENING, P.IN_VIEW) else ()
    assert driver.feed(Dismissed(reason="no longer needed", code=5)) == (*interrupt, leave)
    assert driver.phase is P.LEAVING
    assert driver.state.ended
    assert (driver.state.interrupted is not None) == bool(interrupt)


def test_a_worker_that_is_dismissed_after_an_abort_is_interrupted_once():
    driver = in_view(1)
    driver.feed(abort(2))
    assert driver.feed(Dismissed(reason="no longer needed")) == (Exit("no longer needed"),)


def test_nothing_moves_a_worker_that_was_dismissed():
    driver = in_view(1)
    driver.feed(Dismissed(reason="no longer needed"))
    before = driver.state
    for late in (
        GroupLeft(failure(1)),
        abort(2),
        view(2),
        accepted(),
        Stop(reason=""),
        ViewOpened(),
        StateReady((1, 0, 0)),
        RunFinished(finished(1)),
        CodeRaised(exception(holds=True)),
        LeaveRequested("SIGTERM"),
        Dismissed(reason="again"),
    ):
        assert driver.feed(late) == ()
    assert driver.away(10 * PATIENCE, restarting=True, replaced=True, blocked_since=0.0) == ()
    assert driver.state is before


# errors of the worker's code


def test_an_exception_that_leaves_no_state_ends_the_worker():
    driver = in_view(1)
    assert driver.feed(CodeRaised(exception(holds=False))) == (SendMessage(exception(holds=False)),)
    assert driver.phase is P.LEAVING


def test_an_exception_that_leaves_a_state_waits_to_save_it():
    driver = in_view(1)
    assert driver.feed(CodeRaised(exception(holds=True))) == (SendMessage(exception(holds=True)),)
    assert driver.phase is P.WAITING
    assert driver.feed(abort(2)) == (SendReport(2),)
    assert driver.feed(view(2, ends="it raised")) == (OpenView(view(2, ends="it raised")),)


def test_an_exception_of_a_worker_that_was_interrupted_does_not_interrupt_its_next_view():
    driver = in_view(1)
    driver.feed(abort(2))
    assert driver.feed(CodeRaised(exception(holds=True))) == (
        SendMessage(exception(holds=True)),
        SendReport(2),
    )
    driver.feed(view(2, ends="it raised"))
    assert driver.state.interrupted is None
    assert driver.feed(ViewOpened()) == (KeepState(),)


@pytest.mark.parametrize("holds", [True, False])
def test_an_exception_where_a_report_is_due(holds):
    driver = in_view(1)
    driver.feed(prepare(2))
    report = (SendReport(2),) if holds else ()
    assert driver.feed(CodeRaised(exception(holds=holds))) == (SendMessage(exception(holds=holds)), *report)


# the end of the run


def test_a_finished_worker_stays_until_it_is_dismissed():
    driver = in_view(1)
    assert driver.feed(RunFinished(finished(1))) == (SendMessage(finished(1)),)
    assert driver.phase is P.FINISHED
    assert driver.feed(Dismissed(reason="the run is over")) == (Exit("the run is over"),)


@pytest.mark.parametrize("asked", [prepare, abort])
def test_a_finished_worker_whose_state_is_needed_comes_back(asked):
    driver = at_end(1)
    assert driver.feed(asked(2)) == (SendReport(2),)
    assert driver.phase is P.WAITING
    driver.feed(view(2, source=1, stale_indexes=(0,)))
    assert driver.feed(ViewOpened()) == (SendState((0,)),)
    driver.feed(StateReady((9, 1, 0)))
    assert driver.feed(RunFinished(finished(2))) == (SendMessage(finished(2)),)


def test_a_worker_that_finishes_where_a_report_is_due():
    driver = in_view(1)
    driver.feed(prepare(2))
    assert driver.feed(RunFinished(finished(1))) == (SendMessage(finished(1)), SendReport(2))
    assert driver.phase is P.WAITING
    assert driver.feed(accepted()) == (), "the report has taken its place"


@pytest.mark.parametrize("phase", [P.JOINING, P.WAITING, P.OPENING, P.FINISHED])
def test_only_a_member_that_trains_can_finish(phase):
    driver = IN_EVERY_PHASE[phase]()
    assert driver.feed(RunFinished(finished(1))) == ()


@pytest.mark.parametrize("event", [ViewOpened(), StateReady((1, 0, 0)), GroupLeft(failure(1))])
@pytest.mark.parametrize("phase", [P.JOINING, P.WAITING, P.FINISHED])
def test_what_becomes_of_a_view_counts_only_in_it(phase, event):
    driver = IN_EVERY_PHASE[phase]()
    before = driver.state
    assert driver.feed(event) == ()
    assert driver.state is before


def test_a_state_counts_only_once_the_view_is_open():
    driver = opening(2)
    assert driver.feed(StateReady((1, 0, 0))) == ()
    assert driver.phase is P.OPENING


def test_a_state_of_an_earlier_view_does_not_count():
    driver = in_view(1)
    driver.feed(abort(2))
    driver.feed(GroupLeft())
    driver.feed(view(2))
    assert driver.feed(StateReady((1, 0, 0))) == ()
    assert driver.phase is P.OPENING


# the supervisor, lost and back


@pytest.mark.parametrize("make", [waiting, opening, in_view, at_end])
def test_a_supervisor_that_comes_back_in_time_finds_everything_as_it_was(make):
    driver = make()
    before = driver.state
    assert driver.away(PATIENCE) == ()
    assert driver.state is before


def test_the_supervisor_is_lost_and_back_while_this_worker_trains():
    driver = in_view(1)
    driver.away(1.0)
    assert driver.feed(accepted()) == ()
    assert driver.phase is P.IN_VIEW
    assert driver.feed(prepare(2)) == ()
    assert driver.feed(GroupLeft()) == (SendReport(2),)


def test_a_new_supervisor_learns_that_this_worker_is_finished():
    driver = at_end(1)
    assert driver.feed(accepted()) == (SendMessage(finished(1)),)
    driver.feed(abort(2))
    assert driver.feed(accepted()) == ()


def test_a_new_supervisor_learns_that_a_collective_failed():
    driver = in_view(1)
    driver.feed(GroupLeft(failure(1)))
    assert driver.feed(accepted()) == (SendMessage(failure(1)),)
    driver.feed(abort(2))
    assert driver.feed(accepted()) == (SendMessage(failure(1)),)
    driver.feed(view(2))
    assert driver.feed(accepted()) == ()


def test_a_new_supervisor_learns_that_the_code_of_this_worker_raised():
    driver = in_view(1)
    driver.feed(CodeRaised(exception(holds=True)))
    assert driver.feed(accepted()) == (SendMessage(exception(holds=True)),)


@pytest.mark.parametrize("phase", [P.WAITING, P.OPENING, P.IN_VIEW, P.FINISHED])
def test_a_new_supervisor_learns_that_this_worker_was_asked_to_leave(phase):
    driver = IN_EVERY_PHASE[phase]()
    driver.feed(LeaveRequested("SIGTERM"))
    rest = (SendMessage(finished(1)),) if phase is P.FINISHED else ()
    assert driver.feed(accepted()) == (SENT_LEAVE, *rest)


@pytest.mark.parametrize("make", [waiting, at_end])
def test_a_worker_that_waits_is_orphaned_when_its_patience_is_over(make):
    driver = make()
    (action,) = driver.away(PATIENCE + 1.0)
    assert action == Exit("the supervisor stayed away for 31 s", orphaned=True)
    assert driver.phase is P.ORPHANED
    assert driver.state.ended
    assert driver.feed(accepted()) == ()


@pytest.mark.parametrize("make", [waiting, at_end])
def test_a_worker_that_waits_is_orphaned_when_the_run_is_started_again(make):
    driver = make()
    assert driver.away(0.0, restarting=True) == ()
    (action,) = driver.away(0.1, restarting=True)
    assert isinstance(action, Exit)
    assert action.orphaned
    assert "started again" in action.reason


def test_an_orphan_that_trains_stops_with_its_group_and_finishes():
    driver = in_view(1)
    assert driver.away(PATIENCE + 1.0) == (RequestStop("the supervisor stayed away for 31 s"),)
    assert not driver.state.ended
    driver.feed(RunFinished(finished(1)))
    (action,) = driver.away(PATIENCE + 2.0)
    assert isinstance(action, Exit)
    assert driver.phase is P.ORPHANED


def test_orphaned_in_a_collective():
    """Blocked for as long as the supervisor is away: no supervisor will end the wait, so the worker does."""
    driver = in_view(1)
    driver.now = 100.0
    assert driver.away(PATIENCE + 1.0, blocked_since=driver.now - PATIENCE)[1:] == ()
    stop, interrupt = driver.away(PATIENCE + 1.0, blocked_since=driver.now - PATIENCE - 1.0)
    assert isinstance(stop, RequestStop)
    assert interrupt == Interrupt("the supervisor stayed away")
    assert driver.away(PATIENCE + 1.0, blocked_since=driver.now - PATIENCE - 1.0) == (stop,)
    assert driver.feed(GroupLeft(failure(1))) == (SendMessage(failure(1)),)
    (leave,) = driver.away(PATIENCE + 1.1)
    assert isinstance(leave, Exit)
    assert leave.orphaned


@in_group
def test_a_group_that_was_left_because_of_an_interrupt_is_announced(phase):
    """A supervisor that comes back learns of it, whether the thread knows a failure or only the interrupt."""
    told = []
    for left in (GroupLeft(), GroupLeft(failure(1))):
        driver = IN_EVERY_PHASE[phase]()
        driver.now = 100.0
        driver.away(PATIENCE + 1.0, blocked_since=0.0)
        (sent,) = driver.feed(left)
        assert isinstance(sent, SendMessage)
        assert driver.feed(accepted()) == (sent,)
        told.append(sent.message)
    assert told == [CollectiveFailed(generation=1, reason="the supervisor stayed away"), failure(1)]


def test_a_wait_that_began_before_the_supervisor_was_lost_counts_from_the_loss():
    driver = in_view(1)
    driver.now = 100.0
    assert driver.away(1.0, blocked_since=0.0) == ()


def test_a_wait_for_others_is_short_when_the_run_is_started_again():
    driver = in_view(1)
    driver.now = 100.0
    interrupt = Interrupt("the supervisor stayed away")
    assert interrupt not in driver.away(9.0, blocked_since=driver.now - 2.0, restarting=True)
    assert interrupt not in driver.away(9.0, blocked_since=driver.now - 2.1)
    assert interrupt in driver.away(9.0, blocked_since=driver.now - 2.1, restarting=True)


def test_a_view_that_opens_is_not_given_up_with_the_supervisor():
    driver = opening(1)
    assert driver.away(PATIENCE + 1.0) == ()
    assert driver.phase is P.OPENING


# dismissed while waiting


def test_dismissed_while_waiting_for_the_next_view():
    driver = in_view(1)
    driver.feed(prepare(2))
    driver.feed(GroupLeft())
    assert driver.feed(Dismissed(reason="rank 1 left")) == (Exit("rank 1 left"),)
    assert driver.feed(view(2)) == ()
