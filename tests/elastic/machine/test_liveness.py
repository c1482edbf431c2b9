"""Silence is judged by the process, not by the interpreter's lock; one that is stopped with all others is no
culprit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from tests.elastic.machine.machine_driver import Driven, beat_of, hello_of, only, some

from paceline.elastic.machine import machine
from paceline.elastic.machine.actions import Action, ProbeWorkers, RecordFailure, RecordVerdict
from paceline.elastic.machine.machine_events import (
    AgentJoined,
    FromMember,
    ProcessProbed,
    ScaleRequested,
    Tick,
    WorkerLost,
)
from paceline.elastic.machine.state import JobPhase

Answer = Callable[[int], ProcessProbed | None]


def pass_time(
    job: Driven, seconds: float, beating: Iterable[int] = (), answer: Answer = lambda member: None
) -> list[Action]:
    """Members of `beating` beat, the others do not; their processes are found as `answer` says."""
    told: list[Action] = []
    until = job.now + seconds
    beating = tuple(beating)
    while job.now < until - 1e-9 and job.state.phase is not JobPhase.ENDED:
        job.now += 0.05
        if round(job.now * 20) % 5 == 0:
            for member in beating:
                if member in job.state.heartbeats:
                    last = job.state.heartbeats[member]
                    later = dataclasses.replace(last, seconds=last.seconds + 0.25)
                    told += job.tell(FromMember(member, later))
        due = machine.next_deadline(job.state)
        if due is not None and job.now >= due:
            found = job.tell(Tick())
            told += found
            for probe in some(found, ProbeWorkers):
                for member in probe.members:
                    if (seen := answer(member)) is not None:
                        told += job.tell(seen)
    return told


def in_first_step(workers: int = 3) -> Driven:
    """All are in the view, and none has committed a step."""
    job = Driven(workers, 2 * workers).running()
    for member in job.members:
        job.tell(beat_of(member, "data", 0.0, (0, 0, 0)))
    return job


def runs(job: Driven, phase: str = "data") -> Answer:
    """The process runs and is in one phase since now."""
    began = job.now
    return lambda member: ProcessProbed(member, False, phase, job.now - began)


def stopped(member: int) -> ProcessProbed:
    return ProcessProbed(member, True, "forward", 1.0)


def test_a_worker_whose_interpreter_is_held_has_the_time_of_its_phase():
    job = in_first_step()
    answer = runs(job)
    told = pass_time(job, 590.0, beating=(1, 3), answer=answer)
    assert some(told, ProbeWorkers)
    assert not some(told, RecordVerdict)
    for member in (1, 3):
        job.tell(beat_of(member, "collective", 0.0, (0, 0, 0), (2,)))
    told = pass_time(job, 15.0, beating=(1, 3), answer=answer)
    verdict = only(told, RecordVerdict)
    assert (verdict.slot, verdict.phase) == (1, "data")
    assert "a call holds the interpreter's lock" in verdict.what
    assert only(some(told, RecordFailure), RecordFailure).kind == "hung"


def test_all_interpreters_held_in_the_first_sample_is_no_failure():
    job = in_first_step()
    assert not some(pass_time(job, 60.0, answer=runs(job)), RecordVerdict)
    job.beat_all()
    assert not some(pass_time(job, 4.0, beating=(1, 2, 3)), RecordVerdict)


def test_after_the_first_steps_the_measured_step_is_the_limit():
    job = Driven(3, 6).running()
    for member in job.members:
        waits = () if member == 2 else (2,)
        job.tell(beat_of(member, "collective" if waits else "data", 0.0, (9, 0, 0), waits, 0.01, 0.02))
    began = job.now
    told = pass_time(job, 8.0, beating=(1, 3), answer=runs(job))
    assert only(told, RecordVerdict).slot == 1
    assert 5.0 <= job.now - began <= 8.0


def test_the_phase_of_the_page_counts_and_not_that_of_the_last_beat():
    """It said that it waited, went on, and is held now: whom it waited for waits for it."""
    job = Driven(2, 4).running()
    job.tell(beat_of(1, "collective", 0.0, (9, 0, 0), (2,), 0.01, 0.02))
    job.tell(beat_of(2, "collective", 0.0, (9, 0, 0), (1,), 0.01, 0.02))
    told = pass_time(job, 8.0, beating=(2,), answer=runs(job))
    verdict = only(told, RecordVerdict)
    assert (verdict.slot, verdict.phase) == (0, "data")


def test_one_that_goes_on_and_does_not_beat_is_silent():
    job = Driven(3, 6).running()
    job.beat_all()
    told = pass_time(job, 2.5, beating=(1, 3), answer=lambda m: ProcessProbed(m, False, "forward", 0.01))
    assert "no heartbeat" in only(told, RecordVerdict).what


def test_one_whose_control_thread_runs_and_does_not_beat_is_silent_in_whatever_phase():
    job = Driven(3, 6).running()
    job.beat_all()
    began = job.now
    cut = lambda m: ProcessProbed(m, False, "collective", job.now - began, 0.1)  # noqa: E731
    told = pass_time(job, 2.5, beating=(1, 3), answer=cut)
    assert "no heartbeat" in only(told, RecordVerdict).what


def test_one_that_is_stopped_is_found_as_soon_as_before():
    job = Driven(3, 6).running()
    job.beat_all()
    began = job.now
    while not some(pass_time(job, 0.25, beating=(1, 3), answer=stopped), RecordVerdict):
        assert job.now - began < 2.3


def test_one_whose_machine_does_not_answer_is_silent():
    job = in_first_step()
    assert only(pass_time(job, 2.5, beating=(1, 3)), RecordVerdict).slot == 1


def test_an_interpreter_that_is_held_and_then_stopped_is_silent():
    job = in_first_step()
    assert not some(pass_time(job, 10.0, beating=(1, 3), answer=runs(job)), RecordVerdict)
    assert only(pass_time(job, 2.5, beating=(1, 3), answer=stopped), RecordVerdict).slot == 1


def test_interpreters_that_are_held_in_a_collective_for_ever_are_found():
    """Those that wait let go of the interpreter: neither of the two waits for the other."""
    job = Driven(2, 4).running()
    job.beat_all(phase="collective")
    began = job.now
    held = lambda m: ProcessProbed(m, False, "collective", job.now - began, job.now - began)  # noqa: E731
    assert some(pass_time(job, 60.0, answer=held), RecordVerdict)


def test_when_all_are_stopped_together_no_worker_is_blamed():
    job = Driven(3, 6).running()
    job.beat_all()
    assert not some(pass_time(job, 30.0, answer=stopped), RecordVerdict)
    job.beat_all()
    assert not some(pass_time(job, 4.0, beating=(1, 2, 3)), RecordVerdict)


def test_a_replacement_that_came_later_does_not_make_those_stopped_together_guilty():
    job = Driven(4, 8).running()
    job.beat_all()
    job.tell(WorkerLost(1, "crash", "killed"))
    pass_time(job, 0.5)
    (newcomer,) = set(job.state.workers) - {1, 2, 3, 4}
    job.tell(hello_of(newcomer, 0, 0, 0, None))
    job.tell(beat_of(newcomer, "wait", 0.0))
    assert not some(pass_time(job, 30.0, beating=(newcomer,), answer=stopped), RecordVerdict)


def test_a_ready_worker_that_was_there_before_shows_that_one_alone_is_stopped():
    job = Driven(3, 6).running()
    job.tell(ScaleRequested(4))
    (newcomer,) = set(job.state.workers) - {1, 2, 3}
    job.tell(hello_of(newcomer, 3, 0, 0, None))
    job.beat_all()
    job.tell(beat_of(newcomer, "wait", 0.0))
    assert some(pass_time(job, 2.5, beating=(newcomer,), answer=stopped), RecordVerdict)


def test_who_stays_stopped_when_the_others_are_back_is_named():
    job = Driven(3, 6).running()
    job.beat_all()
    assert not some(pass_time(job, 30.0, answer=stopped), RecordVerdict)
    for member in (1, 3):
        job.tell(beat_of(member, "collective", 30.0, (5, 0, 0), (2,), 0.01, 0.02))
    assert not some(pass_time(job, 1.5, beating=(1, 3), answer=stopped), RecordVerdict)
    told = pass_time(job, 1.5, beating=(1, 3), answer=stopped)
    assert only(told, RecordVerdict).slot == 1


def test_all_stopped_for_ever_are_replaced_in_the_end():
    job = Driven(2, 4).running()
    job.beat_all()
    assert not some(pass_time(job, 590.0, answer=stopped), RecordVerdict)
    assert len(some(pass_time(job, 15.0, answer=stopped), RecordVerdict)) == 2


def test_a_single_worker_that_is_stopped_is_named():
    job = Driven(1, 2).running()
    job.beat_all()
    assert only(pass_time(job, 2.5, answer=stopped), RecordVerdict).slot == 0


def test_when_all_workers_of_one_host_are_stopped_no_worker_is_blamed():
    job = Driven(2, 8).running()
    job.tell(AgentJoined(1, 2, "host1"))
    job.join_all()
    job.wait(0.5)
    job.form_view()
    job.beat_all()
    home = [member for member in job.members if job.state.workers[member].agent_id == 0]
    for member in home:
        away = tuple(set(job.members) - set(home))
        job.tell(beat_of(member, "collective", 0.0, (5, 0, 0), away, 0.01, 0.02))
    assert not some(pass_time(job, 60.0, beating=home, answer=stopped), RecordVerdict)


def test_machines_that_cannot_be_reached_are_silent_with_all_their_workers():
    job = Driven(3, 6).running()
    job.beat_all()
    assert len(some(pass_time(job, 2.5), RecordVerdict)) == 3


def test_after_a_restart_members_that_stay_stopped_together_are_replaced_in_the_end():
    job = Driven(2, 4).running()
    job.beat_all()
    again = Driven(2, 4, began=machine.snapshot(job.state))
    assert not some(pass_time(again, 590.0, answer=stopped), RecordFailure)
    assert len(some(pass_time(again, 15.0, answer=stopped), RecordFailure)) == 2


def test_after_a_restart_a_member_that_cannot_connect_is_waited_for():
    job = Driven(2, 4).running()
    job.beat_all()
    again = Driven(2, 4, began=machine.snapshot(job.state))
    answer = runs(again)
    again.tell(hello_of(1, 0, 0, again.state.generation, (5, 0, 0)))
    told = pass_time(again, 4.9, beating=(1,), answer=answer)
    assert again.state.phase is JobPhase.RETURNING
    assert not some(told, RecordFailure)
    again = Driven(2, 4, began=dataclasses.replace(machine.snapshot(job.state), committed=False))
    again.tell(hello_of(1, 0, 0, again.state.generation, (0, 0, 0)))
    told = pass_time(again, 60.0, beating=(1,), answer=runs(again))
    assert again.state.phase is JobPhase.RETURNING
    assert not some(told, RecordFailure)
    again.tell(hello_of(2, 1, 0, again.state.generation, (0, 0, 0)))
    assert "all members are in generation" in again.reason
