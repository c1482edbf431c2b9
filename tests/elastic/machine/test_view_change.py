"""From one view to the next: who is in it, who computes what, who hands its state to whom."""

from __future__ import annotations

import pytest
from tests.elastic.machine.machine_driver import (
    Driven,
    asked,
    beat_of,
    failure_at,
    finish_of,
    hello_of,
    installed_by,
    leave_of,
    only,
    only_sent,
    report_of,
    sent,
    some,
    started,
)

from paceline.control.messages import Dismissed, Prepare, Stop
from paceline.elastic.machine.actions import EndJob, InstallView, RecordFailure, RecordRepair, RecordVerdict
from paceline.elastic.machine.machine_events import FromMember, StopRequested, WorkerLost
from paceline.elastic.machine.state import JobPhase, WorkerStatus


def done(member: int, digest: str = "same", stopped: str | None = None, generation: int = 0) -> FromMember:
    return finish_of(member, (9, 1, 0), digest, stopped, generation)


def test_the_first_view_comes_when_all_came():
    job = Driven(4, 8)
    assert started(job.actions) == [0, 1, 2, 3]
    told = job.join_all()
    plan = only(told, InstallView).plan
    assert (plan.generation, plan.restore, plan.source, plan.stale_indexes) == (1, True, -1, ())
    assert plan.shards == ((0, 1), (2, 3), (4, 5), (6, 7))
    job.install_all()
    assert job.state.phase is JobPhase.RUNNING


def test_the_first_view_does_not_wait_for_ever():
    job = Driven(3, 3, start_seconds=10.0, min_workers=2)
    for member in (1, 2):
        job.tell(hello_of(member, member - 1))
        job.tell(beat_of(member, "wait", 0.0))
    told = job.wait(10.5)
    assert only(told, InstallView).plan.slots == (0, 1)
    assert [failure.slot for failure in some(told, RecordFailure)] == [2]


def test_after_a_loss_the_furthest_hands_its_state_over_and_held_gradients_stay():
    job = Driven(4, 8).running()
    job.tell(WorkerLost(2, "crash", "killed"))
    ask = asked(job.actions)
    assert (ask.members, ask.generation, ask.abort) == ((1, 3, 4), 2, True)
    job.tell(report_of(1, 2, (5, 0, 0), (0, 1)))
    job.tell(report_of(3, 2, (6, 0, 0), (4,)))
    plan = only(job.tell(report_of(4, 2, (6, 0, 0), (6, 7))), InstallView).plan
    assert (plan.members, plan.slots) == ((1, 3, 4), (0, 2, 3))
    assert (plan.source, plan.stale_indexes, plan.restore) == (1, (0,), False)
    # What member 1 holds is of an older step; what the others hold stays with them.
    assert 4 in plan.shards[1]
    assert set(plan.shards[2]) >= {6, 7}
    assert max(len(mine) for mine in plan.shards) == 3


def test_a_shard_that_two_hold_is_computed_by_one():
    job = Driven(3, 6).running()
    job.tell(WorkerLost(3, "crash", "killed"))
    plan = job.form_view(m1=(0, 1, 2), m2=(2, 3))
    assert plan.shards == ((0, 1, 2), (3, 4, 5))


def test_a_replacement_joins_at_a_boundary_and_gets_its_state_from_a_peer():
    job = Driven(3, 6).running()
    job.beat_all()
    job.tell(WorkerLost(2, "crash", "killed"))
    new = job.of_slot(1)
    job.form_view()
    told = job.tell(hello_of(new, 1))
    ask = asked(told)
    assert (ask.abort, new in ask.members) == (False, True)
    plan = job.form_view((7, 0, 0))
    assert plan.members == (1, new, 3)
    assert (plan.source, plan.stale_indexes) == (0, (1,))
    assert plan.shards == ((0, 1), (2, 3), (4, 5))


def test_a_repair_is_noted_with_its_time_and_who_was_lost():
    job = Driven(3, 6).running()
    job.tell(WorkerLost(2, "crash", "killed"))
    job.report_all()
    job.now += 0.25
    told = job.install_all()
    repair = only(told, RecordRepair)
    assert (repair.generation, repair.lost) == (2, (1,))
    assert repair.seconds == pytest.approx(0.25)


def test_a_view_has_the_reason_that_its_members_were_asked_for():
    job = Driven(4, 8).running()
    for lost, why in ((4, "killed"), (3, "out of memory")):
        reason = asked(job.tell(WorkerLost(lost, "crash", why))).reason
        assert why in reason
        assert only_sent(job.tell(hello_of(1, 0, 0, 1, (5, 0, 0))), Prepare).reason == reason
        assert only(job.report_all(), InstallView).reason == reason
        job.install_all()


def test_a_second_loss_while_reporting_needs_no_new_question():
    job = Driven(4, 8).running()
    job.tell(WorkerLost(1, "crash", "killed"))
    job.tell(report_of(2, 2, (5, 0, 0)))
    job.tell(report_of(3, 2, (5, 0, 0)))
    told = job.tell(WorkerLost(4, "crash", "killed"))
    assert not sent(told, Prepare)
    assert only(told, InstallView).plan.members == (2, 3)


def test_a_loss_while_stopping_at_a_boundary_aborts():
    job = Driven(4, 8).running()
    job.tell(leave_of(4, "SIGTERM"))
    assert asked(job.actions).abort is False
    job.tell(WorkerLost(1, "crash", "killed"))
    assert (asked(job.actions).abort, job.state.generation) == (True, 3)


def test_a_loss_while_installing_asks_again():
    job = Driven(4, 8).running()
    job.tell(WorkerLost(1, "crash", "killed"))
    job.report_all()
    job.tell(installed_by(2, 2))
    job.tell(WorkerLost(3, "crash", "killed"))
    ask = asked(job.actions)
    assert (ask.members, ask.generation, ask.abort) == ((2, 4), 3, True)


def test_with_no_member_left_the_next_ones_restore():
    job = Driven(2, 4).running()
    job.beat_all()
    job.tell(WorkerLost(1, "crash", "killed"))
    job.tell(WorkerLost(2, "crash", "killed"))
    assert job.state.phase is JobPhase.STARTING
    plan = only(job.join_all(), InstallView).plan
    assert (plan.restore, plan.members) == (True, (3, 4))
    assert plan.generation > 2


def test_messages_of_another_generation_change_nothing():
    job = Driven(3, 6).running()
    job.tell(WorkerLost(1, "crash", "killed"))
    for stale in (report_of(2, 1, (5, 0, 0)), report_of(2, 3, (5, 0, 0)), installed_by(2, 2)):
        before = job.state.pending
        assert job.tell(stale) == []
        assert job.state.pending == before
    assert job.tell(failure_at(2, 2, "old")) == []
    assert job.tell(report_of(99, 2, (9, 9, 9))) == []


def test_who_leaves_reports_and_is_left_out_and_dismissed():
    job = Driven(3, 6).running()
    job.beat_all()
    told = job.tell(leave_of(3, "SIGTERM"))
    assert asked(told).abort is False
    assert started(told) == [2]
    told = job.report_all()
    assert only_sent(told, Dismissed).member == 3
    assert only(told, InstallView).plan.members == (1, 2)
    assert only(told, RecordFailure).kind == "preempted"


def test_the_last_member_hands_over_before_it_leaves():
    job = Driven(1, 2).running()
    job.beat_all()
    told = job.tell(leave_of(1, "SIGTERM"))
    assert not sent(told, Prepare)
    job.tell(hello_of(2, 0))
    plan = job.form_view((4, 0, 0))
    assert (plan.members, plan.source, plan.stale_indexes) == ((1, 2), 0, (1,))
    # All members have the state now: it leaves with the next view, which is asked for at once.
    assert job.state.phase is JobPhase.PREPARING
    plan = job.form_view((4, 0, 0))
    assert plan.members == (2,)


def test_all_done_with_the_same_weights_is_the_end():
    job = Driven(3, 6).running()
    job.tell(done(1))
    job.tell(done(2))
    assert only(job.tell(done(3)), EndJob).ok


def test_different_weights_at_the_end_are_no_good_end():
    job = Driven(3, 6).running()
    job.tell(done(1))
    job.tell(done(2, "other"))
    end = only(job.tell(done(3)), EndJob)
    assert (end.ok, end.failed) == (False, 2)


def test_a_loss_when_all_others_are_done_ends_the_job_well():
    job = Driven(2, 4).running()
    job.tell(done(1))
    assert only(job.tell(WorkerLost(2, "crash", "killed")), EndJob).ok


def test_who_is_done_still_helps_those_who_are_not():
    job = Driven(3, 6).running()
    job.beat_all()
    job.tell(done(1))
    job.tell(WorkerLost(3, "crash", "killed"))
    assert asked(job.actions).members == (1, 2)
    job.tell(report_of(1, 2, (9, 1, 0)))
    plan = only(job.tell(report_of(2, 2, (8, 1, 0))), InstallView).plan
    assert (plan.source, plan.stale_indexes) == (0, (1,))
    job.install_all()
    assert job.tell(done(1, generation=1)) == []
    job.tell(done(1, generation=2))
    assert only(job.tell(done(2, generation=2)), EndJob).ok


def test_at_the_very_end_a_joiner_is_not_waited_for():
    job = Driven(2, 4).running()
    job.beat_all()
    job.tell(WorkerLost(2, "crash", "killed"))
    job.form_view()
    job.tell(hello_of(3, 1))
    job.tell(report_of(3, job.state.generation, None))
    # The member had no step left to vote in.
    assert only(job.tell(done(1)), EndJob).ok


def test_a_worker_that_is_not_expected_may_end():
    job = Driven(2, 4).running()
    assert only_sent(job.tell(hello_of(77, 1, generation=1)), Dismissed).member == 77


def test_a_member_that_was_cut_off_is_asked_again():
    job = Driven(3, 6).running()
    job.tell(WorkerLost(1, "crash", "killed"))
    told = job.tell(hello_of(2, 1, generation=1, progress=(5, 0, 0)))
    assert asked(told).members == (2,)
    job.report_all()
    told = job.tell(hello_of(2, 1, generation=2, progress=(5, 0, 0)))
    assert 2 not in job.state.pending
    told = job.tell(hello_of(3, 2, generation=1, progress=(5, 0, 0)))
    assert asked(told).abort is True


def test_a_stop_is_told_to_the_members_and_again_after_a_repair():
    job = Driven(3, 6).running()
    assert only_sent(job.tell(StopRequested("ctrl-c")), Stop).members == (1, 2, 3)
    job.tell(WorkerLost(1, "crash", "killed"))
    assert started(job.actions) == []
    job.report_all()
    assert only_sent(job.install_all(), Stop).members == (2, 3)
    job.tell(done(2, stopped="ctrl-c"))
    end = only(job.tell(done(3, stopped="ctrl-c")), EndJob)
    assert (end.ok, end.stopped) == (True, "ctrl-c")


def test_joiners_that_were_started_together_join_together():
    job = Driven(4, 8).running()
    job.beat_all()
    job.tell(WorkerLost(1, "crash", "killed"))
    job.tell(WorkerLost(2, "crash", "killed"))
    job.form_view()
    assert not sent(job.tell(hello_of(5, 0)), Prepare)
    told = job.tell(hello_of(6, 1), after=0.3)
    assert set(asked(told).members) == {3, 4, 5, 6}


def test_standing_of_every_worker_is_what_it_should_be():
    job = Driven(2, 4).running()
    job.tell(leave_of(2, "SIGTERM"))
    assert {w.number: w.status for w in job.state.workers.values()} == {
        1: WorkerStatus.MEMBER,
        2: WorkerStatus.LEAVING,
        3: WorkerStatus.STARTING,
    }


def test_a_collective_that_breaks_because_a_member_died_counts_against_no_other():
    """The survivors tell of it before the death is known, three times in a row without a step."""
    job = Driven(3, 6, max_worker_failures=9).running()
    for _ in range(4):
        victim = job.of_slot(1)
        told = job.tell(failure_at(job.of_slot(0), job.state.generation, "a peer is away", (), (victim,)))
        assert not some(told, RecordVerdict)
        job.tell(WorkerLost(victim, "crash", "killed"))
        job.form_view()
        while not job.state.slots[1].worker:
            job.beat_all()
            job.wait(0.2)
        job.join_all()
        job.beat_all()
        job.wait(0.5)
        job.form_view()
