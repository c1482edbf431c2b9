"""A job that has failed for good: those who hold a good state save it before the end."""

from __future__ import annotations

import pytest
from tests.elastic.machine_driver import Driven, asked, only, some

from paceline.elastic import machine
from paceline.elastic.model import (
    Action,
    Dismiss,
    EndJob,
    HasRaised,
    IsDone,
    Joined,
    Lost,
    NoteFailure,
    Phase,
    StartWorker,
    TellStop,
    TellView,
)

FAR = (5, 0, 0)


def raised(member: int, *, step: int = 6, holds: bool = True, fault: str = "user") -> HasRaised:
    return HasRaised(member, "ValueError: no", fault, step, 0, holds, FAR)


def done_all(job: Driven) -> list[Action]:
    told: list[Action] = []
    for number in job.members:
        told += job.tell(IsDone(number, (5, 0, 3), "same", "why", job.state.generation))
    return told


def test_all_meet_once_more_save_and_end_as_failed():
    job = Driven(3, 6).running()
    job.beat_all()
    told = job.tell(raised(2))
    assert not some(told, EndJob)
    assert asked(told).members == (1, 2, 3)  # also the one whose code raised: its state is as good
    assert asked(told).abort
    assert only(told, NoteFailure).final
    plan = only(job.report_all(), TellView).plan
    assert plan.ends
    assert plan.members == (1, 2, 3)
    # Nobody is asked to finish a step first: it would raise again.
    assert not some(job.install_all(), TellStop)
    assert job.state.phase is Phase.STOPPING
    end = only(done_all(job), EndJob)
    assert (end.ok, end.failed, end.stopped) == (False, 2, None)
    assert "rank 1 raised in step 6" in end.reason


def test_one_without_a_good_state_is_left_out():
    job = Driven(3, 6).running()
    job.beat_all()
    told = job.tell(raised(2, holds=False))
    assert asked(told).members == (1, 3)
    assert not some(told, StartWorker)
    assert only(job.report_all(), TellView).plan.members == (1, 3)
    job.install_all()
    assert only(done_all(job), EndJob).failed == 2


def test_others_that_raise_meanwhile_help_too_or_are_left_out():
    job = Driven(3, 6).running()
    job.beat_all()
    job.tell(raised(2))
    job.tell(raised(1))
    job.tell(raised(3, holds=False))
    plan = only(job.report_all(), TellView).plan
    assert plan.members == (1, 2)
    # One fails to save: the other does it.
    job.tell(raised(1, holds=False))
    assert only(job.report_all(), TellView).plan.members == (2,)
    job.install_all()
    assert only(done_all(job), EndJob).failed == 2


def test_a_forgiven_error_lets_its_worker_go():
    job = Driven(3, 6).running()
    job.beat_all()
    told = job.tell(raised(2, fault="code"))
    assert only(told, Dismiss).member == 2
    assert not only(told, NoteFailure).final
    assert only(told, StartWorker).slot == 1
    assert job.regroup().ends == ""


@pytest.mark.parametrize("how", ["lost", "nothing reported", "too late"])
def test_the_end_comes_in_any_case(how):
    job = Driven(2, 4, stop_seconds=30.0).running()
    job.beat_all()
    job.tell(raised(2, holds=False))
    if how == "lost":
        told = job.tell(Lost(1, "crash", "gone"))
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
    event = HasRaised(2, "ConfigError: no", "user", 0, -1, False, (0, 0, 0) if first else FAR)
    assert only(job.tell(event), EndJob).failed == 2


def test_a_supervisor_that_is_started_again_goes_on_with_it():
    job = Driven(2, 4).running()
    job.beat_all()
    job.tell(raised(2))
    again = Driven(2, 4, began=machine.remembered(job.state))
    for number, slot in ((1, 0), (2, 1)):
        again.tell(Joined(number, slot, 0, job.state.generation - 1, FAR))
    assert again.state.phase is Phase.PREPARING
    assert again.regroup().ends
    end = only(done_all(again), EndJob)
    assert (end.ok, end.failed) == (False, 2)
