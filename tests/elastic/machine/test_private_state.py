"""State that only one member has (compression residuals) goes on with the run, or all go back, and say so."""

from __future__ import annotations

from dataclasses import replace

from tests.elastic.machine.machine_driver import (
    Driven,
    failure_at,
    leave_of,
    only,
    only_sent,
    report_of,
    sent,
)

from paceline.control.messages import Dismissed, Prepare
from paceline.elastic.machine.actions import Action, InstallView
from paceline.elastic.machine.machine_events import WorkerLost
from paceline.elastic.machine.state import WorkerStatus

Owed = tuple[tuple[int, tuple[int, ...]], ...]


def report(job: Driven, **owed: Owed) -> list[Action]:
    """All who are asked report what they have, by "m3" for member 3; they are at its first moment."""
    told: list[Action] = []
    for number in sorted(job.state.pending):
        mine = owed.get(f"m{number}", ())
        joins = job.state.workers[number].status is WorkerStatus.READY
        progress = None if joins or not mine else (mine[0][0], 0, 0)
        told += job.tell(report_of(number, job.state.generation, progress, (), True, private_shards=mine))
    return told


def test_a_lost_member_takes_its_shards_debts_with_it_and_all_go_back():
    job = Driven(3, 6).running()
    job.tell(WorkerLost(1, "crash", "killed"))
    told = report(job, m2=((5, (2, 3)),), m3=((5, (4, 5)),))
    view = only(told, InstallView)
    assert (view.plan.restore, view.plan.source) == (True, -1)
    assert "the compression residuals of shards 0, 1 are lost" in view.reason


def test_before_the_first_step_no_shard_owes_anything():
    job = Driven(3, 6).running()
    job.tell(WorkerLost(1, "crash", "killed"))
    all_shards = tuple(range(6))
    told = report(job, m2=((0, all_shards),), m3=((0, all_shards),))
    assert only(told, InstallView).plan.restore is False


def test_a_lost_member_whose_shards_have_moved_takes_nothing_with_it():
    """It was lost after it had handed its shards over, or before it had got any."""
    job = Driven(3, 6).running()
    job.tell(WorkerLost(1, "crash", "killed"))
    told = report(job, m2=((5, (0, 1, 2, 3)),), m3=((5, (4, 5)),))
    assert only(told, InstallView).plan.restore is False


def test_debts_that_no_member_lost_are_no_reason_to_go_back():
    job = Driven(2, 4).running()
    job.beat_all()
    job.tell(failure_at(1, 1, "a line is cut"))
    told = report(job, m1=((5, (0, 1)),), m2=((5, (2, 3)),))
    assert only(told, InstallView).plan.restore is False


def test_a_member_that_was_late_for_a_decided_step_moves_its_debts_on():
    job = Driven(2, 4).running()
    job.beat_all()
    job.tell(failure_at(1, 1, "a line is cut"))
    told = report(job, m1=((5, (0, 1)), (6, (0, 1))), m2=((6, (2, 3)),))
    plan = only(told, InstallView).plan
    assert (plan.restore, plan.source, plan.stale_indexes) == (False, 1, (0,))


def test_a_member_that_cannot_follow_sends_all_back():
    """It is behind by a step and has not sent its part: then it cannot know what its shards owe."""
    job = Driven(2, 4).running()
    job.beat_all()
    job.tell(failure_at(1, 1, "a line is cut"))
    told = report(job, m1=((5, (0, 1)),), m2=((6, (2, 3)),))
    view = only(told, InstallView)
    assert view.plan.restore is True
    assert "shards 0, 1 are lost" in view.reason


def test_who_leaves_hands_its_debts_over_first():
    job = Driven(3, 6).running()
    job.beat_all()
    job.tell(leave_of(3, "SIGTERM"))
    told = report(job, m1=((5, (0, 1)),), m2=((5, (2, 3)),), m3=((5, (4, 5)),))
    plan = only(told, InstallView).plan
    assert (plan.restore, plan.members) == (False, (1, 2, 3))
    assert plan.shards[2] == ()
    assert not sent(told, Dismissed)
    # The others have its debts now, and it can go with the next step.
    told = job.install_all()
    assert only_sent(told, Prepare).abort is False
    told = report(job, m1=((6, (0, 1, 2)),), m2=((6, (3, 4, 5)),), m3=((6, ()),))
    assert only_sent(told, Dismissed).member == 3
    plan = only(told, InstallView).plan
    assert (plan.restore, plan.members) == (False, (1, 2))


def test_a_slow_member_that_was_replaced_goes_when_it_has_handed_over():
    job = Driven(2, 4, stragglers="replace").running()
    job.beat_all()
    job.tell(leave_of(2, "SIGTERM"))
    job.state.workers[2] = replace(job.state.workers[2], leave_reason="straggler")
    told = report(job, m1=((5, (0, 1)),), m2=((5, (2, 3)),))
    assert only(told, InstallView).plan.shards == ((0, 1, 2, 3), ())
    assert only_sent(job.install_all(), Prepare).abort is False


def test_the_one_that_leaves_has_decided_a_step_that_the_others_have_not():
    """It is asked to hand over, and the others follow it by a step."""
    job = Driven(2, 4).running()
    job.beat_all()
    job.tell(leave_of(2, "SIGTERM"))
    job.tell(failure_at(1, 1, "a line is cut"))
    told = report(job, m1=((5, (0, 1)), (6, (0, 1))), m2=((6, (2, 3)),))
    plan = only(told, InstallView).plan
    assert (plan.restore, plan.members, plan.source, plan.stale_indexes) == (False, (1, 2), 1, (0,))


def test_a_joiner_brings_nothing_and_needs_nothing():
    job = Driven(2, 4).running()
    job.beat_all()
    job.tell(failure_at(1, 1, "a line is cut"))
    told = report(job, m1=((5, (0, 1)),), m2=((5, (2, 3)),))
    assert only(told, InstallView).plan.restore is False
