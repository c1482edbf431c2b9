"""How a job ends: all done, beyond help, or because of one worker's code, after the others have saved."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from tests.elastic.machine.machine_driver import exception_of, finish_of, hello_of, only, sent, some, started
from tests.elastic.machine.made_states import NOW, after, change, fresh_actions, made

from paceline.control.messages import Dismissed, Prepare, Stop
from paceline.elastic.machine import job_end
from paceline.elastic.machine.actions import (
    Action,
    EndJob,
    KillWorker,
    ProbeWorkers,
    RecordFailure,
    RecordVerdict,
)
from paceline.elastic.machine.machine_events import AgentLost, Tick, WorkerLost
from paceline.elastic.machine.state import JobPhase, JobState, Slot, Worker, WorkerStatus


def running(*agents: int, **settings: Any) -> JobState:
    job = made(agents or (0, 0, 0), **settings)
    job.committed, job.next_tick_at = True, NOW + 50.0
    return job


def add(job: JobState, member: int, status: WorkerStatus) -> None:
    job.workers[member] = Worker(member, member - 1, 0, status, NOW)
    job.slots[member - 1] = Slot(member - 1, worker=member)
    job.next_member = member + 1
    if status is WorkerStatus.READY:
        job.last_message_at[member] = NOW


def done(job: JobState, *digests: str, **more: Any) -> None:
    for member, digest in enumerate(digests, 1):
        change(job, member, status=WorkerStatus.DONE, digest=digest, **more)


def finished(job: JobState) -> tuple[EndJob, list[Action]]:
    out = fresh_actions(job)
    job_end.finish(job)
    return only(out, EndJob), out


# all are done


def test_all_are_done_when_no_member_of_the_view_is_not():
    job = running()
    assert not job_end.all_done(job)
    done(job, "x", "x")
    assert not job_end.all_done(job)
    done(job, "x", "x", "x")
    assert job_end.all_done(job)
    add(job, 4, WorkerStatus.READY)
    assert job_end.all_done(job)
    change(job, 1, status=WorkerStatus.LEAVING)
    assert not job_end.all_done(job)
    done(job, "x", "x", "x")
    job.restore = True
    assert not job_end.all_done(job)
    assert not job_end.all_done(JobState(job.settings))


def test_the_end_names_what_stopped_the_run():
    job = running()
    done(job, "x", "x", "x")
    ended, out = finished(job)
    assert (ended.ok, ended.failed, ended.stopped, len(out)) == (True, None, None, 1)
    assert (job.phase, job.pending, job.next_tick_at, job.ended) == (JobPhase.ENDED, frozenset(), inf, ended)
    job = running()
    done(job, "x", "x", "x")
    change(job, 2, stop_reason="enough")
    assert finished(job)[0].stopped == "enough"


@pytest.mark.parametrize(
    ("digests", "odd"), [(("a", "b", "a"), 2), (("b", "a", "a"), 1), (("a", "b", "c"), 1), (("a", "b"), 1)]
)
def test_other_weights_than_the_others_have_are_a_bad_end(digests, odd):
    job = running(*(0,) * len(digests))
    done(job, *digests)
    ended, out = finished(job)
    assert (ended.ok, ended.failed) == (False, odd)
    verdict = only(out, RecordVerdict)
    assert (verdict.member, verdict.slot) == (odd, odd - 1)


def test_of_equally_many_the_lowest_rank_is_named_whichever_worker_has_it():
    job = running(0, 0)
    done(job, "a", "b")
    change(job, 1, slot=1)
    change(job, 2, slot=0)
    assert finished(job)[0].failed == 2


def test_a_job_that_was_failing_ends_as_it_was_failing():
    job = running(0)
    done(job, "x")
    job.fatal_failure = (7, "it raised")
    ended, _ = finished(job)
    assert (ended.ok, ended.failed, ended.reason, ended.stopped) == (False, 7, "it raised", None)


def test_one_more_that_is_done():
    job = running(0, 0)
    for wrong in (finish_of(9, (9, 1, 0), "x", None, 3), finish_of(1, (9, 1, 0), "x", None, 2)):
        again, actions = after(job, wrong)
        assert ([w.status for w in again.workers.values()], actions) == ([WorkerStatus.MEMBER] * 2, [])
    job, actions = after(job, finish_of(1, (9, 1, 0), "x", "enough", 3), NOW + 1.0)
    one = job.workers[1]
    assert (one.status, one.digest, one.stop_reason) == (WorkerStatus.DONE, "x", "enough")
    assert (job.last_message_at[1], actions) == (NOW + 1.0, [])
    job, actions = after(job, finish_of(2, (9, 1, 0), "x", None, 0))
    assert only(actions, EndJob).stopped == "enough"


def test_one_that_is_ready_is_not_done():
    job = running(0)
    add(job, 2, WorkerStatus.READY)
    again, _ = after(job, finish_of(2, (9, 1, 0), "x", None, 3))
    assert again.workers[2].status is WorkerStatus.READY


# beyond help


def test_too_few_slots_are_the_end():
    for agents, minimum, ends in (((0, 0, 0), 2, False), ((0, 0, 0), 3, True), ((0, 0), 1, False)):
        job = running(*agents, min_workers=minimum, max_worker_failures=0)
        _, actions = after(job, WorkerLost(2, "crash", "killed"))
        assert bool(some(actions, EndJob)) is ends
        assert bool(some(actions, RecordVerdict)) is ends
    job = running(0, min_workers=0, max_worker_failures=0)
    _, actions = after(job, WorkerLost(1, "crash", "killed"))
    assert only(actions, EndJob).failed == 1


def test_a_job_in_which_nothing_ever_worked_ends():
    for committed, failures, ends in ((False, 2, True), (False, 1, False), (True, 2, False)):
        job = running(0, 0)
        job.committed = committed
        job.slots[0] = replace(job.slots[0], failures=failures)
        job.slots[1] = replace(job.slots[1], failures=1)
        _, actions = after(job, WorkerLost(2, "crash", "killed"))
        assert bool(some(actions, EndJob)) is ends


def test_the_tick_that_ends_the_job_ends_it_once_whatever_else_is_late():
    for spent, silent, failed in ((0, 900.0, 1), (2, 1.5, 3)):
        job = running(0, 0, min_workers=3, start_seconds=60.0)
        add(job, 3, WorkerStatus.READY)
        change(job, 3, agent_id=1, since=NOW - 100.0)
        job.agents[1], job.slots[2] = "host1", replace(job.slots[2], agent_id=1)
        job.slots[spent] = replace(job.slots[spent], failures=3)
        job.last_message_at[1], job.next_tick_at = NOW - silent, NOW
        job, actions = after(job, Tick())
        assert job.phase is JobPhase.ENDED
        assert only(actions, EndJob).failed == failed
        assert (started(actions), some(actions, ProbeWorkers)) == ([], [])


def test_a_refusal_that_ends_the_job_leaves_a_broken_link_alone():
    job = running(0, 1, min_workers=3, start_seconds=60.0)
    add(job, 3, WorkerStatus.READY)
    change(job, 3, since=NOW - 100.0)
    job.slots[2] = replace(job.slots[2], failures=3)
    job.dials_sent_at, job.next_tick_at = NOW - job.settings.check_seconds, NOW
    job.pending_dials, job.dial_results = frozenset({(2, 1)}), {(1, 2): "large packets are lost"}
    job, actions = after(job, Tick())
    assert only(actions, EndJob).failed == 3
    assert sorted(job.workers) == [1, 2]


def test_of_those_that_are_lost_at_once_the_last_one_ends_the_job():
    _, actions = after(running(0, 1, 1, min_workers=2), AgentLost(1, "no answer"))
    assert only(actions, EndJob).failed == 3


def test_while_the_job_stops_too_few_are_enough():
    job = running(0, 0, min_workers=2, max_worker_failures=0)
    job.phase, job.stop_reason = JobPhase.STOPPING, "enough"
    job, actions = after(job, WorkerLost(2, "crash", "killed"))
    assert (some(actions, EndJob), job.phase) == ([], JobPhase.PREPARING)


# who is in no view


def test_who_is_in_no_view_is_sent_away():
    job = running(0, 0)
    add(job, 3, WorkerStatus.READY)
    add(job, 4, WorkerStatus.STARTING)
    job.workers[5] = Worker(5, 0, 0, WorkerStatus.STARTING, NOW)
    out = fresh_actions(job)
    job_end.dismiss_idle(job, "enough")
    assert sorted(job.workers) == [1, 2]
    assert sorted(job.slots) == [0, 1]
    assert [one.member for one in sent(out, Dismissed)] == [3]
    assert [one.member for one in some(out, KillWorker)] == [4, 5]
    assert 3 not in job.last_message_at


def test_one_that_comes_while_the_job_stops_is_sent_away():
    job = running(0, 0)
    add(job, 3, WorkerStatus.STARTING)
    job.phase, job.stop_reason = JobPhase.STOPPING, "enough"
    job, actions = after(job, hello_of(3, 2))
    assert (sorted(job.workers), sorted(job.slots)) == ([1, 2], [0, 1])
    assert [one.member for one in sent(actions, Dismissed)] == [3]


# a worker's code raised


def raised(member: int, fault: str = "code", step: int = 7, holds: bool = True, far: int = 5) -> Any:
    return exception_of(member, "ValueError", fault, step, 0, holds, (far, 0, 0))


def test_once_is_forgiven_and_the_same_step_twice_is_not():
    job = running()
    job, actions = after(job, raised(2))
    assert (job.phase, job.raised_steps) == (JobPhase.PREPARING, frozenset({7}))
    assert (started(actions), job.slots[1].failures) == ([1], 1)
    assert [one.member for one in sent(actions, Dismissed)] == [2]
    assert only(actions, RecordFailure).final is False
    again, actions = after(job, raised(3, step=8))
    assert again.fatal_failure is None
    again, actions = after(job, raised(3))
    assert again.fatal_failure is not None
    assert again.fatal_failure[0] == 3
    assert only(actions, RecordFailure).final
    again, actions = after(running(), raised(2, holds=False))
    assert sent(actions, Dismissed) == []


def test_a_users_error_ends_the_job_after_all_have_saved():
    job, actions = after(running(), raised(2, "user"))
    (asked,) = sent(actions, Prepare)
    assert (asked.abort, asked.members, sent(actions, Stop)) == (True, (1, 2, 3), [])
    assert (job.stop_reason, job.stop_requested_at) == (job.fatal_failure[1], NOW)  # type: ignore[index]
    assert job.next_tick_at <= NOW + job.settings.stop_seconds
    assert job.failed_at == NOW
    assert [slot.start_at for slot in job.slots.values()] == [None] * 3


def test_one_that_holds_no_state_is_left_out_when_the_others_save():
    job, actions = after(running(), raised(2, "user", holds=False))
    assert sent(actions, Prepare)[0].members == (1, 3)
    assert (sorted(job.workers), started(actions)) == ([1, 3], [])
    assert only(actions, RecordFailure).final


@pytest.mark.parametrize("phase", [JobPhase.RUNNING, JobPhase.INSTALLING])
def test_an_error_of_one_in_no_view_makes_the_members_save_too(phase):
    job = running(0, 0)
    add(job, 3, WorkerStatus.READY)
    job.phase = phase
    job.pending = frozenset({1, 2}) if phase is JobPhase.INSTALLING else frozenset()
    job, actions = after(job, raised(3, "user", holds=False))
    assert (job.phase, job.pending) == (JobPhase.PREPARING, frozenset({1, 2}))
    assert sent(actions, Prepare)[0].abort
    assert only(actions, RecordFailure).member == 3
    assert [one.member for one in sent(actions, Dismissed)] == [3]


def test_where_there_is_nothing_to_save_the_job_ends_at_once():
    for committed, far, saves, restore, ends in (
        (False, 0, True, False, True),
        (False, 1, True, False, False),
        (True, 0, True, False, False),
        (True, 5, False, False, True),
        (True, 5, True, True, True),
    ):
        job = running(0, 0, saves_on_failure=saves)
        job.committed, job.restore = committed, restore
        _, actions = after(job, raised(2, "user", far=far))
        assert bool(some(actions, EndJob)) is ends
        if ends:
            assert only(actions, EndJob).failed == 2
            assert only(actions, RecordFailure).final


def test_an_error_while_the_job_stops_is_final_and_the_stop_keeps_its_time():
    job = running()
    job.phase, job.stop_reason, job.stop_requested_at = JobPhase.STOPPING, "enough", NOW - 9.0
    job, _ = after(job, raised(2))
    assert (job.stop_reason, job.stop_requested_at) == ("enough", NOW - 9.0)
    assert job.fatal_failure is not None


def test_a_second_error_while_the_others_save():
    job, _ = after(running(), raised(2, "user"))
    again, actions = after(job, raised(3, "user"))
    assert (sent(actions, Prepare), again.pending) == ([], frozenset({1, 2, 3}))
    again, actions = after(job, raised(3, "user", holds=False))
    assert again.pending == frozenset({1, 2})
    assert again.fatal_failure == job.fatal_failure


def test_when_no_member_is_left_to_save_the_job_ends():
    job, _ = after(running(0), raised(1, "user", holds=False))
    assert job.phase is JobPhase.ENDED


def test_an_error_of_one_that_is_not_known():
    job = running(0, 0)
    again, actions = after(job, raised(9))
    assert [one.member for one in sent(actions, Dismissed)] == [9]
    again, actions = after(job, raised(9, holds=False))
    assert (actions, again.raised_steps) == ([], frozenset())
