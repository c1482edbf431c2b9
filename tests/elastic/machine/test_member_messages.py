"""What follows from each message of a member, by who sends it, of which generation, and when."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from tests.elastic.machine.machine_driver import (
    beat_of,
    dial_of,
    failure_at,
    hello_of,
    leave_of,
    only,
    report_of,
    sent,
    some,
    started,
    vote_of,
)
from tests.elastic.machine.made_states import NOW, after, beat, change, made

from paceline.control.messages import Dismissed, Prepare, StepReceipt, Stop
from paceline.elastic.machine.actions import (
    EndJob,
    InstallView,
    KillWorker,
    RecordFailure,
    RecordVerdict,
    RejectAgent,
    RequestDial,
)
from paceline.elastic.machine.machine_events import AgentJoined, FromMember, WorkerLost
from paceline.elastic.machine.replica_divergence import DISPUTES_BEFORE_THE_END
from paceline.elastic.machine.state import JobPhase, JobState, Slot, Worker, WorkerStatus


def running(*agents: int, **settings: Any) -> JobState:
    job = made(agents or (0, 0, 0), **settings)
    job.committed, job.next_tick_at = True, NOW + 50.0
    return job


def add(job: JobState, member: int, status: WorkerStatus, agent_id: int = 0) -> None:
    job.workers[member] = Worker(member, member - 1, agent_id, status, NOW - 1.0)
    job.slots[member - 1] = Slot(member - 1, agent_id, worker=member)
    job.next_member = member + 1
    if status is not WorkerStatus.STARTING:
        job.last_message_at[member] = NOW


# hello


def test_a_hello_makes_a_worker_ready():
    job = running(0, 0)
    add(job, 3, WorkerStatus.STARTING)
    add(job, 4, WorkerStatus.STARTING)
    change(job, 4, since=NOW)
    job, actions = after(job, hello_of(3, 2), NOW + 0.5)
    assert (job.workers[3].status, job.workers[3].since) == (WorkerStatus.READY, NOW + 0.5)
    assert job.last_message_at[3] == NOW + 0.5
    assert job.next_tick_at == NOW + 0.75  # until then others may come
    assert sent(actions, Prepare) == []


def test_who_is_ready_is_listened_to():
    job = running(0)
    add(job, 2, WorkerStatus.STARTING)
    job.phase, job.pending = JobPhase.INSTALLING, frozenset({1})
    job, _ = after(job, hello_of(2, 1))
    assert job.next_tick_at == NOW + 1.0


def test_a_hello_of_one_that_is_not_known_is_dismissed():
    job, actions = after(running(), hello_of(9, 1))
    assert [one.member for one in sent(actions, Dismissed)] == [9]
    assert 9 not in job.workers


def test_a_member_that_is_connected_again_is_asked_again_only_if_it_has_not_answered():
    job = running()
    job.phase, job.generation, job.pending, job.abort, job.reason = (
        JobPhase.PREPARING,
        4,
        frozenset({2}),
        True,
        "why",
    )
    job.reports = {1: report_of(1, 4, None).message, 3: report_of(3, 4, None).message}  # type: ignore[dict-item]
    _, actions = after(job, hello_of(2, 1, 0, 3))
    (asked,) = sent(actions, Prepare)
    assert (asked.members, asked.generation, asked.abort, asked.reason) == ((2,), 4, True, "why")
    again, actions = after(job, hello_of(1, 0, 0, 3), NOW + 1.0)
    assert (actions, again.last_message_at[1]) == ([], NOW + 1.0)


def test_a_ready_worker_that_is_connected_again_is_asked_again_to_dial():
    job = running(0, 0)
    add(job, 3, WorkerStatus.READY, agent_id=1)
    change(job, 3, dialing=frozenset({1, 2}), dialed_at=NOW - 1.0)
    again, actions = after(job, hello_of(3, 2, 1))
    assert only(actions, RequestDial) == RequestDial(3, (1, 2))
    again, actions = after(job, hello_of(1, 0, 0, 3))
    assert only(actions, RequestDial) == RequestDial(3, (1,))
    assert again.workers[3].dialing == frozenset({1, 2})
    job.phase = JobPhase.RETURNING
    change(job, 1, reconnected=False)
    again, actions = after(job, hello_of(1, 0, 0, 3))
    assert some(actions, RequestDial) == []


def test_a_hello_says_that_a_view_is_installed():
    job = running(0, 0)
    job.phase, job.pending = JobPhase.INSTALLING, frozenset({1, 2})
    job, _ = after(job, hello_of(1, 0, 0, 3, (5, 0, 0)))
    assert (job.pending, job.base_progress) == (frozenset({2}), (5, 0, 0))
    again, actions = after(job, hello_of(2, 1, 0, 2, (5, 0, 0)))
    assert (again.phase, sent(actions, Prepare)[0].abort) == (JobPhase.PREPARING, True)
    again, actions = after(job, hello_of(2, 1, 0, 0))
    assert again.phase is JobPhase.PREPARING
    again, actions = after(job, hello_of(1, 0, 0, 0))
    assert (again.phase, actions) == (JobPhase.INSTALLING, [])


def test_a_hello_while_the_job_stops_is_answered_with_the_stop():
    job = running(0, 0)
    job.phase, job.stop_reason = JobPhase.STOPPING, "enough"
    _, actions = after(job, hello_of(2, 1, 0, 3))
    (stop,) = sent(actions, Stop)
    assert (stop.members, stop.reason) == ((2,), "enough")
    job.fatal_failure = (1, "it raised")
    assert after(job, hello_of(2, 1, 0, 3))[1] == []


def test_after_a_restart_a_member_is_listened_to_when_it_is_back():
    job = running(0, 0)
    job.phase = JobPhase.RETURNING
    for member in (1, 2):
        change(job, member, reconnected=False)
    job, _ = after(job, hello_of(1, 0, 0, 3))
    assert job.next_tick_at == NOW + 1.0
    assert not job.abort
    job.view = None
    assert job.workers[2].reconnected is False


# dials


def test_a_dial_that_reached_its_peer_is_noted():
    job = running(0, 0)
    add(job, 3, WorkerStatus.READY, agent_id=1)
    pairs = ((3, 1), (1, 3), (3, 2), (2, 3))
    for member, peer in pairs[:3]:
        job, actions = after(job, dial_of(member, peer))
        assert sent(actions, Prepare) == []
    assert job.workers[3].reached == frozenset({1, 2})
    job, actions = after(job, dial_of(*pairs[3]))
    assert sent(actions, Prepare)[0].members == (1, 2, 3)
    again, actions = after(job, dial_of(9, 1))
    assert actions == []
    again, actions = after(job, dial_of(1, 9))
    assert (actions, again.workers[1].reached) == ([], frozenset({3}))


def test_a_newcomer_that_a_peer_does_not_reach_is_refused():
    job = running(0, 0)
    job, _ = after(job, AgentJoined(1, 2, "host1"))
    for member in (3, 4):
        job, _ = after(job, hello_of(member, member - 1, 1))
    again, actions = after(job, dial_of(1, 3, "cannot reach"))
    assert [one.member for one in sent(actions, Dismissed)] == [3]
    failure = only(actions, RecordFailure)
    assert (failure.member, failure.kind, failure.phase, failure.sure) == (3, "unreachable", "start", True)
    assert (again.slots[2].failures, some(actions, RejectAgent)) == (1, [])
    again, actions = after(job, dial_of(4, 3, "cannot reach"))
    assert [one.member for one in sent(actions, Dismissed)] == [4]  # the later of the two
    change(job, 1, reached=frozenset({3}))
    again, actions = after(job, dial_of(1, 3, "cannot reach"))
    assert actions == []
    again, actions = after(job, dial_of(1, 2, "cannot reach"))
    assert actions == []


def test_a_host_that_cannot_take_part_is_turned_away():
    job = running(0, 0, max_worker_failures=0)
    job, _ = after(job, AgentJoined(1, 2, "host1"))
    for member in (3, 4):
        job, _ = after(job, hello_of(member, member - 1, 1))
    job, actions = after(job, dial_of(3, 1, "cannot reach"))
    assert some(actions, RejectAgent) == []  # another of its workers may still be well
    job, actions = after(job, dial_of(4, 1, "cannot reach"))
    assert only(actions, RejectAgent).agent_id == 1


def test_a_host_with_a_start_left_is_not_turned_away():
    job = running(0, 0, max_worker_failures=0)
    job, _ = after(job, AgentJoined(1, 2, "host1"))
    job, _ = after(job, hello_of(3, 2, 1))
    job.slots[3] = replace(job.slots[3], worker=None, start_at=NOW + 60.0)
    del job.workers[4]
    job, actions = after(job, dial_of(3, 1, "cannot reach"))
    assert (job.slots[2].given_up, some(actions, RejectAgent)) == (True, [])


def test_a_host_with_a_worker_in_the_view_is_not_turned_away():
    job = running(0, 1, max_worker_failures=0)
    job, _ = after(job, AgentJoined(1, 2, "host1"))
    job, _ = after(job, hello_of(3, 2, 1))
    change(job, 2, status=WorkerStatus.LEAVING, leave_reason="preempted")
    job.slots[1] = replace(job.slots[1], worker=None, given_up=True)
    job, actions = after(job, dial_of(3, 1, "cannot reach"))
    assert (job.slots[2].given_up, 2 in job.workers, some(actions, RejectAgent)) == (True, True, [])


# heartbeats and progress


def test_a_heartbeat_of_one_that_should_not_beat():
    job = running(0, 0)
    add(job, 3, WorkerStatus.STARTING)
    change(job, 2, reconnected=False)
    job.phase = JobPhase.RETURNING
    for member in (2, 3, 9):
        again, _ = after(job, beat_of(member, "data", 0.0, (9, 0, 0), (), 0.1, 0.1), NOW + 1.0)
        assert again.heartbeats == {}
        assert again.last_message_at == job.last_message_at


def test_a_heartbeat_is_kept_and_a_measured_step_is_a_committed_one():
    job = running(0, 0)
    job.committed = False
    job, _ = after(job, beat_of(1, "data", 0.5), NOW + 1.0)
    assert (job.last_message_at[1], job.heartbeats[1].phase, job.committed) == (NOW + 1.0, "data", False)
    job, _ = after(job, beat_of(1, "data", 0.5, None, (), 0.1, 0.1))
    assert job.committed


def test_the_furthest_progress_is_kept_and_time_of_good_work_is_counted():
    job = running(0, 0)
    job.failed_collectives, job.hangs, job.suspicions = 2, 1, {(1, 2): 1}
    job.committed, job.base_progress, job.productive_at = False, (5, 0, 0), NOW - 3.0
    job, _ = after(job, beat_of(1, "data", 0.0, (5, 0, 0)), NOW + 1.0)
    assert (job.max_progress, job.progressed_at, job.committed, job.hangs) == ((5, 0, 0), NOW + 1.0, False, 1)
    job, _ = after(job, beat_of(2, "data", 0.0, (5, 0, 0)), NOW + 2.0)
    assert job.progressed_at == NOW + 1.0
    job, _ = after(job, beat_of(2, "data", 0.0, (4, 9, 9)), NOW + 2.0)
    assert job.max_progress == (5, 0, 0)
    job, _ = after(job, beat_of(2, "data", 0.0, (5, 1, 0)), NOW + 3.0)
    assert (job.max_progress, job.progressed_at) == ((5, 1, 0), NOW + 3.0)
    assert (job.failed_collectives, job.hangs, job.suspicions) == (2, 1, {(1, 2): 1})
    assert (job.productive_seconds, job.committed) == (0.0, False)
    job, _ = after(job, beat_of(2, "data", 0.0, (6, 0, 0)), NOW + 4.0)
    assert (job.failed_collectives, job.hangs, job.suspicions) == (0, 0, {})
    assert (job.productive_seconds, job.productive_at, job.committed) == (7.0, NOW + 4.0, True)
    job, _ = after(job, beat_of(1, "data", 0.0, (7, 0, 0)), NOW + 6.0)
    assert job.productive_seconds == 9.0


def test_the_first_progress_of_a_view_that_is_past_its_base_is_a_commit():
    job = running(0, 0)
    job.committed, job.base_progress, job.hangs = False, (5, 0, 0), 2
    job, _ = after(job, beat_of(1, "data", 0.0, (6, 0, 0)))
    assert (job.committed, job.hangs, job.productive_seconds) == (True, 0, 0.0)


def test_progress_of_one_in_no_view_is_none():
    job = running(0)
    add(job, 2, WorkerStatus.READY)
    job, _ = after(job, beat_of(2, "wait", 0.0, (9, 0, 0)))
    assert (job.max_progress, job.heartbeats[2].phase) == (None, "wait")


# reports


def test_a_report_of_another_generation_or_member_changes_nothing():
    job = running(0, 0)
    job.phase, job.generation, job.pending = JobPhase.PREPARING, 4, frozenset({1, 2})
    for event in (report_of(1, 3, (5, 0, 0)), report_of(1, 5, (5, 0, 0)), report_of(9, 4, (5, 0, 0))):
        again, actions = after(job, event, NOW + 1.0)
        assert (again.pending, again.reports, actions) == (job.pending, {}, [])
        assert again.last_message_at[1] == NOW
    job, _ = after(job, report_of(1, 4, (5, 0, 0)), NOW + 1.0)
    assert (job.pending, job.last_message_at[1], job.max_progress) == (frozenset({2}), NOW + 1.0, (5, 0, 0))
    again, _ = after(job, report_of(1, 4, (7, 0, 0)))
    assert again.reports == job.reports
    job, actions = after(job, report_of(2, 4, (5, 0, 0)))
    assert only(actions, InstallView).plan.generation == 4


# collectives


def test_a_failure_of_another_generation_or_of_one_in_no_view_changes_nothing():
    job = running(0, 0)
    add(job, 3, WorkerStatus.READY)
    for event in (
        failure_at(1, 2, "old"),
        failure_at(1, 4, "new"),
        failure_at(3, 3, "reset"),
        failure_at(9, 3, ""),
    ):
        again, actions = after(job, event, NOW + 1.0)
        assert (again.phase, actions, again.failed_collectives) == (JobPhase.RUNNING, [], 0)
        assert again.last_message_at == job.last_message_at


def test_a_failed_collective_makes_all_meet_and_is_counted():
    job = running(0, 0, 0)
    job, actions = after(job, failure_at(1, 3, "reset", (), (2,)), NOW + 1.0)
    assert (job.failed_collectives, job.suspicions, job.failed_at) == (1, {(1, 2): 1}, NOW + 1.0)
    assert sent(actions, Prepare)[0].abort
    assert job.last_message_at[1] == NOW + 1.0
    job, actions = after(job, failure_at(3, 3, "reset", (), (2,)), NOW + 2.0)
    assert (actions, job.failed_collectives, job.failed_at) == ([], 1, NOW + 1.0)
    assert job.suspicions == {(1, 2): 1, (3, 2): 1}


def test_a_failure_that_is_sent_again_after_a_reconnect_counts_once():
    job = running(0, 0, 0)
    for _ in range(2):
        job, _ = after(job, failure_at(1, 3, "reset", (), (2,)))
        assert (job.failed_collectives, job.suspicions) == (1, {(1, 2): 1})
    # In the next view it is another failure.
    assert job.view is not None
    job.phase, job.abort, job.view = (
        JobPhase.RUNNING,
        False,
        dataclasses.replace(job.view, generation=job.generation),
    )
    job, _ = after(job, failure_at(1, job.generation, "reset", (), (2,)))
    assert (job.failed_collectives, job.suspicions) == (2, {(1, 2): 2})


def test_whom_a_member_waited_for_is_suspected_where_it_names_no_member():
    job = running(0, 0, 0)
    beat(job, 1, "collective", 0.0, (2, 3))
    job, _ = after(job, failure_at(1, 3, "reset"))
    assert job.suspicions == {(1, 2): 1, (1, 3): 1}
    job, _ = after(running(0, 0), failure_at(1, 3, "reset"))
    assert job.suspicions == {}


@pytest.mark.parametrize("abort", [False, True])
def test_who_has_left_the_group_for_a_pause_is_not_suspected(abort):
    job = running()
    job.phase, job.generation, job.pending = JobPhase.PREPARING, 4, frozenset({1, 2, 3})
    job.abort = abort
    job, _ = after(job, report_of(3, 4, (5, 0, 0)))
    job, _ = after(job, failure_at(1, 3, "reset", (), (2, 3)))
    assert job.suspicions == ({(1, 2): 1, (1, 3): 1} if abort else {(1, 2): 1})


def blamed(job: JobState, member: int, *unreachable: int) -> int:
    job.failed_collectives = 2
    job, actions = after(job, failure_at(member, 3, "reset", (), unreachable))
    assert (job.failed_collectives, job.suspicions) == (0, {})
    assert only(actions, KillWorker).member == only(actions, RecordVerdict).member
    return only(actions, RecordVerdict).member


def test_the_third_failure_in_a_row_has_a_culprit():
    assert blamed(running(), 1, 2) == 2
    assert blamed(running(), 1) == 1  # no member was named
    assert blamed(running(), 1, 2, 3) == 3  # of equals the highest slot
    job = running()
    job.suspicions = {(3, 2): 2, (9, 3): 1, (1, 9): 9}
    assert blamed(job, 1, 3) == 3
    job = running()
    job.suspicions = {(3, 2): 3}
    assert blamed(job, 1, 3) == 2
    job = running()
    job.failed_collectives = 1
    again, actions = after(job, failure_at(1, 3, "reset", (), (2,)))
    assert (some(actions, RecordVerdict), again.failed_collectives) == ([], 2)


def test_a_ready_worker_is_no_culprit():
    job = running(0, 0)
    add(job, 3, WorkerStatus.READY)
    job.suspicions = {(1, 3): 5}
    assert blamed(job, 1, 2) == 2


def test_a_link_is_the_culprit_unless_one_was_named_far_more_often():
    job = running(0, 0, 1)
    job.suspicions = {(3, 1): 1}
    assert blamed(job, 1, 3) == 3
    job = running(0, 0, 1)
    job.suspicions = {(3, 1): 1, (1, 2): 2}
    assert blamed(job, 1, 3) == 2  # twice as often is far more
    job = running(0, 0, 1)
    job.suspicions = {(3, 1): 2, (1, 3): 1, (1, 2): 3}
    assert blamed(job, 1, 3) == 3


def test_damaged_data_names_its_sender():
    job, actions = after(running(), failure_at(1, 3, "checksum", (2,)))
    verdict = only(actions, RecordVerdict)
    assert (verdict.member, verdict.phase, verdict.sure) == (2, "collective", True)
    failure = only(actions, RecordFailure)
    assert (failure.kind, failure.sure) == ("corrupt", True)
    assert (sorted(job.workers), job.failed_collectives) == ([1, 3, 4], 0)


def test_to_whom_all_data_looks_damaged_is_the_one_that_damages_it():
    def accused(job: JobState, *numbers: int) -> list[int]:
        _, actions = after(job, failure_at(1, 3, "checksum", numbers))
        return [verdict.member for verdict in some(actions, RecordVerdict)]

    assert accused(running(), 2, 3) == [1]
    assert accused(running(), 3, 2, 2) == [1]
    assert accused(running(0, 0), 2) == [2]
    assert accused(running(0, 0, 0, 0, shards=8), 2, 3) == [2, 3]
    assert accused(running(), 1) == [1]
    assert accused(running(), 1, 2) == [1, 2]  # not all of its peers
    assert accused(running(), 9) == []
    job = running(0, 0)
    add(job, 3, WorkerStatus.READY)
    assert accused(job, 3) == []


def test_a_failed_collective_after_a_restart_and_while_the_job_stops():
    job = running(0, 0)
    job.phase = JobPhase.RETURNING
    change(job, 2, reconnected=False)
    job, actions = after(job, failure_at(1, 3, "reset", (2,)))
    assert (job.abort, actions, job.phase) == (True, [], JobPhase.RETURNING)
    job = running(0, 0)
    job.phase, job.stop_reason, job.pending = JobPhase.INSTALLING, "enough", frozenset({1, 2})
    job, actions = after(job, failure_at(1, 3, "reset"))
    assert (job.saves_alone, job.phase) == (True, JobPhase.PREPARING)
    job = running(0, 0)
    job.phase, job.stop_reason = JobPhase.STOPPING, "enough"
    job, actions = after(job, failure_at(1, 3, "reset"))
    assert (job.saves_alone, job.phase) == (False, JobPhase.PREPARING)  # its view was whole: all save
    job = running(0, 0)
    job.phase, job.generation, job.pending = JobPhase.PREPARING, 4, frozenset({1, 2})
    job, actions = after(job, failure_at(1, 3, "reset"))
    assert (job.abort, job.failed_collectives) == (True, 1)  # it was to stop at a boundary


def test_a_loss_forgets_failures_that_it_explains():
    job = running()
    job.failed_collectives, job.suspicions = 2, {(1, 2): 1}
    again, _ = after(job, WorkerLost(3, "crash", "killed"))
    assert (again.failed_collectives, again.suspicions) == (0, {})
    add(job, 4, WorkerStatus.READY)
    again, _ = after(job, WorkerLost(4, "crash", "killed"))
    assert (again.failed_collectives, again.lost_slots, again.failed_at) == (2, (), None)


# leaving


@pytest.mark.parametrize("status", [WorkerStatus.READY, WorkerStatus.STARTING])
def test_one_in_no_view_that_is_asked_to_go_is_let_go(status):
    job = running(0, 0)
    add(job, 3, status)
    job, actions = after(job, leave_of(3, "SIGTERM"))
    assert 3 not in job.workers
    assert [one.member for one in sent(actions, Dismissed)] == [3]
    assert (only(actions, RecordFailure).kind, job.preemptions) == ("preempted", 1)
    assert (job.phase, started(actions)) == (JobPhase.RUNNING, [2])


def test_one_that_is_asked_to_go_while_all_stop_or_when_it_is_done():
    job = running(0, 0)
    job.phase, job.stop_reason = JobPhase.STOPPING, "enough"
    again, actions = after(job, leave_of(1, "SIGTERM"))
    assert (actions, again.workers[1].leave_reason, again.preemptions) == ([], "", 0)
    job = running(0, 0)
    change(job, 1, status=WorkerStatus.DONE)
    again, actions = after(job, leave_of(1, "SIGTERM"))
    assert (again.workers[1].status, again.workers[1].leave_reason) == (WorkerStatus.DONE, "preempted")
    again, actions = after(job, leave_of(9, "SIGTERM"))
    assert actions == []


# votes on steps


def test_votes_that_do_not_count():
    job = running(0, 0)
    add(job, 3, WorkerStatus.READY)
    job.agreed_step = 6
    for event in (
        vote_of(9, 7, "a", 3),
        vote_of(3, 7, "a", 3),
        vote_of(1, 7, "a", 2),
        vote_of(1, 6, "a", 3),
        vote_of(1, 5, "a"),
    ):
        again, actions = after(job, event)
        assert (again.votes, actions) == ({}, [])
    again, _ = after(job, vote_of(1, 7, "a"))
    assert again.votes == {(7, ""): {1: "a"}}
    again, _ = after(job, vote_of(1, 7, "kind:a", 3))
    assert again.votes == {(7, "kind"): {1: "kind:a"}}


def test_a_vote_from_before_all_go_back_does_not_count():
    job = running(0, 0)
    job.restore = True
    assert after(job, vote_of(1, 7, "a", 3))[0].votes == {}
    job.votes = {(7, ""): {2: "a"}}
    again, _ = after(job, vote_of(1, 7, "a", 3))
    assert again.agreed_step == 7
    job.votes = {}
    again, actions = after(job, vote_of(1, 7, "a", 3, agreed=4))
    assert (again.votes, again.agreed_step) == ({(7, ""): {1: "a"}}, 4)
    assert sent(actions, Prepare)[0].abort
    # Also where the members had agreed on the initial weights and on no step.
    assert after(job, vote_of(1, 7, "a", 3, agreed=0))[0].votes == {(7, ""): {1: "a"}}


def test_after_all_went_back_an_old_agreement_says_nothing():
    job = running(0, 0)
    assert job.view is not None
    job.agreed_step = 9
    again, _ = after(job, vote_of(1, 7, "a", 3))
    assert (again.agreed_step, again.votes) == (9, {})
    job.view = replace(job.view, restore=True)
    again, _ = after(job, vote_of(1, 7, "a", 3))
    assert (again.agreed_step, again.votes) == (6, {(7, ""): {1: "a"}})
    again, _ = after(job, vote_of(1, 7, "a"))
    assert again.agreed_step == 9


def test_members_that_agree_and_members_that_differ():
    job = running()
    job.lineage = {2: 1}
    for member in (1, 2):
        job, actions = after(job, vote_of(member, 7, "a", 3))
        assert actions == []
    again, actions = after(job, vote_of(3, 7, "a", 3))
    assert (again.agreed_step, again.votes, again.lineage, actions) == (7, {}, {}, [])
    job.lineage = {}
    again, actions = after(job, vote_of(3, 7, "b", 3))
    assert only(actions, RecordVerdict).member == 3
    assert (again.restore, again.restore_before, again.tainted_until, again.votes) == (True, 0, 7, {})
    assert again.phase is JobPhase.PREPARING


def test_a_receipt_of_several_steps_and_one_of_none():
    job = running(0, 0)
    receipt = vote_of(1, 7, "a", 3).message
    assert isinstance(receipt, StepReceipt)
    job, _ = after(job, FromMember(1, dataclasses.replace(receipt, hashes={"7": "a", "8": "b"})))
    assert job.votes == {(7, ""): {1: "a"}, (8, ""): {1: "b"}}
    again, actions = after(job, FromMember(1, dataclasses.replace(receipt, hashes={})))
    assert (again.votes, actions) == (job.votes, [])


def test_after_the_step_that_ends_the_job_the_other_steps_of_a_receipt_are_not_judged():
    job = running(0, 0)
    job.dispute_count = DISPUTES_BEFORE_THE_END - 1
    job, _ = after(job, vote_of(1, 7, "a", 3))
    receipt = vote_of(2, 7, "b", 3).message
    assert isinstance(receipt, StepReceipt)
    job, actions = after(job, FromMember(2, dataclasses.replace(receipt, hashes={"7": "b", "8": "b"})))
    assert job.phase is JobPhase.ENDED
    assert only(actions, EndJob).ok is False


@pytest.mark.parametrize("phase", [JobPhase.PREPARING, JobPhase.RETURNING])
def test_votes_are_kept_until_the_view_is_whole(phase):
    job = running(0, 0)
    job.phase, job.pending = phase, frozenset({1, 2} if phase is JobPhase.PREPARING else ())
    job, _ = after(job, vote_of(1, 7, "a", 3))
    job, actions = after(job, vote_of(2, 7, "b", 3))
    assert (job.votes, actions) == ({(7, ""): {1: "a", 2: "b"}}, [])
    assert not some(actions, EndJob)
