"""Agents, another size, a stop, and what is looked at when time has passed."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from tests.elastic.machine.machine_driver import sent, some, started
from tests.elastic.machine.made_states import NOW, after, beat, change, made

from paceline.control.field_types import MAX_WORKERS
from paceline.control.messages import Dismissed, MemberReport, Prepare, Stop
from paceline.elastic.machine import machine
from paceline.elastic.machine.actions import EndJob, KillWorker, ProbeWorkers, RecordVerdict
from paceline.elastic.machine.job_event_handlers import size_refusal
from paceline.elastic.machine.machine_events import (
    AgentJoined,
    AgentLost,
    ProcessProbed,
    ScaleRequested,
    StopRequested,
    Tick,
    WorkerLost,
)
from paceline.elastic.machine.state import JobPhase, JobState, Slot, Worker, WorkerStatus


def running(*agents: int, **settings: Any) -> JobState:
    job = made(agents or (0, 0, 0), **settings)
    job.next_tick_at = NOW + 50.0
    job.committed = True
    return job


def add(job: JobState, member: int, slot: int, status: WorkerStatus, agent_id: int = 0) -> None:
    job.workers[member] = Worker(member, slot, agent_id, status, NOW)
    job.slots[slot] = Slot(slot, agent_id, worker=member)
    job.next_member = max(job.next_member, member + 1)
    if status is not WorkerStatus.STARTING:
        job.last_message_at[member] = NOW


# agents


def test_an_agent_brings_slots_for_the_workers_that_are_not_known():
    job, actions = after(running(0, 0), AgentJoined(1, 2, "host1"))
    assert [(a.slot, a.agent_id) for a in actions] == [(2, 1), (3, 1)]  # type: ignore[union-attr]
    assert job.agents == {1: "host1"}
    job, actions = after(job, AgentJoined(1, 3, "host1 again"))
    assert (started(actions), job.agents) == ([4], {1: "host1 again"})
    job, actions = after(job, AgentJoined(1, 1, "host1"))
    assert (actions, sorted(job.slots)) == ([], [0, 1, 2, 3, 4])
    job, actions = after(job, AgentJoined(2, 1, "host2"))
    assert started(actions) == [5]


def test_agents_that_are_not_needed():
    for event in (AgentJoined(0, 2, "home"), AgentJoined(1, 0, "host1")):
        job, actions = after(running(), event)
        assert (actions, job.agents) == ([], {})
    stopping = running()
    stopping.stop_reason, stopping.phase = "enough", JobPhase.STOPPING
    job, actions = after(stopping, AgentJoined(1, 2, "host1"))
    assert (actions, job.agents) == ([], {})
    job, actions = after(running(), AgentJoined(1, 1, "host1"))
    assert started(actions) == [3]


def test_with_an_agent_its_slots_and_workers_are_gone():
    job = running(0, 1, 1)
    job.preemptions = 4
    job.slots[7] = Slot(7, 1, start_at=NOW + 9.0)
    job.slots[8] = Slot(8, 2, start_at=NOW + 9.0)
    job, actions = after(job, AgentLost(1, "it left"))
    assert (sorted(job.slots), sorted(job.workers), job.agents) == ([0, 8], [1], {})
    assert job.preemptions == 6
    assert started(actions) == []
    assert job.phase is JobPhase.PREPARING
    again, actions = after(job, AgentLost(1, "it left"))
    assert (actions, again.preemptions) == ([], 6)


def test_a_host_that_never_joined_takes_no_worker_with_it():
    for agent_id in (0, 2):
        job, actions = after(running(0, 0, 1), AgentLost(agent_id, "it left"))
        assert (sorted(job.workers), sorted(job.slots), job.preemptions) == ([1, 2, 3], [0, 1, 2], 0)
        assert (job.agents, job.phase, actions) == ({1: "host1"}, JobPhase.RUNNING, [])


# size


def test_sizes_that_are_refused():
    job = running(0, 0, 0, min_workers=2, most_workers=5)
    assert size_refusal(job, 1) is not None
    assert size_refusal(job, 2) is None
    assert size_refusal(job, 5) is None
    assert size_refusal(job, 6) is not None
    job = running(0, min_workers=0)
    assert size_refusal(job, 0) is not None
    assert size_refusal(job, 1) is None
    assert size_refusal(job, MAX_WORKERS) is None
    assert size_refusal(job, MAX_WORKERS + 1) is not None
    job.stop_reason = "enough"
    assert size_refusal(job, 1) is not None
    _again, actions = after(running(), ScaleRequested(0))
    assert actions == []


def test_a_larger_job_gets_new_slots():
    job, actions = after(running(0, 0), ScaleRequested(4))
    assert started(actions) == [2, 3]
    assert [job.slots[slot].worker for slot in (2, 3)] == [3, 4]
    job, actions = after(job, ScaleRequested(4))
    assert actions == []


def test_a_larger_job_takes_back_who_was_to_leave_and_slots_that_were_given_up():
    job = running(0, 0, 0)
    for member in (2, 3):
        change(job, member, status=WorkerStatus.LEAVING, leave_reason="scaled")
        job.slots[member - 1] = replace(job.slots[member - 1], wanted=False)
    job.slots[3] = Slot(3, failures=4, given_up=True)
    grown, actions = after(job, ScaleRequested(2))
    assert started(actions) == []
    assert (grown.workers[2].status, grown.workers[2].leave_reason) == (WorkerStatus.MEMBER, "")
    assert (grown.workers[3].status, grown.workers[3].leave_reason) == (WorkerStatus.LEAVING, "scaled")
    assert (grown.slots[1].wanted, grown.slots[2].wanted) == (True, False)
    grown, actions = after(job, ScaleRequested(4))
    assert started(actions) == [3]
    assert (grown.slots[3].given_up, grown.slots[3].failures) == (False, 0)
    assert sorted(grown.slots) == [0, 1, 2, 3]
    grown, actions = after(job, ScaleRequested(5))
    assert started(actions) == [3, 4]


def test_one_that_was_to_leave_for_another_reason_leaves():
    job = running(0, 0)
    change(job, 2, status=WorkerStatus.LEAVING, leave_reason="preempted")
    job.slots[1] = Slot(1, wanted=False)
    job, actions = after(job, ScaleRequested(2))
    assert job.workers[2].leave_reason == "preempted"
    assert started(actions) == [1]


def test_one_that_leaves_for_another_reason_while_its_slot_is_wanted_again_leaves():
    job = running(0, 0)
    change(job, 2, status=WorkerStatus.LEAVING, leave_reason="preempted")
    job.slots[1] = replace(job.slots[1], wanted=False)
    job, _ = after(job, ScaleRequested(2))
    assert job.slots[1].wanted
    assert (job.workers[2].status, job.workers[2].leave_reason) == (WorkerStatus.LEAVING, "preempted")


def test_a_done_member_that_was_to_leave_stays_done():
    job = running(0, 0)
    change(job, 2, status=WorkerStatus.DONE, leave_reason="scaled")
    job.slots[1] = replace(job.slots[1], wanted=False)
    job, _ = after(job, ScaleRequested(2))
    assert (job.workers[2].status, job.workers[2].leave_reason) == (WorkerStatus.DONE, "")


def test_of_a_smaller_job_the_highest_at_home_leave_first():
    job = running(1, 0, 0)
    add(job, 4, 3, WorkerStatus.STARTING)
    add(job, 5, 4, WorkerStatus.READY)
    job.slots[9] = Slot(9, start_at=NOW + 9.0)
    smaller, actions = after(job, ScaleRequested(5))
    assert (sorted(smaller.slots), actions) == ([0, 1, 2, 3, 4], [])
    smaller, actions = after(job, ScaleRequested(3))
    assert sorted(smaller.slots) == [0, 1, 2]
    assert [kill.member for kill in some(actions, KillWorker)] == [4]
    assert [one.member for one in sent(actions, Dismissed)] == [5]
    assert sorted(smaller.workers) == [1, 2, 3]
    smaller, actions = after(job, ScaleRequested(1))
    assert [smaller.workers[member].leave_reason for member in (1, 2, 3)] == ["", "scaled", "scaled"]
    assert smaller.workers[3].status is WorkerStatus.LEAVING
    assert not smaller.slots[2].wanted
    assert smaller.phase is JobPhase.PREPARING
    for size, leave in ((3, {2}), (2, {1, 2}), (1, {1, 2, 4})):
        smaller, _ = after(running(0, 0, 1, 1, shards=8), ScaleRequested(size))
        assert {member for member, worker in smaller.workers.items() if worker.leave_reason} == leave


def test_a_done_member_is_still_done_when_fewer_are_wanted():
    job = running(0, 0)
    change(job, 2, status=WorkerStatus.DONE)
    job, _ = after(job, ScaleRequested(1))
    assert (job.workers[2].status, job.workers[2].leave_reason) == (WorkerStatus.DONE, "scaled")


def test_fewer_workers_than_are_awaited_let_the_job_begin():
    job = JobState(running(0, 0).settings)
    job, _ = after(job, machine.snapshot(JobState(job.settings)))
    job.workers[1] = replace(job.workers[1], status=WorkerStatus.READY)
    job.last_message_at[1] = NOW
    job, _ = after(job, ScaleRequested(1))
    assert job.phase is JobPhase.INSTALLING


def test_fewer_workers_while_reports_are_awaited():
    job = running(0, 0)
    add(job, 3, 2, WorkerStatus.READY)
    job.phase, job.pending, job.generation = JobPhase.PREPARING, frozenset({3}), 4
    job.reports = {
        member: MemberReport(generation=4, progress=(5, 0, 0), held_shards=(), has_private_state=False)
        for member in (1, 2)
    }
    job, _ = after(job, ScaleRequested(2))
    assert job.phase is JobPhase.INSTALLING
    assert job.view is not None
    assert job.view.members == (1, 2)


# a stop


def test_a_stop_dismisses_who_is_in_no_view_and_tells_the_members():
    job = running(0, 0)
    add(job, 3, 2, WorkerStatus.STARTING)
    add(job, 4, 3, WorkerStatus.READY)
    job.slots[4] = Slot(4, start_at=NOW + 9.0)
    job, actions = after(job, StopRequested("enough"))
    assert [kill.member for kill in some(actions, KillWorker)] == [3]
    assert [one.member for one in sent(actions, Dismissed)] == [4]
    (stop,) = sent(actions, Stop)
    assert (stop.members, stop.reason) == ((1, 2), "enough")
    assert (job.phase, job.stop_reason, job.stop_requested_at) == (JobPhase.STOPPING, "enough", NOW)
    assert sorted(job.slots) == [0, 1, 4]
    _, _, refused = machine.step(job, ScaleRequested(1), NOW)
    assert refused == "the job is stopping: its size stays"
    again, actions = after(job, StopRequested("really"), NOW + 1.0)
    assert (actions, again.stop_reason, again.stop_requested_at) == ([], "enough", NOW)
    job.last_message_at = dict.fromkeys((1, 2), NOW + 50.0)
    job.progressed_at = NOW + 50.0
    job, actions = after(job, Tick(), NOW + 50.0)
    assert started(actions) == []


def test_a_stop_is_looked_at_when_its_time_is_over():
    job = running(0, 0, stop_seconds=20.0)
    job, _ = after(job, StopRequested("enough"))
    assert job.next_tick_at == NOW + 20.0
    change(job, 1, status=WorkerStatus.DONE)
    for at, ended in ((19.9, False), (20.0, True)):
        job.last_message_at = dict.fromkeys((1, 2), NOW + at)
        job.progressed_at = NOW + at
        job.next_tick_at = NOW
        _, actions = after(job, Tick(), NOW + at)
        assert bool(some(actions, EndJob)) is ended
    (verdict,) = some(actions, RecordVerdict)
    assert verdict.member == 2
    assert some(actions, EndJob)[0].failed == 2


def test_a_stop_of_a_job_that_has_not_begun_is_a_good_end():
    job = JobState(running(0, 0).settings)
    job, _ = after(job, machine.snapshot(JobState(job.settings)))
    job, actions = after(job, StopRequested("enough"))
    (ended,) = some(actions, EndJob)
    assert (ended.ok, ended.stopped) == (True, "enough")
    assert (job.phase, job.next_tick_at) == (JobPhase.ENDED, inf)


# probes and ticks


def test_the_answer_of_a_probe_is_kept_of_who_should_beat():
    job = running(0, 0)
    job.last_message_at[1] = NOW - 1.5
    add(job, 3, 2, WorkerStatus.STARTING)
    for member in (3, 99):
        again, _ = after(job, ProcessProbed(member, True))
        assert again.probes == {}
    again, _ = after(job, ProcessProbed(1, False, "data", 2.0))
    assert again.probes == {1: (NOW, ProcessProbed(1, False, "data", 2.0))}
    assert again.heartbeats[1].phase == "data"
    again, _ = after(job, ProcessProbed(1, True, "data", 2.0))
    assert (again.heartbeats, again.stopped_together) == ({}, frozenset())
    again, _ = after(job, ProcessProbed(1, False, "data", 0.1, 0.1))
    assert again.heartbeats == {}


def test_a_tick_before_its_time_looks_at_nothing():
    job = running(0, 0)
    job.last_message_at[1] = NOW - 100.0
    again, actions = after(job, Tick())
    assert (actions, again.next_tick_at) == ([], NOW + 50.0)
    job.next_tick_at = NOW
    again, actions = after(job, Tick())
    assert some(actions, RecordVerdict)
    assert again.next_tick_at > NOW


def test_a_stalled_supervisor_blames_no_worker():
    job = running(0, 0)
    job.last_message_at = dict.fromkeys((1, 2), NOW - 100.0)
    job.next_tick_at = NOW
    again, actions = after(job, Tick(stalled=100.0))
    assert actions == []
    assert again.last_message_at == {1: NOW, 2: NOW}


def ticked(job: JobState) -> tuple[JobState, list[Any]]:
    job.next_tick_at = NOW
    return after(job, Tick())


def test_the_time_of_a_step_is_the_median_of_the_members_that_measured_one():
    job = running(0, 0, 0, 0, shards=8)
    for member, seconds in ((1, 0.0), (2, 1.0), (3, 2.0), (4, 0.0)):
        beat(job, member, step_seconds=seconds, shard_seconds=seconds / 4)
    job.heartbeats[9] = job.heartbeats[3]
    job, _ = ticked(job)
    assert (job.step_seconds, job.shard_seconds) == (1.0, 0.25)
    beat(job, 2, step_seconds=0.0, shard_seconds=0.0)
    beat(job, 3, step_seconds=0.0, shard_seconds=0.0)
    job, _ = ticked(job)
    assert (job.step_seconds, job.shard_seconds) == (0.0, 0.25)


@pytest.mark.parametrize(
    ("known", "seen", "then"),
    [
        (1.0, 1.2, 1.0),
        (1.0, 0.81, 1.0),
        (1.0, 1.25, 1.25),
        (1.0, 1.3, 1.3),
        (1.25, 1.0, 1.0),
        (1.0, 0.7, 0.7),
    ],
)
def test_the_time_of_a_shard_does_not_follow_every_breath(known, seen, then):
    job = running(0)
    job.shard_seconds = known
    beat(job, 1, shard_seconds=seen)
    job, _ = ticked(job)
    assert job.shard_seconds == then


def test_checkpoints_are_trusted_again_when_the_job_is_past_them():
    job = running(0, 0)
    job.tainted_until, job.restore_before = 44, 38
    for progress, restore, left in (
        (None, False, 44),
        ((44, 1, 0), False, 44),
        ((45, 0, 0), True, 44),
        ((45, 0, 0), False, -1),
    ):
        job.max_progress, job.restore = progress, restore
        again, _ = ticked(job)
        assert again.tainted_until == left
        assert again.restore_before == (38 if left >= 0 else -1)
    job.tainted_until, job.restore_before, job.max_progress = 0, 0, (1, 0, 0)
    again, _ = ticked(job)
    assert (again.tainted_until, again.restore_before) == (-1, -1)
    job.tainted_until, job.restore_before = -1, 7
    again, _ = ticked(job)
    assert again.restore_before == 7


def test_the_silent_are_probed_and_slots_are_filled_when_it_is_time():
    job = running(0, 0)
    job.last_message_at[2] = NOW - 1.0
    job.slots[2] = Slot(2, start_at=NOW)
    job.slots[3] = Slot(3, start_at=NOW + 0.5)
    job, actions = ticked(job)
    assert [probe.members for probe in some(actions, ProbeWorkers)] == [(2,)]
    assert started(actions) == [2]
    assert job.next_tick_at == NOW + 0.25


def test_a_tick_that_finds_all_well_decides_nothing():
    job, actions = ticked(running(0, 0))
    assert (actions, job.phase) == ([], JobPhase.RUNNING)
    job.next_tick_at = NOW
    _, _, reason = machine.step(job, Tick(), NOW)
    assert "started" not in reason


def test_a_straggler_is_handed_over_and_the_assignment_has_its_time_again():
    job = running(0, 0, 0, stragglers="replace")
    for member, seconds in ((1, 0.1), (2, 0.1), (3, 5.0)):
        beat(job, member, shard_seconds=seconds)
    job.assigned_at = NOW - 10.0
    job, actions = ticked(job)
    assert job.workers[3].status is WorkerStatus.LEAVING
    assert job.workers[3].leave_reason == "straggler"
    assert job.assigned_at == NOW
    assert (job.slots[2].replacements, started(actions)) == (1, [2])
    assert not sent(actions, Prepare)
    assert some(actions, RecordVerdict)[0].member == 3


def test_shards_are_not_assigned_again_while_one_is_done():
    job = running(0, 0, 0, shards=12)
    for member, seconds in ((1, 0.1), (2, 0.1), (3, 0.5)):
        beat(job, member, shard_seconds=seconds)
    job.assigned_at = NOW - 10.0
    change(job, 1, status=WorkerStatus.DONE)
    _, actions = ticked(job)
    assert not sent(actions, Prepare)
    change(job, 1, status=WorkerStatus.MEMBER)
    job, actions = ticked(job)
    (asked,) = sent(actions, Prepare)
    assert asked.abort is False


def test_a_worker_that_is_lost_and_not_known_changes_nothing():
    job = running(0, 0)
    again, actions = after(job, WorkerLost(9, "crash", "killed"))
    assert (actions, again.phase) == ([], JobPhase.RUNNING)
