"""From reports to the next view: who is in it, who hands its state to whom, what is kept or restored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.elastic.machine.machine_driver import (
    installed_by,
    only,
    sent,
    some,
)
from tests.elastic.machine.made_states import NOW, after, change, fresh_actions, made

from paceline.control.field_types import Progress
from paceline.control.messages import Dismissed, MemberReport, Stop, ViewPlan
from paceline.elastic.machine import view_change
from paceline.elastic.machine.actions import EndJob, InstallView, RecordRepair, RequestDial
from paceline.elastic.machine.hash_votes import Dispute
from paceline.elastic.machine.state import JobPhase, JobState, Slot, Worker, WorkerStatus


def report(progress: Progress | None = (5, 0, 0), held: tuple[int, ...] = (), **more: Any) -> MemberReport:
    values = {"has_private_state": False, **more}
    return MemberReport(generation=4, progress=progress, held_shards=held, **values)


def preparing(
    *reports: MemberReport, abort: bool = True, agents: tuple[int, ...] = (), **settings: Any
) -> JobState:
    """All members have reported, in generation 4."""
    job = made(agents or (0,) * len(reports), JobPhase.PREPARING, shards=2 * len(reports), **settings)
    job.generation, job.abort, job.committed, job.reason = 4, abort, True, "a test"
    job.reports = dict(enumerate(reports, 1))
    job.next_tick_at = NOW + 50.0
    return job


def decided(job: JobState) -> ViewPlan:
    out = fresh_actions(job)
    view_change.proceed(job, "all reported")
    return only(out, InstallView).plan


def reason_of(job: JobState) -> str:
    out = fresh_actions(job)
    view_change.proceed(job, "all reported")
    return only(out, InstallView).reason


def test_the_furthest_hands_its_state_to_those_behind():
    plan = decided(preparing(report((5, 0, 0)), report((6, 0, 0)), report((5, 1, 0)), report((6, 0, 0))))
    assert (plan.generation, plan.members, plan.slots) == (4, (1, 2, 3, 4), (0, 1, 2, 3))
    assert (plan.source, plan.stale_indexes, plan.restore, plan.restore_before) == (1, (0, 2), False, -1)
    assert (plan.disputed, plan.ends) == (-1, "")
    plan = decided(preparing(report(), report()))
    assert (plan.source, plan.stale_indexes) == (-1, ())


def test_where_no_member_has_a_state_all_restore():
    job = preparing(report(None), report(None))
    job.restore_before, job.votes, job.lineage = 7, {(5, ""): {1: "a"}}, {2: 1}
    plan = decided(job)
    assert (plan.restore, plan.source, plan.stale_indexes, plan.restore_before) == (True, -1, (), 7)
    assert (job.votes, job.lineage) == ({}, {})


def test_what_is_tainted_reaches_as_far_as_those_that_go_back():
    job = preparing(report((9, 0, 0)), report((4, 0, 0)))
    job.restore, job.restore_before, job.tainted_until = True, 3, 6
    plan = decided(job)
    assert (plan.restore, plan.restore_before, job.tainted_until) == (True, 3, 9)
    job = preparing(report((9, 0, 0)))
    job.restore, job.tainted_until = True, 0
    decided(job)
    assert job.tainted_until == 9
    job = preparing(report((9, 0, 0)))
    job.restore = True
    decided(job)
    assert job.tainted_until == -1


def test_held_shards_stay_only_after_an_abort_and_only_with_the_furthest():
    reports = report((6, 0, 0), (3,)), report((5, 0, 0), (0,)), report((6, 0, 0), ())
    job = preparing(*reports)
    plan = decided(job)
    assert plan.shards == ((0, 3), (1, 2), (4, 5))
    assert not job.is_contiguous
    job = preparing(*reports, abort=False)
    assert decided(job).shards == ((0, 1), (2, 3), (4, 5))
    assert job.is_contiguous
    job = preparing(*reports)
    job.restore = True
    assert decided(job).shards == ((0, 1), (2, 3), (4, 5))


def test_who_leaves_is_left_out_and_dismissed():
    job = preparing(report(), report(), report())
    change(job, 2, status=WorkerStatus.LEAVING, leave_reason="scaled")
    job.slots[1] = replace(job.slots[1], wanted=False)
    out = fresh_actions(job)
    view_change.proceed(job, "")
    assert only(out, InstallView).plan.members == (1, 3)
    assert [one.member for one in sent(out, Dismissed)] == [2]
    assert sorted(job.slots) == [0, 2]


def test_who_leaves_and_has_the_only_state_hands_it_over_and_computes_nothing():
    job = preparing(report(), report(None))
    change(job, 1, status=WorkerStatus.LEAVING, leave_reason="preempted")
    plan = decided(job)
    assert (plan.members, plan.source, plan.stale_indexes) == ((1, 2), 0, (1,))
    assert plan.shards == ((), (0, 1, 2, 3))
    job = preparing(report(), report())
    for member in (1, 2):
        change(job, member, status=WorkerStatus.LEAVING, leave_reason="preempted")
    plan = decided(job)
    assert (plan.members, plan.shards) == ((1, 2), ((0, 1), (2, 3)))


def test_a_leaving_member_without_state_is_not_needed_where_no_member_has_state():
    job = preparing(report(None), report(None))
    change(job, 1, status=WorkerStatus.LEAVING, leave_reason="preempted")
    assert decided(job).members == (2,)


def private(progress: Progress | None, *shards: int) -> MemberReport:
    step = progress[0] if progress is not None else 0
    return report(progress, has_private_state=True, private_shards=((step, shards),))


def test_private_state_of_who_leaves_is_handed_over_first():
    job = preparing(private((5, 0, 0), 0, 1), private((5, 0, 0), 2, 3))
    change(job, 2, status=WorkerStatus.LEAVING, leave_reason="preempted")
    plan = decided(job)
    assert (plan.members, plan.restore, plan.shards) == ((1, 2), False, ((0, 1, 2, 3), ()))


def test_private_state_that_is_lost_makes_all_restore_without_who_leaves():
    job = preparing(private((5, 0, 0), 0, 1), private((5, 0, 0), 2), private((5, 0, 0), 4))
    change(job, 2, status=WorkerStatus.LEAVING, leave_reason="preempted")
    plan = decided(job)
    assert (plan.members, plan.restore) == ((1, 3), True)
    job = preparing(private((5, 0, 0), 0))
    change(job, 1, status=WorkerStatus.LEAVING, leave_reason="preempted")
    plan = decided(job)
    assert (plan.members, plan.restore) == ((1,), True)


def test_a_joiner_is_a_member_from_now_on_and_one_that_was_done_too():
    job = preparing(report(), report(None), report())
    change(job, 2, status=WorkerStatus.READY, since=5.0)
    change(job, 3, status=WorkerStatus.DONE, digest="x")
    job.productive_seconds = 12.0
    decided(job)
    joined = job.workers[2]
    assert (joined.status, joined.since, joined.productive_before) == (WorkerStatus.MEMBER, NOW, 12.0)
    assert job.workers[3].status is WorkerStatus.MEMBER
    assert job.workers[1].since == NOW - 50.0


def test_what_is_known_while_a_view_is_installed():
    job = preparing(report(), report())
    job.base_progress, job.asked_at, job.assigned_at = (4, 0, 0), 0.0, 0.0
    job.votes = {(5, ""): {1: "a"}}
    plan = decided(job)
    assert (job.phase, job.view) == (JobPhase.INSTALLING, plan)
    assert vars(job)["base_progress"] is None
    assert (job.pending, job.reports) == (frozenset({1, 2}), {})
    assert (job.asked_at, job.assigned_at, job.votes) == (NOW, NOW, {(5, ""): {1: "a"}})
    assert job.next_tick_at == NOW + 5.0


def test_a_disputed_step_is_computed_again_with_the_assignment_it_had():
    old = ((0, 3), (1, 2))
    for leaves, restore, shards in (("", True, old), ("scaled", True, None), ("", False, None)):
        job = preparing(report(), report())
        job.dispute = Dispute((4, ""), {1: "a", 2: "b"}, trails={1: ()}, assignment=old)
        job.restore = restore
        if leaves:
            change(job, 2, status=WorkerStatus.DONE, leave_reason=leaves)
            change(job, 1, status=WorkerStatus.DONE, leave_reason=leaves)
        plan = decided(job)
        assert plan.disputed == 4
        assert plan.shards == (shards or ((0, 1), (2, 3)))


def test_the_reason_of_a_view_is_what_sends_all_back():
    job = preparing(report(), report())
    job.restore, job.dispute, job.dispute_count = True, Dispute((5, ""), {1: "a", 2: "b"}), 1
    assert reason_of(job) == job.reason
    for restore in (False, True):
        job = preparing(report(digest="a"), report(digest="b"))
        job.restore = restore
        assert (reason_of(job) == job.reason, job.dispute_count) == (False, 1)
    job = preparing(report(digest="a", peers_differed=True), report(None))
    assert (reason_of(job) == job.reason, job.restore) == (False, True)
    job = preparing(report(digest="a"), report(digest="a"))
    job.restore = True
    assert reason_of(job) == job.reason


def test_a_job_that_has_too_few_workers_without_one_whose_report_differs_ends():
    same, other = report(digest="a"), report(digest="b")
    job = preparing(same, same, other, min_workers=3, max_worker_failures=0)
    out = fresh_actions(job)
    view_change.proceed(job, "all reported")
    assert (only(out, EndJob).failed, some(out, InstallView)) == (3, [])
    assert decided(preparing(same, same, other, min_workers=2, max_worker_failures=0)).members == (1, 2)


def test_a_job_that_has_too_few_workers_without_one_that_voted_otherwise_ends():
    """The votes were cast before the view ended, and the reports say nothing about the states."""
    for least, ends in ((3, True), (2, False)):
        job = preparing(report(), report(), report(), min_workers=least, max_worker_failures=0)
        job.votes = {(5, ""): {1: "a", 2: "a", 3: "b"}}
        out = fresh_actions(job)
        view_change.proceed(job, "all reported")
        assert [end.failed for end in some(out, EndJob)] == ([3] if ends else [])
        assert [view.plan.members for view in some(out, InstallView)] == ([] if ends else [(1, 2)])


def test_a_job_that_fails_forms_its_last_view_or_ends():
    job = preparing(report(), report())
    job.stop_reason, job.fatal_failure = "it raised", (2, "it raised")
    assert decided(job).ends == "it raised"
    job = preparing(report(None), report(None))
    job.stop_reason, job.fatal_failure = "it raised", (2, "it raised")
    out = fresh_actions(job)
    view_change.proceed(job, "")
    (ended,) = some(out, EndJob)
    assert (ended.ok, ended.failed, ended.reason) == (False, 2, "it raised")


# whose state it is


def lineage(*reports: MemberReport, known: dict[int, int] | None = None) -> dict[int, int]:
    job = preparing(*reports)
    job.lineage = dict(known or {})
    decided(job)
    return job.lineage


def test_who_takes_a_state_that_no_other_confirms_is_one_vote_with_its_source():
    here, behind = report((6, 0, 0), digest="a"), report((5, 0, 0))
    assert lineage(here, behind) == {2: 1}
    assert lineage(here, behind, behind) == {2: 1, 3: 1}
    assert lineage(here, behind, known={1: 9}) == {1: 9, 2: 9}
    assert lineage(here, here, behind) == {}
    assert lineage(here, here, behind, known={2: 1}) == {2: 1, 3: 1}
    assert lineage(report((6, 0, 0)), report((6, 0, 0)), behind) == {3: 1}
    assert lineage(here, report((6, 0, 0), digest=""), behind) == {3: 1}


# all are in the view


def installing(*agents: int) -> JobState:
    job = made(agents or (0, 0), JobPhase.INSTALLING, shards=4)
    job.committed = True
    job.pending = frozenset(job.workers)
    job.next_tick_at = NOW + 50.0
    return job


def test_when_all_have_installed_the_job_runs():
    job = installing()
    job.max_progress, job.restore, job.abort, job.restore_before = (7, 0, 0), True, True, 3
    job.failed_at, job.lost_slots = NOW - 2.0, (5, 1, 5)
    job, actions = after(job, installed_by(1, 3, (6, 0, 0)), NOW + 1.0)
    assert (job.phase, actions, job.base_progress) == (JobPhase.INSTALLING, [], (6, 0, 0))
    assert (job.last_message_at[1], job.progressed_at) == (NOW + 1.0, NOW + 1.0)
    job, actions = after(job, installed_by(2, 3, (5, 0, 0)), NOW + 2.0)
    assert job.phase is JobPhase.RUNNING
    assert (job.base_progress, job.max_progress, job.restore, job.abort) == ((5, 0, 0), None, False, False)
    assert (job.progressed_at, job.productive_at, job.restore_before) == (NOW + 2.0, NOW + 2.0, -1)
    repair = only(actions, RecordRepair)
    assert (repair.generation, repair.seconds, repair.lost) == (3, 4.0, (1, 5))
    assert (job.failed_at, job.lost_slots) == (None, ())


def test_a_repair_names_the_lost_slots_in_their_order():
    job = installing(0)
    # Not the order in which a set holds small numbers.
    job.failed_at, job.lost_slots = NOW, (8, 1)
    _, actions = after(job, installed_by(1, 3))
    assert only(actions, RecordRepair).lost == (1, 8)


def test_what_is_tainted_stays_so_in_the_next_view():
    job = installing(0)
    job.tainted_until, job.restore_before = 0, 3
    job, actions = after(job, installed_by(1, 3))
    assert (job.restore_before, some(actions, RecordRepair)) == (3, [])


def test_an_installation_of_another_generation_or_member_changes_nothing():
    job = installing()
    for event in (installed_by(1, 2), installed_by(1, 4), installed_by(9, 3)):
        again, actions = after(job, event)
        assert (again.pending, actions) == (job.pending, [])
    job, _ = after(job, installed_by(1, 3))
    again, _ = after(job, installed_by(1, 3, (1, 0, 0)))
    assert again.base_progress is None


def test_a_view_that_restores_begins_from_what_all_agreed_on():
    job = installing()
    assert job.view is not None
    again, _ = after(job, installed_by(1, 3, (6, 0, 0)))
    assert again.agreed_step == 0
    job.view = replace(job.view, restore=True)
    again, _ = after(job, installed_by(1, 3, (6, 0, 0)))
    assert again.agreed_step == 6


def test_a_stop_is_told_when_all_are_in_the_view():
    job = installing()
    job.stop_reason, job.pending = "enough", frozenset({2})
    job, actions = after(job, installed_by(2, 3))
    assert job.phase is JobPhase.STOPPING
    assert sent(actions, Stop)[0].members == (1, 2)
    job = installing()
    job.stop_reason, job.fatal_failure, job.pending = "it raised", (1, "it raised"), frozenset({2})
    job, actions = after(job, installed_by(2, 3))
    assert (job.phase, sent(actions, Stop)) == (JobPhase.STOPPING, [])


def test_who_is_ready_is_asked_to_dial_when_the_view_is_whole():
    job = installing(0, 0)
    job.workers[3] = Worker(3, 2, 1, WorkerStatus.READY, NOW)
    job.slots[2], job.next_member, job.last_message_at[3] = Slot(2, 1, worker=3), 4, NOW
    job.pending = frozenset({2})
    job, actions = after(job, installed_by(2, 3))
    assert only(actions, RequestDial) == RequestDial(3, (1, 2))
