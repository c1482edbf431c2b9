"""A job that has failed for good: those who hold a good state save it before the end."""

from __future__ import annotations

import pytest
from tests.elastic.machine.machine_driver import (
    Driven,
    asked,
    exception_of,
    finish_of,
    hello_of,
    only,
    only_sent,
    sent,
    some,
)

from paceline.control.messages import Dismissed, Stop
from paceline.elastic.machine import machine
from paceline.elastic.machine.actions import Action, EndJob, InstallView, RecordFailure, StartWorker
from paceline.elastic.machine.machine_events import FromMember, ScaleRequested, WorkerLost
from paceline.elastic.machine.state import JobPhase

FAR = (5, 0, 0)


def raised(member: int, *, step: int = 6, holds: bool = True, fault: str = "user") -> FromMember:
    return exception_of(member, "ValueError: no", fault, step, 0, holds, FAR)


def done_all(job: Driven) -> list[Action]:
    told: list[Action] = []
    for number in job.members:
        told += job.tell(finish_of(number, (5, 0, 3), "same", "why", job.state.generation))
    return told


def test_all_meet_once_more_save_and_end_as_failed():
    job = Driven(3, 6).running()
    job.beat_all()
    told = job.tell(raised(2))
    assert not some(told, EndJob)
    assert asked(told).members == (1, 2, 3)  # also the one whose code raised: its state is as good
    assert asked(told).abort
    assert only(told, RecordFailure).final
    plan = only(job.report_all(), InstallView).plan
    assert plan.ends
    assert plan.members == (1, 2, 3)
    # No member is asked to finish a step first: it would raise again.
    assert not sent(job.install_all(), Stop)
    assert job.state.phase is JobPhase.STOPPING
    end = only(done_all(job), EndJob)
    assert (end.ok, end.failed, end.stopped) == (False, 2, None)
    assert "rank 1 raised in step 6" in end.reason


def test_a_pause_becomes_an_abort():
    """A member that finishes its step before it reports would wait for the one that raised."""
    job = Driven(3, 6).running()
    job.beat_all()
    assert not asked(job.tell(ScaleRequested(2))).abort
    generation = job.state.generation
    told = job.tell(raised(2))
    assert asked(told).abort
    assert job.state.generation == generation + 1


def test_one_without_a_good_state_is_left_out():
    job = Driven(3, 6).running()
    job.beat_all()
    told = job.tell(raised(2, holds=False))
    assert asked(told).members == (1, 3)
    assert not some(told, StartWorker)
    assert only(job.report_all(), InstallView).plan.members == (1, 3)
    job.install_all()
    assert only(done_all(job), EndJob).failed == 2


def test_others_that_raise_meanwhile_help_too_or_are_left_out():
    job = Driven(3, 6).running()
    job.beat_all()
    job.tell(raised(2))
    job.tell(raised(1))
    job.tell(raised(3, holds=False))
    plan = only(job.report_all(), InstallView).plan
    assert plan.members == (1, 2)
    # One fails to save: the other does it.
    job.tell(raised(1, holds=False))
    assert only(job.report_all(), InstallView).plan.members == (2,)
    job.install_all()
    assert only(done_all(job), EndJob).failed == 2


def test_a_forgiven_error_lets_its_worker_go():
    job = Driven(3, 6).running()
    job.beat_all()
    told = job.tell(raised(2, fault="code"))
    assert only_sent(told, Dismissed).member == 2
    assert not only(told, RecordFailure).final
    assert only(told, StartWorker).slot == 1
    assert job.form_view().ends == ""


@pytest.mark.parametrize("how", ["lost", "nothing reported", "too late"])
def test_the_end_comes_in_any_case(how):
    job = Driven(2, 4, stop_seconds=30.0).running()
    job.beat_all()
    job.tell(raised(2, holds=False))
    if how == "lost":
        told = job.tell(WorkerLost(1, "crash", "gone"))
    elif how == "nothing reported":
        told = job.report_all(None)
    else:
        job.report_all()
        job.install_all()
        told = job.wait(31.0)
    end = only(told, EndJob)
    assert (end.ok, end.failed) == (False, 2)
    assert "rank 1 raised in step 6" in end.reason


@pytest.mark.parametrize("first", [True, False])
def test_nothing_to_save_ends_at_once(first):
    job = Driven(2, 4, saves_on_failure=first).running()
    if not first:
        job.beat_all()
    event = exception_of(2, "ConfigError: no", "user", 0, -1, False, (0, 0, 0) if first else FAR)
    assert only(job.tell(event), EndJob).failed == 2


def test_a_supervisor_that_is_started_again_goes_on_with_it():
    job = Driven(2, 4).running()
    job.beat_all()
    job.tell(raised(2))
    again = Driven(2, 4, began=machine.snapshot(job.state))
    for number, slot in ((1, 0), (2, 1)):
        again.tell(hello_of(number, slot, 0, job.state.generation - 1, FAR))
    assert again.state.phase is JobPhase.PREPARING
    assert again.form_view().ends
    end = only(done_all(again), EndJob)
    assert (end.ok, end.failed) == (False, 2)


def test_a_failure_before_all_are_back_makes_them_meet_once_more_though_their_view_is_whole():
    """The old view would train on: only another one saves and ends."""
    job = Driven(2, 4).running()
    job.beat_all()
    again = Driven(2, 4, began=machine.snapshot(job.state))
    again.tell(hello_of(1, 0, 0, job.state.generation, FAR))
    assert not some(again.tell(raised(1)), EndJob)
    told = again.tell(hello_of(2, 1, 0, job.state.generation, FAR))
    assert (asked(told).members, asked(told).abort) == ((1, 2), True)
    assert again.form_view().ends
    end = only(done_all(again), EndJob)
    assert (end.ok, end.failed) == (False, 1)


@pytest.mark.parametrize("phase", [JobPhase.RUNNING, JobPhase.INSTALLING])
def test_a_joiner_whose_code_cannot_work_lets_the_members_save(phase):
    """It is in no view, so nothing of theirs is broken: they have to be asked all the same."""
    job = Driven(2, 4).running()
    job.beat_all()
    job.tell(ScaleRequested(3))
    if phase is JobPhase.INSTALLING:
        job.tell(WorkerLost(2, "crash", "gone"))
        job.report_all()
    assert job.state.phase is phase
    joiner = job.of_slot(2)
    told = job.tell(exception_of(joiner, "ValueError: no", "user", 6, -1))
    assert asked(told).abort
    assert joiner not in job.state.workers
    assert job.form_view().ends
    end = only(done_all(job), EndJob)
    assert (end.ok, end.failed) == (False, joiner)
