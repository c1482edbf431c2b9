"""Joining, leaving, the first view, a view that does not form, and losses."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from tests.elastic.machine.machine_driver import (
    finish_of,
    hello_of,
    leave_of,
    only,
    report_of,
    sent,
    some,
    started,
)
from tests.elastic.machine.made_states import NOW, after, change, fresh_actions, made

from paceline.control.field_types import Progress
from paceline.control.messages import Dismissed, MemberReport, Prepare, Stop
from paceline.elastic.machine import machine, view_change
from paceline.elastic.machine.actions import (
    Action,
    EndJob,
    InstallView,
)
from paceline.elastic.machine.machine_events import Tick, WorkerLost
from paceline.elastic.machine.state import JobPhase, JobState, Slot, Worker, WorkerStatus


def report(progress: Progress | None = (5, 0, 0), held: tuple[int, ...] = (), **more: Any) -> MemberReport:
    values = {"has_private_state": False, **more}
    return MemberReport(generation=4, progress=progress, held_shards=held, **values)


def installing(*agents: int) -> JobState:
    job = made(agents or (0, 0), JobPhase.INSTALLING, shards=4)
    job.committed = True
    job.pending = frozenset(job.workers)
    job.next_tick_at = NOW + 50.0
    return job


def running(*agents: int, **settings: Any) -> JobState:
    job = made(agents or (0, 0, 0), **settings)
    job.committed, job.next_tick_at = True, NOW + 50.0
    return job


def joiner(job: JobState, member: int, status: WorkerStatus = WorkerStatus.READY, since: float = NOW) -> None:
    job.workers[member] = Worker(member, member - 1, 0, status, since)
    job.slots[member - 1] = Slot(member - 1, worker=member)
    job.next_member = member + 1
    if status is WorkerStatus.READY:
        job.last_message_at[member] = NOW


def wish(job: JobState) -> tuple[str | None, list[Action]]:
    out = fresh_actions(job)
    return view_change.admit_and_release(job), out


def test_who_is_ready_joins_at_a_boundary():
    job = running()
    assert wish(job) == (None, [])
    joiner(job, 4)
    _, out = wish(job)
    (asked,) = sent(out, Prepare)
    assert (asked.members, asked.abort, asked.generation) == ((1, 2, 3, 4), False, 4)
    assert (job.phase, job.pending, job.asked_at) == (JobPhase.PREPARING, frozenset({1, 2, 3, 4}), NOW)
    assert job.next_tick_at == NOW + 5.0


@pytest.mark.parametrize(
    "phase", [JobPhase.STOPPING, JobPhase.INSTALLING, JobPhase.PREPARING, JobPhase.RETURNING]
)
def test_no_worker_joins_in_another_phase(phase):
    job = running()
    joiner(job, 4)
    job.phase = phase
    assert wish(job) == (None, [])


def test_no_worker_joins_or_leaves_when_one_is_done():
    job = running()
    joiner(job, 4)
    change(job, 1, status=WorkerStatus.DONE)
    assert wish(job) == (None, [])


@pytest.mark.parametrize(("since", "waits"), [(0.0, True), (0.99, True), (1.0, False)])
def test_joiners_wait_a_moment_for_others_that_were_started_lately(since, waits):
    job = running()
    joiner(job, 4)
    joiner(job, 5, WorkerStatus.STARTING, since=NOW - since)
    _, out = wish(job)
    assert bool(sent(out, Prepare)) is not waits
    if waits:
        assert job.gather_until == job.next_tick_at == NOW + 0.25
        job.gather_until = NOW + 0.01
        assert not sent(wish(job)[1], Prepare)  # what was set stays
        job.gather_until = NOW
        assert sent(wish(job)[1], Prepare)
        assert job.gather_until == inf


def test_joiners_wait_for_one_that_is_ready_and_has_not_met_all():
    job = running()
    joiner(job, 4)
    joiner(job, 5)
    change(job, 5, agent_id=1)
    assert not sent(wish(job)[1], Prepare)
    change(job, 5, agent_id=0)
    job.gather_until = inf
    assert sent(wish(job)[1], Prepare)


def test_who_was_asked_to_go_goes_at_the_next_boundary():
    job = running()
    job, actions = after(job, leave_of(2, "SIGTERM"))
    assert (job.workers[2].status, job.workers[2].leave_reason) == (WorkerStatus.LEAVING, "preempted")
    (asked,) = sent(actions, Prepare)
    assert (asked.abort, started(actions)) == (False, [1])
    again, actions = after(job, leave_of(2, "SIGTERM"))
    assert (actions, again.preemptions) == ([], 1)


def test_a_slow_member_stays_until_another_has_come_or_it_has_no_shards():
    job = running()
    change(job, 2, status=WorkerStatus.LEAVING, leave_reason="straggler")
    job.slots[1] = replace(job.slots[1], worker=4)
    job.workers[4] = Worker(4, 1, 0, WorkerStatus.STARTING, NOW)
    job.next_member = 5
    assert wish(job) == (None, [])
    assert job.view is not None
    view = job.view
    for shards, goes in ((((0, 1, 2), (), (3, 4, 5)), True), ((), False), (((0, 1), (2, 3), ()), False)):
        again = job.copy()
        again.view = replace(view, shards=shards)
        assert bool(sent(wish(again)[1], Prepare)) is goes
    job.workers[4] = replace(job.workers[4], status=WorkerStatus.READY)
    job.last_message_at[4] = NOW
    (asked,) = sent(wish(job)[1], Prepare)
    assert asked.members == (1, 2, 3, 4)


def test_when_all_leave_they_wait_for_others_or_the_job_stops():
    job = running(0, 0)
    for member in (1, 2):
        change(job, member, status=WorkerStatus.LEAVING, leave_reason="preempted")
        job.slots[member - 1] = Slot(member - 1, given_up=True)
    for slot in (Slot(5, start_at=NOW + 9.0), Slot(5, worker=7)):
        again = job.copy()
        again.slots[5] = slot
        if slot.worker is not None:
            again.workers[7] = Worker(7, 5, 0, WorkerStatus.STARTING, NOW)
        said, out = wish(again)
        assert "can leave when" in (said or "")
        assert (out, again.phase) == ([], JobPhase.RUNNING)
    for slot in (Slot(5, given_up=True, start_at=NOW), Slot(5, wanted=False, start_at=NOW)):
        again = job.copy()
        again.slots[5] = slot
        _, out = wish(again)
        assert (again.phase, again.stop_requested_at) == (JobPhase.STOPPING, NOW)
        assert sent(out, Stop)[0].members == (1, 2)
        assert again.stop_reason == sent(out, Stop)[0].reason


def test_when_all_leave_and_one_has_come_they_hand_over():
    job = running(0)
    change(job, 1, status=WorkerStatus.LEAVING, leave_reason="straggler")
    job.slots[0] = Slot(0, worker=2)
    joiner(job, 2)
    job.workers[2] = replace(job.workers[2], slot=0)
    job.slots = {0: Slot(0, worker=2)}
    assert sent(wish(job)[1], Prepare)[0].members == (1, 2)


# the first view, and the first after all were lost


def starting(*statuses: WorkerStatus, **settings: Any) -> JobState:
    job = made((0,) * len(statuses), JobPhase.STARTING, shards=2 * len(statuses), **settings)
    job.view = None
    for member, status in enumerate(statuses, 1):
        change(job, member, status=status)
        if status is WorkerStatus.STARTING:
            del job.last_message_at[member]
    job.next_tick_at = NOW + 50.0
    return job


READY, STARTING = WorkerStatus.READY, WorkerStatus.STARTING


def first(job: JobState, now: float = NOW) -> list[tuple[int, ...]]:
    out = fresh_actions(job, now)
    view_change.try_start(job, "")
    return [view.plan.members for view in some(out, InstallView)]


def test_the_first_view_has_all_that_are_awaited():
    job = starting(READY, READY)
    assert first(job) == [(1, 2)]
    assert job.generation == 4
    assert first(starting(READY, STARTING)) == []
    assert first(starting(STARTING, STARTING)) == []
    job = starting(READY, STARTING)
    job.slots[2] = Slot(2, start_at=NOW)
    assert first(job) == []


def test_the_first_view_waits_no_longer_than_it_may():
    job = starting(READY, STARTING, start_seconds=20.0)
    assert first(job, NOW + 19.9) == []
    assert first(job, NOW + 20.0) == [(1,)]
    assert first(starting(READY, STARTING, start_seconds=20.0, min_workers=2), NOW + 20.0) == []
    assert first(starting(READY, READY, STARTING, start_seconds=20.0, min_workers=2), NOW + 20.0) == [(1, 2)]
    assert first(starting(STARTING, start_seconds=20.0, min_workers=0), NOW + 20.0) == []


@pytest.mark.parametrize(("at", "views"), [(19.9, []), (20.0, [(1,)])])
def test_the_first_view_waits_no_longer_for_one_that_was_started_again_later(at, views):
    job = starting(READY, STARTING, start_seconds=20.0)
    change(job, 1, since=NOW)
    change(job, 2, since=NOW + 10.0)
    job.last_message_at[1], job.next_tick_at = NOW + at, NOW
    _, actions = after(job, Tick(), NOW + at)
    assert [view.plan.members for view in some(actions, InstallView)] == views


@pytest.mark.parametrize(
    ("slot", "waits"),
    [
        (Slot(5, start_at=NOW + 2.0), True),
        (Slot(5, start_at=NOW + 2.1), False),
        (Slot(5, start_at=NOW, given_up=True), False),
        (Slot(5, start_at=NOW, wanted=False), False),
    ],
)
def test_the_first_view_waits_for_starts_that_come_soon(slot, waits):
    job = starting(READY)
    job.slots[5] = slot
    assert (first(job) == []) is waits


def test_the_first_view_waits_for_those_that_have_not_met():
    job = starting(READY, READY)
    change(job, 2, agent_id=1)
    assert first(job) == []
    assert first(job, NOW + 300.0) == [(1,)]


def test_with_no_worker_left_all_begins_anew():
    job = running(0, 0)
    job.reports, job.max_progress, job.abort, job.gather_until = {}, (5, 0, 0), True, NOW
    job.started_at = 0.0
    joiner(job, 3)
    job.phase, job.pending = JobPhase.PREPARING, frozenset({2})
    job.reports = {1: report(), 3: report(None)}
    job, _ = after(job, WorkerLost(1, "crash", "killed"))
    job, _ = after(job, WorkerLost(2, "crash", "killed"))
    assert (job.phase, job.view, job.pending, job.reports) == (JobPhase.STARTING, None, frozenset(), {})
    assert (job.max_progress, job.abort, job.gather_until, job.started_at) == (None, False, inf, NOW)
    assert not job.restore


def test_with_no_worker_left_the_next_look_is_when_something_can_have_happened():
    job = running(0, start_seconds=30.0, silence_least=8.0)
    job, _ = after(job, WorkerLost(1, "crash", "killed"))
    assert (job.phase, job.view) == (JobPhase.STARTING, None)
    next_look = machine.next_deadline(job)
    assert next_look is not None
    assert NOW < next_look <= NOW + 30.0


def test_with_no_worker_left_a_job_that_stops_ends():
    job = running(0)
    job.phase, job.stop_reason = JobPhase.STOPPING, "enough"
    job, actions = after(job, WorkerLost(1, "crash", "killed"))
    assert only(actions, EndJob).ok is False


# a view that does not form


def forming(seconds: float, **leaves: str) -> JobState:
    job = installing(0, 0)
    job.asked_at = NOW - seconds
    for name, why in leaves.items():
        change(job, int(name[1:]), status=WorkerStatus.LEAVING, leave_reason=why)
    return job


def test_a_view_that_does_not_form_is_waited_for_unless_a_member_is_asked_to_go():
    assert view_change.too_slow_to_form(forming(9.0)) is None
    assert view_change.too_slow_to_form(forming(2.0, m1="preempted")) is not None
    assert view_change.too_slow_to_form(forming(1.9, m1="preempted")) is None
    assert view_change.too_slow_to_form(forming(9.0, m1="scaled")) is None
    assert view_change.too_slow_to_form(forming(9.0, m1="preempted", m2="preempted")) is None
    job = forming(9.0, m1="preempted")
    job.phase = JobPhase.RUNNING
    assert view_change.too_slow_to_form(job) is None


def test_a_view_whose_source_leaves_is_waited_for():
    job = forming(9.0, m1="preempted")
    assert job.view is not None
    job.view = replace(job.view, source=0, stale_indexes=(1,))
    assert view_change.too_slow_to_form(job) is None
    job.view = replace(job.view, source=1, stale_indexes=(0,))
    assert view_change.too_slow_to_form(job) is not None
    # Without a source, after a restore, no member is waited for: not the last one either.
    assert view_change.too_slow_to_form(forming(9.0, m2="preempted")) is not None


def test_a_view_that_does_not_form_while_the_job_stops():
    job = forming(9.0)
    job.stop_reason, job.stop_requested_at = "enough", NOW - 1.9
    assert view_change.too_slow_to_form(job) is None
    job.stop_requested_at = NOW - 2.0
    assert view_change.too_slow_to_form(job) is not None


def test_without_those_who_leave_another_view_is_formed():
    job = forming(9.0, m1="preempted")
    job.last_message_at = dict.fromkeys((1, 2), NOW)
    job.next_tick_at = NOW
    job, actions = after(job, Tick())
    (asked,) = sent(actions, Prepare)
    assert (asked.abort, job.saves_alone) == (True, False)


def stopping_view(restore: bool = False) -> tuple[JobState, list[Action]]:
    job = forming(9.0)
    assert job.view is not None
    job.view = replace(job.view, restore=restore)
    job.stop_reason, job.stop_requested_at, job.next_tick_at = "enough", NOW - 9.0, NOW
    return after(job, Tick())


def test_while_the_job_stops_one_member_saves_alone():
    job, actions = stopping_view()
    assert sent(actions, Prepare)[0].abort
    assert job.saves_alone
    job, actions = after(job, report_of(1, 4, (5, 0, 0)))
    job, actions = after(job, report_of(2, 4, (6, 0, 0)))
    assert only(actions, InstallView).plan.members == (2,)
    assert [one.member for one in sent(actions, Dismissed)] == [1]
    assert (sorted(job.workers), sorted(job.slots)) == ([2], [1])


def test_of_equals_the_lowest_rank_saves():
    job, _ = stopping_view()
    job, _ = after(job, report_of(2, 4, (6, 0, 0)))
    job, actions = after(job, report_of(1, 4, (6, 0, 0)))
    assert only(actions, InstallView).plan.members == (1,)


def test_a_job_that_stops_before_it_has_restored_has_nothing_to_save():
    _, actions = stopping_view(restore=True)
    ended = only(actions, EndJob)
    assert (ended.ok, ended.stopped) == (True, "enough")


@pytest.mark.parametrize("reports", [(None, None), ((6, 0, 0), None)])
def test_where_no_member_can_save_alone_the_job_ends(reports):
    job, _ = stopping_view()
    private = reports[0] is not None
    job, _ = after(job, report_of(1, 4, reports[0], (), private))
    job, actions = after(job, report_of(2, 4, reports[1], (), private))
    ended = only(actions, EndJob)
    assert (ended.ok, ended.stopped) == (True, "enough")


def test_one_that_would_have_to_restore_saves_nothing():
    job, _ = stopping_view()
    job.restore = True
    job, _ = after(job, report_of(1, 4, (5, 0, 0)))
    job, actions = after(job, report_of(2, 4, (5, 0, 0)))
    assert only(actions, EndJob).ok


# losses


def test_a_loss_in_the_middle_of_a_boundary_asks_again_at_once():
    job = running()
    job.phase, job.generation, job.abort = JobPhase.PREPARING, 4, False
    job.pending = frozenset({1, 2, 3})
    again, actions = after(job, WorkerLost(2, "crash", "killed"))
    (asked,) = sent(actions, Prepare)
    assert (asked.abort, asked.generation, asked.members) == (True, 5, (1, 3))
    assert (again.failed_at, again.lost_slots) == (NOW, (1,))
    job.abort = True
    again, actions = after(job, WorkerLost(2, "crash", "killed"))
    assert (sent(actions, Prepare), again.pending) == ([], frozenset({1, 3}))


def test_the_loss_of_a_joiner_changes_no_view():
    job = running()
    joiner(job, 4)
    job.phase, job.generation, job.abort = JobPhase.PREPARING, 4, False
    job.pending = frozenset({1, 2, 3, 4})
    again, actions = after(job, WorkerLost(4, "crash", "killed"))
    assert (sent(actions, Prepare), again.pending, again.failed_at) == ([], frozenset({1, 2, 3}), None)
    job.phase, job.pending, job.generation = JobPhase.RUNNING, frozenset(), 3
    again, actions = after(job, WorkerLost(4, "crash", "killed"))
    assert (again.phase, sent(actions, Prepare)) == (JobPhase.RUNNING, [])


def test_who_is_done_is_asked_again_and_leaves_if_it_was_to_leave():
    job = running(0, 0, 0, 0, shards=8)
    change(job, 1, status=WorkerStatus.DONE, digest="x")
    change(job, 2, status=WorkerStatus.DONE, leave_reason="scaled")
    job.slots[1] = replace(job.slots[1], wanted=False)
    job.reports = {1: report()}
    job, actions = after(job, WorkerLost(3, "crash", "killed"))
    assert sent(actions, Prepare)[0].members == (1, 2, 4)
    assert (job.workers[1].status, job.workers[2].status) == (WorkerStatus.MEMBER, WorkerStatus.LEAVING)
    assert job.reports == {}


def test_where_some_are_at_the_end_and_some_have_stopped_before_it_all_meet_at_once():
    job = running()
    job.phase, job.generation, job.abort, job.pending = JobPhase.PREPARING, 4, False, frozenset({2, 3})
    job.reports = {1: report((8, 0, 0))}
    job, actions = after(job, finish_of(2, (9, 1, 0), "x", None, 3))
    assert sent(actions, Prepare) == []
    job, actions = after(job, finish_of(3, (9, 1, 0), "x", None, 3))
    (asked,) = sent(actions, Prepare)
    assert (asked.abort, asked.members) == (True, (1, 2, 3))


def test_members_that_were_told_to_abort_and_finish_are_not_asked_a_second_time():
    job = running()
    job.phase, job.generation, job.abort, job.pending = JobPhase.PREPARING, 4, True, frozenset({3})
    job.reports = {1: report((8, 0, 0)), 2: report((8, 0, 0))}
    job, actions = after(job, finish_of(3, (9, 1, 0), "x", None, 3))
    assert (actions, job.generation, job.pending) == ([], 4, frozenset({3}))
    job, actions = after(job, report_of(3, 4, (9, 1, 0)))
    assert only(actions, InstallView).plan.generation == 4


def test_a_hello_of_one_that_was_asked_is_answered_and_an_old_one_is_not():
    job = running()
    joined, actions = after(job, hello_of(2, 1, 0, 0))
    assert (joined.phase, actions) == (JobPhase.RUNNING, [])
    joined, actions = after(job, hello_of(2, 1, 0, 3, (5, 0, 0)), NOW + 1.0)
    assert (joined.phase, actions, joined.last_message_at[2]) == (JobPhase.RUNNING, [], NOW + 1.0)
    joined, actions = after(job, hello_of(2, 1, 0, 2, (5, 0, 0)))
    (asked,) = sent(actions, Prepare)
    assert (asked.abort, asked.members) == (True, (1, 2, 3))
