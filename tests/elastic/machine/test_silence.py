"""Silence: its limit, whose process is probed, and what the process says about it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.elastic.machine.made_states import NOW, beat, change, job_with_limits

from paceline.elastic.machine import liveness
from paceline.elastic.machine.machine_events import ProcessProbed
from paceline.elastic.machine.state import JobPhase, JobState, WorkerStatus


def test_the_limit_of_silence():
    assert liveness.silence_limit(job_with_limits()) == 2.0
    assert liveness.silence_limit(job_with_limits(heartbeat=1.0)) == 8.0
    job = job_with_limits(silence_steps=4.0)
    job.step_seconds = 3.0
    assert liveness.silence_limit(job) == 12.0
    assert liveness.probe_limit(job) == 6.0


def test_whose_process_is_probed():
    job = job_with_limits(0, 0, 0, 0, 0)
    job.last_message_at.update({1: NOW - 1.0, 2: NOW - 0.9, 3: NOW - 5.0, 4: NOW - 5.0})
    change(job, 3, status=WorkerStatus.STARTING)
    change(job, 4, reconnected=False)
    assert liveness.to_probe(job) == (1,)
    job.phase = JobPhase.RETURNING
    assert liveness.to_probe(job) == (1, 4)


def probe(job: JobState, at: float = NOW - 0.25, **seen: Any) -> None:
    job.probes[1] = (at, ProcessProbed(1, **{"stopped": False, **seen}))


def test_an_interpreter_is_held_while_its_process_runs_and_says_nothing():
    job = job_with_limits()
    assert not liveness.interpreter_is_held(job, 1)
    job.last_message_at[1] = NOW - 2.0
    probe(job)
    assert liveness.interpreter_is_held(job, 1)
    probe(job, stopped=True)
    assert not liveness.interpreter_is_held(job, 1)
    probe(job, at=NOW - 2.0)
    assert not liveness.interpreter_is_held(job, 1)  # from before its last message
    job.last_message_at[1] = NOW - 9.0
    probe(job, at=NOW - 2.0)
    assert liveness.interpreter_is_held(job, 1)
    probe(job, at=NOW - 2.1)
    assert not liveness.interpreter_is_held(job, 1)  # too old


def test_an_interpreter_that_ran_since_the_last_message_is_not_held():
    job = job_with_limits()
    job.last_message_at[1] = NOW - 3.0
    for name in ("ran", "seconds"):
        probe(job, at=NOW, **{name: 2.0})
        assert liveness.interpreter_is_held(job, 1)
        probe(job, at=NOW, **{name: 1.9})
        assert not liveness.interpreter_is_held(job, 1)
    probe(job, at=NOW, ran=0.0, seconds=3.0)
    assert not liveness.interpreter_is_held(job, 1)
    probe(job, at=NOW, ran=3.0, seconds=0.0)
    assert liveness.interpreter_is_held(job, 1)


def stop(job: JobState, *members: int, since: float = 1.0) -> None:
    for member in members:
        job.last_message_at[member] = NOW - since
        job.probes[member] = (NOW - 0.25, ProcessProbed(member, stopped=True))


def together(job: JobState) -> set[int]:
    liveness.update_stopped_together(job)
    return set(job.stopped_together)


def test_all_of_a_host_or_of_the_job_are_stopped_together():
    job = job_with_limits(0, 0, 1, 1, 2)
    stop(job, 1, 2)
    assert together(job) == {1, 2}
    stop(job, 3)
    assert together(job) == {1, 2}
    stop(job, 4, 5)
    assert together(job) == {1, 2, 3, 4, 5}


def test_one_alone_is_not_stopped_together():
    job = job_with_limits(0, 0, 2)
    stop(job, 3)
    assert together(job) == set()
    job = job_with_limits(0)
    stop(job, 1)
    assert together(job) == set()


def test_a_worker_that_starts_or_came_later_runs_and_shows_nothing():
    job = job_with_limits(0, 0, 0)
    stop(job, 1, 2)
    assert together(job) == set()
    change(job, 3, status=WorkerStatus.STARTING)
    assert together(job) == {1, 2}
    change(job, 3, status=WorkerStatus.READY, since=NOW - 0.5)
    assert together(job) == {1, 2}
    change(job, 3, status=WorkerStatus.READY, since=NOW - 1.0)
    assert together(job) == {1, 2}
    job.stopped_together = frozenset()
    assert together(job) == set()
    job.last_message_at[2] = NOW - 0.4
    job.probes[2] = (NOW - 0.25, ProcessProbed(2, stopped=True))
    change(job, 3, status=WorkerStatus.READY, since=NOW - 0.5)
    assert together(job) == set()


def test_a_replacement_that_is_stopped_later_does_not_wake_those_before_it():
    """Stopped in two waves: while one of the second has not been probed yet, the first are still stopped."""
    job = job_with_limits(0, 0, 0, 0)
    for number in (3, 4):
        change(job, number, status=WorkerStatus.READY, since=NOW - 1.4)
    stop(job, 1, 2, since=1.5)
    assert together(job) == {1, 2}
    stop(job, 3, since=1.2)
    assert together(job) == {1, 2}
    assert job.last_message_at[1] == NOW - 1.5
    stop(job, 4, since=1.2)
    assert together(job) == {1, 2, 3, 4}


def test_who_wakes_up_begins_anew_with_all_that_were_stopped():
    job = job_with_limits()
    stop(job, 1, 2, 3, since=1.5)
    assert "3 workers" in (liveness.update_stopped_together(job) or "")
    assert liveness.update_stopped_together(job) is not None
    job.progressed_at = job.asked_at = NOW - 50.0
    job.last_message_at[1] = NOW
    del job.last_message_at[3], job.workers[3]
    assert liveness.update_stopped_together(job) is not None
    assert job.last_message_at == {1: NOW, 2: NOW}
    assert job.progressed_at == job.asked_at == NOW
    assert liveness.update_stopped_together(job) is None


def test_the_page_of_a_process_knows_its_phase_better_than_its_last_heartbeat():
    job = job_with_limits()
    beat(job, 1, "collective", 3.0, (2,), at=NOW - 2.0)
    liveness.apply_probed_phase(job, ProcessProbed(1, False, "collective", 5.1))
    assert job.heartbeats[1].waits_for == (2,)  # the same phase
    liveness.apply_probed_phase(job, ProcessProbed(1, False, "collective", 4.9))
    assert job.heartbeats[1].waits_for == (2,)
    liveness.apply_probed_phase(job, ProcessProbed(1, False, "collective"))
    liveness.apply_probed_phase(job, ProcessProbed(1, False, "", 1.0))
    assert (job.heartbeats[1].phase, job.heartbeats[1].seconds) == ("collective", 3.0)
    liveness.apply_probed_phase(job, ProcessProbed(1, False, "collective", 5.2))
    seen = job.heartbeats[1]
    assert (seen.phase, seen.waits_for) == ("collective", ())
    assert seen.seconds == pytest.approx(3.2)
    liveness.apply_probed_phase(job, ProcessProbed(1, False, "data", 1.0))
    seen = job.heartbeats[1]
    assert (seen.phase, seen.seconds, seen.step_seconds) == ("data", 0.0, 1.0)


def test_a_page_and_a_heartbeat_tell_of_one_phase_where_they_differ_by_a_tenth_of_a_second_at_most():
    job = job_with_limits()
    for told, waits_for in ((0.1, (2,)), (0.125, ())):
        beat(job, 1, "collective", told, (2,))
        liveness.apply_probed_phase(job, ProcessProbed(1, False, "collective", 0.0))
        assert job.heartbeats[1].waits_for == waits_for


def test_the_page_of_a_process_that_has_not_beaten_yet():
    job = job_with_limits()
    job.last_message_at[1] = NOW - 1.0
    liveness.apply_probed_phase(job, ProcessProbed(1, False, "data", 3.0))
    assert (job.heartbeats[1].phase, job.heartbeats[1].seconds) == ("data", 2.0)
    liveness.apply_probed_phase(job, ProcessProbed(2, False, "data", 0.0))
    assert (job.heartbeats[2].phase, job.heartbeats[2].seconds) == ("data", 0.0)
