"""When the machine looks at the time again, and what becomes of its clocks when it did not run."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from tests.elastic.machine.made_states import NOW, beat, change, job_with_limits

from paceline.elastic.machine import hang_detection
from paceline.elastic.machine.machine_events import ProcessProbed
from paceline.elastic.machine.state import JobPhase, JobState, WorkerStatus


def test_the_next_look_is_soon_at_the_latest():
    job = job_with_limits()
    job.last_message_at = dict.fromkeys((1, 2, 3), NOW + 5.0)
    job.progressed_at = NOW + 10.0
    assert hang_detection.next_tick(job) == NOW + 2.0
    assert hang_detection.next_tick(replace_settings(job, heartbeat=8.0)) == NOW + 8.0


def replace_settings(job: JobState, **changed: Any) -> JobState:
    copy = job.copy()
    copy.settings = replace(job.settings, **changed)
    return copy


def quiet(**more: Any) -> JobState:
    """A job whose next look would be in 100 s if nothing else came."""
    job = job_with_limits(**{"heartbeat": 100.0, "silence_least": 100.0, **more})
    job.progressed_at = job.asked_at = job.started_at = NOW + 1000.0
    job.last_message_at = dict.fromkeys((1, 2, 3), NOW + 1000.0)
    assert hang_detection.next_tick(job) == NOW + 100.0
    return job


def test_the_next_look_is_when_a_process_is_probed_and_then_each_heartbeat():
    job = job_with_limits()
    job.progressed_at = NOW + 10.0
    assert hang_detection.next_tick(job) == NOW + 1.0
    job.last_message_at[2] = NOW - 1.0
    assert hang_detection.next_tick(job) == NOW + 0.25
    job.last_message_at[2] = NOW - 1.9
    assert hang_detection.next_tick(job) == pytest.approx(NOW + 0.1)
    change(job, 2, reconnected=False)
    assert hang_detection.next_tick(job) == NOW + 1.0


def test_after_a_restart_also_who_is_not_back_is_probed():
    job = job_with_limits()
    change(job, 2, reconnected=False)
    job.phase = JobPhase.RETURNING
    job.last_message_at.update({1: NOW + 50.0, 2: NOW - 0.5, 3: NOW + 50.0})
    assert hang_detection.next_tick(job) == NOW + 0.5


def test_the_next_look_is_when_a_start_or_a_dial_is_due():
    job = quiet(start_seconds=70.0, dial_seconds=40.0)
    change(job, 3, status=WorkerStatus.STARTING, since=NOW - 10.0)
    assert hang_detection.next_tick(job) == NOW + 60.0
    change(job, 2, status=WorkerStatus.READY, dialing=frozenset({1}), dialed_at=NOW - 10.0)
    assert hang_detection.next_tick(job) == NOW + 30.0
    change(job, 2, dialing=frozenset())
    assert hang_detection.next_tick(job) == NOW + 60.0
    job.slots[2] = replace(job.slots[2], worker=None, start_at=NOW + 20.0)
    assert hang_detection.next_tick(job) == NOW + 20.0
    job.gather_until = NOW + 15.0
    assert hang_detection.next_tick(job) == NOW + 15.0


def test_nothing_is_due_for_a_member_that_dialed_before_it_joined():
    job = quiet(dial_seconds=40.0)
    change(job, 2, dialing=frozenset({1}), dialed_at=NOW - 10.0)
    assert hang_detection.next_tick(job) == NOW + 100.0


def test_no_start_is_due_while_the_job_stops():
    job = quiet(stop_seconds=50.0)
    job.slots[2] = replace(job.slots[2], worker=None, start_at=NOW + 20.0)
    assert hang_detection.next_tick(job) == NOW + 20.0
    job.stop_reason, job.stop_requested_at = "enough", NOW
    assert hang_detection.next_tick(job) == NOW + 50.0


def test_the_next_look_is_when_a_stop_or_a_link_probe_is_over():
    job = quiet(stop_seconds=50.0, check_seconds=30.0)
    job.stop_requested_at = NOW - 10.0
    assert hang_detection.next_tick(job) == NOW + 100.0
    job.stop_reason = "enough"
    assert hang_detection.next_tick(job) == NOW + 40.0
    job.dials_sent_at = NOW - 10.0
    assert hang_detection.next_tick(job) == NOW + 40.0
    job.pending_dials = frozenset({(1, 2)})
    assert hang_detection.next_tick(job) == NOW + 20.0


@pytest.mark.parametrize("phase", [JobPhase.RUNNING, JobPhase.STOPPING, JobPhase.PREPARING])
def test_the_next_look_is_when_a_hang_is_half_over_and_when_it_is_over(phase):
    job = quiet(hang_least=40.0)
    job.phase, job.pending = phase, frozenset({1})
    job.progressed_at = NOW - 10.0
    assert hang_detection.next_tick(job) == NOW + 10.0
    job.progressed_at = NOW - 20.5
    job.settings = replace(job.settings, heartbeat=50.0, silence_least=50.0)
    assert hang_detection.next_tick(job) == NOW + 19.5


def test_the_next_look_while_reports_are_awaited():
    job = quiet(hang_least=40.0, cut_short_seconds=20.0)
    job.phase, job.abort, job.pending = JobPhase.PREPARING, True, frozenset({1})
    beat(job, 1, at=NOW + 1000.0)
    job.asked_at = NOW - 10.0
    assert hang_detection.next_tick(job) == NOW + 30.0
    job.saves_alone = True
    assert hang_detection.next_tick(job) == NOW + 20.0


def test_the_next_look_while_a_view_is_installed():
    job = quiet(install_seconds=70.0, cut_short_seconds=20.0)
    job.phase = JobPhase.INSTALLING
    job.asked_at = NOW - 10.0
    assert hang_detection.next_tick(job) == NOW + 60.0
    change(job, 1, status=WorkerStatus.LEAVING, leave_reason="scaled")
    assert hang_detection.next_tick(job) == NOW + 60.0
    change(job, 1, leave_reason="preempted")
    assert hang_detection.next_tick(job) == NOW + 10.0
    change(job, 1, leave_reason="scaled")
    job.stop_reason, job.stop_requested_at = "enough", NOW - 5.0
    assert hang_detection.next_tick(job) == NOW + 15.0


def test_the_next_look_before_the_first_view_and_after_a_restart():
    job = quiet(start_seconds=70.0)
    job.phase, job.started_at = JobPhase.STARTING, NOW - 10.0
    assert hang_detection.next_tick(job) == NOW + 60.0
    job = quiet()
    job.settings = replace(job.settings, silence_least=10.0, heartbeat=100.0)
    job.phase, job.asked_at = JobPhase.RETURNING, NOW - 10.0
    assert hang_detection.next_tick(job) == NOW + 30.0


def test_what_lies_in_the_past_is_looked_at_again_a_heartbeat_later():
    job = job_with_limits()
    job.progressed_at = NOW - 100.0
    assert hang_detection.next_tick(job) == NOW + 0.25
    assert hang_detection.next_tick(replace_settings(job, heartbeat=0.001)) == NOW + 0.01


def test_a_job_that_has_ended_is_not_looked_at():
    job = job_with_limits()
    job.phase = JobPhase.ENDED
    assert hang_detection.next_tick(job) == inf


def test_time_in_which_the_supervisor_did_not_run_is_taken_from_every_clock():
    job = job_with_limits()
    job.slots[1] = replace(job.slots[1], start_at=NOW + 1.0)
    change(job, 1, since=5.0, dialed_at=6.0)
    job.probes[2] = (7.0, ProcessProbed(2, True))
    job.failed_at = 8.0
    clocks = (
        "progressed_at",
        "asked_at",
        "started_at",
        "assigned_at",
        "gather_until",
        "stop_requested_at",
        "productive_at",
        "dials_sent_at",
        "next_tick_at",
    )
    for place, name in enumerate(clocks):
        setattr(job, name, float(place))
    hang_detection.shift_clocks(job, 100.0)
    assert [getattr(job, name) for name in clocks] == [place + 100.0 for place in range(len(clocks))]
    assert (job.workers[1].since, job.workers[1].dialed_at) == (105.0, 106.0)
    assert (job.slots[0].start_at, job.slots[1].start_at) == (None, NOW + 101.0)
    assert job.last_message_at == dict.fromkeys((1, 2, 3), NOW + 100.0)
    assert job.probes[2][0] == 107.0
    assert job.failed_at == 108.0
    job.failed_at = None
    hang_detection.shift_clocks(job, 1.0)
    assert job.failed_at is None
