"""How long a member may be silent, in a phase, on its way to a boundary or into a view; and when to look."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.elastic.machine.made_states import NOW, beat, change, held, job_with_limits

from paceline.elastic.machine import hang_detection
from paceline.elastic.machine.state import JobPhase, JobState, WorkerStatus


def named(found: list[hang_detection.FaultFinding]) -> list[int]:
    return [one.worker.number for one in found]


def test_a_step_takes_what_it_took_or_longer_where_one_has_more_shards():
    job = job_with_limits()
    job.step_seconds, job.shard_seconds = 1.0, 0.25
    assert hang_detection.expected_step_seconds(job) == 1.0
    job.shard_seconds = 0.75
    assert hang_detection.expected_step_seconds(job) == 1.5
    job.step_seconds = 0.5
    assert job.view is not None
    job.view = replace(job.view, shards=())  # as after a restart: not known
    assert hang_detection.expected_step_seconds(job) == 0.5
    job.view = None
    assert hang_detection.expected_step_seconds(job) == 0.5


def test_the_limit_of_a_hang_is_the_least_or_so_many_steps():
    job = job_with_limits()
    assert hang_detection.hang_limit(job) == 4.0
    job.step_seconds = 0.5
    assert hang_detection.hang_limit(job) == 8.0
    job.step_seconds, job.hangs = 0.0, 2
    assert hang_detection.hang_limit(job) == 16.0
    job.hangs = 10
    assert hang_detection.hang_limit(job) == 64.0
    job.hangs = 5000
    assert hang_detection.hang_limit(job) == 64.0


def test_a_hang_that_has_more_time_than_a_slow_phase_keeps_it():
    assert hang_detection.hang_limit(job_with_limits(slow_phase_seconds=1.0)) == 4.0


def test_the_limit_of_a_phase():
    job = job_with_limits()
    worker = job.workers[1]
    assert hang_detection.phase_limit(job, worker) == 64.0  # no heartbeat
    beat(job, 1, step_seconds=0.0)
    assert hang_detection.phase_limit(job, worker) == 64.0  # no step
    beat(job, 1)
    assert hang_detection.phase_limit(job, worker) == 4.0
    for phase in ("start", "checkpoint", "evaluation"):
        beat(job, 1, phase)
        assert hang_detection.phase_limit(job, worker) == 64.0  # the first of its kind
        beat(job, 1, phase, longest=0.5)
        assert hang_detection.phase_limit(job, worker) == 8.0
        beat(job, 1, phase, longest=0.125)
        assert hang_detection.phase_limit(job, worker) == 4.0
    beat(job, 1, "data", longest=0.5)
    assert hang_detection.phase_limit(job, worker) == 4.0
    job.step_seconds = 100.0
    job.heartbeats.clear()
    assert hang_detection.phase_limit(job, worker) == 1600.0


def test_who_is_asked_to_abort_finishes_a_shard():
    job = job_with_limits()
    worker = job.workers[1]
    beat(job, 1)
    job.step_seconds = 0.5
    assert hang_detection.abort_limit(job, worker) == 4.0
    job.step_seconds = 2.0
    assert hang_detection.abort_limit(job, worker) == 10.0
    beat(job, 1, "evaluation", longest=8.0)
    assert hang_detection.abort_limit(job, worker) == 128.0


def test_who_saves_alone_has_longer_than_the_view_had():
    assert hang_detection.save_alone_limit(job_with_limits(cut_short_seconds=2.0)) == 3.0


def test_a_view_that_restores_has_the_time_of_a_slow_phase():
    job = job_with_limits(install_seconds=8.0)
    assert hang_detection.install_limit(job) == 8.0
    job.step_seconds = 1.0
    assert hang_detection.install_limit(job) == 16.0
    assert job.view is not None
    job.view = replace(job.view, restore=True)
    assert hang_detection.install_limit(job) == 64.0
    job.view = None
    assert hang_detection.install_limit(job) == 16.0


def test_a_view_forms_since_it_was_asked_for_or_since_the_stop():
    job = job_with_limits()
    job.asked_at, job.stop_requested_at = 10.0, 20.0
    assert hang_detection.forming_since(job) == 10.0
    job.stop_reason = "enough"
    assert hang_detection.forming_since(job) == 20.0
    job.asked_at = 30.0
    assert hang_detection.forming_since(job) == 30.0


def test_when_a_member_has_to_be_back():
    job = job_with_limits()
    job.asked_at = NOW - 1.0
    worker = job.workers[1]
    assert hang_detection.reconnect_deadline(job) == NOW + 7.0
    assert hang_detection.reconnect_limit(job, worker) == NOW + 7.0
    held(job, 1)
    assert hang_detection.reconnect_limit(job, worker) == NOW + 63.0
    beat(job, 1)
    held(job, 1)
    assert hang_detection.reconnect_limit(job, worker) == NOW + 63.0  # no step was committed
    job.committed = True
    assert hang_detection.reconnect_limit(job, worker) == NOW + 3.0
    beat(job, 1, "checkpoint")
    held(job, 1)
    assert hang_detection.reconnect_limit(job, worker) == NOW + 63.0
    job.probes = {}
    job.stopped_together = frozenset({1})
    assert hang_detection.reconnect_limit(job, worker) == NOW + 63.0


def test_silence_is_found_at_its_limit_and_not_before():
    job = job_with_limits()
    job.last_message_at[2] = NOW - 2.0
    job.last_message_at[3] = NOW - 1.99
    found = hang_detection.find_silent(job)
    assert named(found) == [2]
    assert (found[0].kind, found[0].phase) == ("silent", "start")


def test_silence_of_one_whose_interpreter_is_held_or_that_is_not_back_is_no_silence():
    job = job_with_limits()
    held(job, 2, silent=2.0)
    job.last_message_at[3] = NOW - 9.0
    change(job, 3, reconnected=False)
    assert hang_detection.find_silent(job) == []


def test_silence_of_those_stopped_together_has_the_time_of_a_slow_phase():
    job = job_with_limits()
    job.stopped_together = frozenset({1, 2})
    job.last_message_at.update({1: NOW - 63.0, 2: NOW - 64.0, 3: NOW - 3.0})
    assert named(hang_detection.find_silent(job)) == [2, 3]


def test_a_worker_that_never_said_hello():
    job = job_with_limits(start_seconds=30.0)
    for member, since in ((2, 30.0), (3, 29.0)):
        change(job, member, status=WorkerStatus.STARTING, since=NOW - since)
        job.last_message_at.pop(member)
    found = hang_detection.find_silent(job)
    assert named(found) == [2]
    assert found[0].phase == "start"


def test_no_worker_is_overdue_while_some_are_stopped_together():
    job = job_with_limits()
    job.progressed_at = NOW - 100.0
    for member in (1, 2, 3):
        beat(job, member, "data", 100.0)
    assert hang_detection.find_overdue(job) != []
    job.stopped_together = frozenset({1, 2})
    assert hang_detection.find_overdue(job) == []


@pytest.mark.parametrize("phase", [JobPhase.STARTING, JobPhase.RETURNING, JobPhase.ENDED])
def test_no_worker_is_overdue_where_none_is_waited_for(phase):
    job = job_with_limits()
    job.phase = phase
    job.progressed_at = job.asked_at = NOW - 100.0
    job.pending = frozenset({1, 2, 3})
    for member in (1, 2, 3):
        beat(job, member, "data", 100.0)
    assert hang_detection.find_overdue(job) == []


def hang(job: JobState, seconds: float) -> None:
    """Member 2 is in the data phase, the others wait for it."""
    job.progressed_at = NOW - seconds
    beat(job, 1, "collective", seconds, (2,))
    beat(job, 2, "data", seconds)
    beat(job, 3, "collective", seconds, (2,))


@pytest.mark.parametrize("phase", [JobPhase.RUNNING, JobPhase.STOPPING])
def test_a_hang_is_found_at_its_limit_and_not_before(phase):
    job = job_with_limits()
    job.phase = phase
    hang(job, 4.0)
    found = hang_detection.find_overdue(job)
    assert named(found) == [2]
    assert (found[0].kind, found[0].waiting) == ("hung", "ranks 0 and 2 wait for it")
    hang(job, 3.99)
    assert hang_detection.find_overdue(job) == []
    hang(job, 8.0)
    job.progressed_at = NOW - 3.99
    assert hang_detection.find_overdue(job) == []


def test_one_rank_waits_and_several_wait():
    job = job_with_limits()
    hang(job, 4.0)
    beat(job, 3, "collective", 4.0, (1,))
    (found,) = hang_detection.find_overdue(job)
    assert found.waiting == "rank 0 waits for it"
    job = job_with_limits(0)
    job.progressed_at = NOW - 100.0
    beat(job, 1, "data", 100.0)
    assert hang_detection.find_overdue(job)[0].waiting.startswith("no other rank")


def test_a_hang_among_those_who_have_not_reported_or_are_not_done():
    job = job_with_limits()
    hang(job, 4.0)
    change(job, 2, status=WorkerStatus.DONE)
    assert named(hang_detection.find_overdue(job)) == [3]
    job = job_with_limits()
    hang(job, 4.0)
    job.phase, job.pending = JobPhase.PREPARING, frozenset({1, 3})
    assert named(hang_detection.find_overdue(job)) == [3]
    job.pending = frozenset({1, 2, 3})
    assert named(hang_detection.find_overdue(job)) == [2]


def test_one_that_is_busy_is_found_and_the_one_that_is_so_for_longest():
    job = job_with_limits()
    job.progressed_at = NOW - 20.0
    beat(job, 1, "data", 8.0)
    beat(job, 2, "forward", 9.0)
    beat(job, 3, "wait", 20.0)
    assert named(hang_detection.find_overdue(job)) == [2]


def test_where_all_are_busy_slow_is_likelier_than_hung():
    job = job_with_limits()
    job.progressed_at = NOW - 20.0
    for member, seconds in ((1, 15.0), (2, 15.5), (3, 15.9)):
        beat(job, member, "data", seconds)
    assert hang_detection.find_overdue(job) == []
    beat(job, 1, "data", 16.0)
    assert named(hang_detection.find_overdue(job)) == [1]
    job.progressed_at = NOW - 15.9
    assert hang_detection.find_overdue(job) == []


def test_one_in_a_passive_phase_is_to_blame_only_where_its_interpreter_is_held():
    job = job_with_limits()
    job.progressed_at = NOW - 20.0
    beat(job, 1, "wait", 20.0)
    beat(job, 2, "data", 0.0)
    beat(job, 3, "collective", 20.0)
    assert hang_detection.find_overdue(job) == []
    held(job, 3)
    assert named(hang_detection.find_overdue(job)) == [3]


def wait_in_a_circle(job: JobState, seconds: float = 20.0) -> None:
    job.progressed_at = NOW - seconds
    beat(job, 1, "collective", seconds, (2,))
    beat(job, 2, "collective", seconds, (3,))
    beat(job, 3, "collective", seconds, (1, 2))


def test_of_those_who_wait_for_each_other_who_is_waited_for_most():
    job = job_with_limits()
    wait_in_a_circle(job)
    assert named(hang_detection.find_overdue(job)) == [2]
    beat(job, 3, "collective", 20.0, (1,))
    assert named(hang_detection.find_overdue(job)) == [3]  # of equals: the highest slot ...
    beat(job, 1, "collective", 21.0, (2,))
    assert named(hang_detection.find_overdue(job)) == [1]  # ... but first who is in it for longest


def test_those_who_wait_are_not_blamed_while_one_of_them_is_not_late():
    job = job_with_limits()
    wait_in_a_circle(job)
    beat(job, 1, "collective", 1.0, (2,))
    assert hang_detection.find_overdue(job) == []


def test_those_who_wait_across_hosts_are_told_apart_by_the_link():
    job = job_with_limits(0, 0, 1)
    job.progressed_at = NOW - 20.0
    beat(job, 1, "collective", 20.0, (3,))
    beat(job, 2, "collective", 20.0, (3,))
    beat(job, 3, "collective", 20.0, (1, 2))
    (found,) = hang_detection.find_overdue(job)
    assert found.worker.number == 3
    assert "do not reach each other" in found.what


def test_a_view_that_is_not_installed_in_time():
    job = job_with_limits(install_seconds=8.0)
    job.phase, job.pending = JobPhase.INSTALLING, frozenset({2, 3})
    job.asked_at = job.progressed_at = NOW - 8.0
    beat(job, 2, "collective", 1.0, (3,))
    beat(job, 3, "data", 1.0)
    assert named(hang_detection.find_overdue(job)) == [3]
    job.asked_at = NOW - 7.9
    assert hang_detection.find_overdue(job) == []
    job.asked_at, job.progressed_at = NOW - 9.0, NOW - 1.9
    assert hang_detection.find_overdue(job) == []
    job.progressed_at = NOW - 2.0
    assert named(hang_detection.find_overdue(job)) == [3]


def installing(*agents: int) -> JobState:
    job = job_with_limits(*agents)
    job.phase, job.pending = JobPhase.INSTALLING, frozenset(job.workers)
    job.asked_at = job.progressed_at = NOW - 100.0
    return job


def test_who_blocks_an_installation():
    job = installing()
    for member in (1, 2, 3):
        beat(job, member, "wait")
    assert named(hang_detection.find_overdue(job)) == [1, 2, 3]  # no member says more
    beat(job, 1, "wait", 0.0, (3,))
    assert named(hang_detection.find_overdue(job)) == [3]
    beat(job, 1, "wait", 0.0, (2, 3))
    beat(job, 2, "wait", 0.0, (3,))
    beat(job, 3, "wait", 0.0, (2,))
    assert named(hang_detection.find_overdue(job)) == [3]
    beat(job, 3, "wait", 0.0, (1,))
    beat(job, 2, "wait", 5.0, (3,))
    beat(job, 1, "wait", 0.0, (2,))
    assert named(hang_detection.find_overdue(job)) == [2]


def test_a_link_blocks_an_installation():
    job = installing(0, 0, 1)
    beat(job, 1, "wait", 0.0, (3,))
    beat(job, 2, "wait", 0.0, (3,))
    beat(job, 3, "wait", 0.0, (1, 2))
    assert named(hang_detection.find_overdue(job)) == [3]
    # Also where more members wait for another one.
    beat(job, 1, "wait", 0.0, (2, 3))
    beat(job, 2, "wait", 0.0, (1,))
    assert named(hang_detection.find_overdue(job)) == [3]


def preparing(abort: bool) -> JobState:
    job = job_with_limits()
    job.phase, job.abort, job.pending = JobPhase.PREPARING, abort, frozenset({2, 3})
    for member in (1, 2, 3):
        beat(job, member)
    return job


def test_who_does_not_report_after_an_abort():
    job = preparing(abort=True)
    job.asked_at = NOW - 4.0
    assert named(hang_detection.find_overdue(job)) == [2, 3]
    job.asked_at = NOW - 3.9
    assert hang_detection.find_overdue(job) == []
    beat(job, 2, "evaluation")
    job.asked_at = NOW - 60.0
    assert named(hang_detection.find_overdue(job)) == [3]


def test_a_joiner_that_does_not_report_has_the_time_of_a_hang():
    job = preparing(abort=True)
    job.step_seconds = 0.5
    change(job, 3, status=WorkerStatus.READY)
    job.asked_at = NOW - 7.9
    assert named(hang_detection.find_overdue(job)) == [2]
    job.asked_at = NOW - 8.0
    assert named(hang_detection.find_overdue(job)) == [2, 3]


def test_one_that_saves_alone_is_not_waited_for_long():
    job = preparing(abort=True)
    job.saves_alone = True
    job.asked_at = NOW - 3.0
    assert named(hang_detection.find_overdue(job)) == [2, 3]
    job.asked_at = NOW - 2.9
    assert hang_detection.find_overdue(job) == []


def late_at_a_boundary(asked: float = 64.0, moved: float = 64.0, lasted: float = 64.0) -> JobState:
    job = preparing(abort=False)
    job.heartbeats.clear()
    job.asked_at, job.progressed_at = NOW - asked, NOW - moved
    for member in (2, 3):
        beat(job, member, "wait", lasted, step_seconds=0.0)
    return job


def test_towards_a_boundary_only_what_nothing_explains_is_late():
    assert named(hang_detection.find_overdue(late_at_a_boundary())) == [2, 3]
    assert hang_detection.find_overdue(late_at_a_boundary(asked=63.0)) == []
    assert hang_detection.find_overdue(late_at_a_boundary(moved=63.0)) == []
    assert hang_detection.find_overdue(late_at_a_boundary(lasted=63.0)) == []


def test_towards_a_boundary_who_waits_for_one_that_has_not_reported_is_not_late():
    job = late_at_a_boundary()
    beat(job, 2, "wait", 64.0, (3,), step_seconds=0.0)
    assert named(hang_detection.find_overdue(job)) == [3]
    beat(job, 2, "wait", 64.0, (1,), step_seconds=0.0)
    beat(job, 1, "data", 0.0)
    assert named(hang_detection.find_overdue(job)) == [2, 3]


def test_towards_a_boundary_who_waits_for_one_that_still_computes_is_not_late():
    job = late_at_a_boundary()
    beat(job, 2, "wait", 64.0, (3,), step_seconds=0.0)
    beat(job, 3, "forward", 1.0, step_seconds=0.0)
    assert hang_detection.find_overdue(job) == []
    job.pending = frozenset({2})
    assert named(hang_detection.find_overdue(job)) == [2]


def test_towards_a_boundary_none_hangs_when_only_a_joiner_has_not_reported():
    job = late_at_a_boundary(asked=3.0)
    change(job, 3, status=WorkerStatus.READY)
    job.pending = frozenset({3})
    assert hang_detection.find_overdue(job) == []


def test_one_that_has_not_beaten_is_not_hung_however_short_the_limits_are():
    job = job_with_limits(hang_least=0.5, slow_phase_seconds=0.75)
    job.progressed_at = NOW - 100.0
    assert hang_detection.find_overdue(job) == []
    job.phase, job.pending, job.asked_at = JobPhase.PREPARING, frozenset(job.workers), NOW - 100.0
    assert hang_detection.find_overdue(job) == []


def test_towards_a_boundary_a_joiner_is_late_by_the_limit_of_a_hang_whatever_its_phase():
    job = late_at_a_boundary(asked=4.0, moved=4.0, lasted=0.0)
    change(job, 3, status=WorkerStatus.READY)
    assert named(hang_detection.find_overdue(job)) == [3]


def test_whom_a_member_waits_for():
    job = job_with_limits()
    beat(job, 1, "collective", 0.0, (1, 2, 9))
    beat(job, 2, "collective", 0.0, (9,))
    beat(job, 3, "collective", 0.0, (2,))
    held(job, 3)
    assert hang_detection.waiting_for(job) == {1: (2,)}
    job.heartbeats[9] = job.heartbeats[1]
    assert hang_detection.waiting_for(job) == {1: (2,)}
