"""What may happen at any time is noted in every phase of the job: none is a phase in which it is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.elastic.machine.machine_driver import (
    beat_of,
    dial_of,
    exception_of,
    failure_at,
    finish_of,
    leave_of,
    sent,
    some,
    started,
    vote_of,
)
from tests.elastic.machine.made_states import NOW, after, change, made

from paceline.control.messages import Prepare
from paceline.elastic.machine.actions import KillWorker
from paceline.elastic.machine.machine_events import (
    AgentJoined,
    AgentLost,
    MachineEvent,
    ProcessProbed,
    ScaleRequested,
    StopRequested,
    Tick,
    WorkerLost,
)
from paceline.elastic.machine.state import JobPhase, JobState, WorkerStatus, in_view

PHASES = [phase for phase in JobPhase if phase is not JobPhase.ENDED]
WITH_VIEW = [phase for phase in PHASES if phase is not JobPhase.STARTING]


def job_in(phase: JobPhase) -> JobState:
    """Members 1 and 2 of this host, 3 and 4 of another one that all have met, in this phase of the job."""
    job = made((0, 0, 1, 1), phase, shards=8)
    job.committed, job.max_progress, job.next_tick_at = True, (5, 0, 0), NOW + 50.0
    everyone = frozenset(job.workers)
    for number in everyone:
        change(job, number, reached=everyone - {number})
    match phase:
        case JobPhase.STARTING:
            job.view, job.generation, job.started_at = None, 0, NOW
            for number in everyone:
                change(job, number, status=WorkerStatus.READY, since=NOW)
            change(job, 2, status=WorkerStatus.STARTING)
        case JobPhase.PREPARING:
            job.generation, job.pending, job.abort, job.reason = 4, everyone, True, "a test"
        case JobPhase.INSTALLING:
            job.pending = everyone
        case JobPhase.STOPPING:
            job.stop_reason, job.stop_requested_at = "a test", NOW
        case JobPhase.RETURNING:
            change(job, 2, reconnected=False)
    return job


def told(phase: JobPhase, event: MachineEvent) -> JobState:
    state, _ = after(job_in(phase), event, NOW + 1.0)
    return state


@pytest.mark.parametrize("phase", PHASES)
def test_a_sign_of_life(phase):
    state = told(phase, beat_of(1, "forward", 0.1, (5, 1, 0)))
    assert state.last_message_at[1] == NOW + 1.0
    assert state.heartbeats[1].progress == (5, 1, 0)


@pytest.mark.parametrize("phase", PHASES)
def test_a_process_that_was_probed(phase):
    probed = ProcessProbed(3, stopped=False)
    assert told(phase, probed).probes[3] == (NOW + 1.0, probed)


@pytest.mark.parametrize("phase", PHASES)
def test_a_peer_that_was_reached(phase):
    job = job_in(phase)
    change(job, 1, reached=frozenset({4}))
    state, _ = after(job, dial_of(1, 3))
    assert state.workers[1].reached == {3, 4}


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_that_is_gone(phase):
    state = told(phase, WorkerLost(1, "crash", "killed"))
    assert 1 not in state.workers
    assert state.slots[0].failures == 1


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_whose_code_raised(phase):
    state = told(phase, exception_of(1, "ValueError", "other", 5, 0))
    assert 1 not in state.workers


@pytest.mark.parametrize("phase", PHASES)
def test_a_host_that_is_gone(phase):
    state = told(phase, AgentLost(1, "no answer"))
    assert not any(worker.agent_id == 1 for worker in state.workers.values())
    assert 1 not in state.agents


@pytest.mark.parametrize("phase", PHASES)
def test_a_host_that_offers_workers(phase):
    state, actions = after(job_in(phase), AgentJoined(2, 2, "host2"))
    stopping = phase is JobPhase.STOPPING
    assert (2 in state.agents, started(actions)) == (not stopping, [] if stopping else [4, 5])


@pytest.mark.parametrize("phase", PHASES)
def test_another_size(phase):
    state, actions = after(job_in(phase), ScaleRequested(5))
    assert started(actions) == ([] if phase is JobPhase.STOPPING else [4])
    state, _ = after(job_in(phase), ScaleRequested(3))
    kept = sum(slot.wanted for slot in state.slots.values())
    assert kept == (4 if phase is JobPhase.STOPPING else 3)


@pytest.mark.parametrize("phase", PHASES)
def test_a_request_to_stop(phase):
    state = told(phase, StopRequested("enough"))
    assert state.stop_reason == ("a test" if phase is JobPhase.STOPPING else "enough")
    assert (state.phase is JobPhase.ENDED) == (not in_view(job_in(phase)))


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_that_was_asked_to_go(phase):
    state = told(phase, leave_of(3, "SIGTERM"))
    leaves = 3 not in state.workers or state.workers[3].leave_reason == "preempted"
    # While the job stops all leave.
    assert leaves == (phase is not JobPhase.STOPPING)


@pytest.mark.parametrize("phase", WITH_VIEW)
def test_a_hash_of_the_state(phase):
    assert told(phase, vote_of(1, 6, "a", 3)).votes == {(6, ""): {1: "a"}}


def test_hashes_are_judged_when_members_are_back_and_not_before():
    job = job_in(JobPhase.RETURNING)
    job.votes = {(6, ""): {1: "a", 2: "a", 3: "b"}}
    lost = WorkerLost(4, "crash", "killed")
    state, actions = after(job, lost)
    assert (state.votes, some(actions, KillWorker), sorted(state.workers)) == (job.votes, [], [1, 2, 3, 5])
    job = job_in(JobPhase.RUNNING)
    job.votes = {(6, ""): {1: "a", 2: "a", 3: "b"}}
    _, actions = after(job, lost)
    assert [kill.member for kill in some(actions, KillWorker)] == [3]


@pytest.mark.parametrize("phase", WITH_VIEW)
def test_a_collective_that_failed(phase):
    state, actions = after(job_in(phase), failure_at(1, 3, "a peer is gone", unreachable=(3,)), NOW + 1.0)
    assert state.last_message_at[1] == NOW + 1.0
    assert state.abort
    asked_before = phase in (JobPhase.PREPARING, JobPhase.RETURNING)
    assert [one.generation for one in sent(actions, Prepare)] == ([] if asked_before else [4])


@pytest.mark.parametrize("phase", WITH_VIEW)
def test_a_member_that_is_at_the_end(phase):
    state = told(phase, finish_of(1, (9, 0, 0), "x", None, 3))
    assert (state.workers[1].status, state.workers[1].digest) == (WorkerStatus.DONE, "x")


@pytest.mark.parametrize("phase", PHASES)
def test_time_that_passes(phase):
    job = job_in(phase)
    job.next_tick_at = NOW
    job.slots[9] = replace(job.slots[3], number=9, worker=None, start_at=NOW)
    state, actions = after(job, Tick())
    assert state.next_tick_at > NOW
    assert started(actions) == ([] if phase is JobPhase.STOPPING else [9])
