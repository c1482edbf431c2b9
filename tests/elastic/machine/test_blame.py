"""Who is blamed, for what, and where."""

from __future__ import annotations

from tests.elastic.machine.machine_driver import Driven, failure_at, only, some

from paceline.elastic.machine.actions import RecordFailure, RecordVerdict
from paceline.elastic.machine.state import JobPhase


def test_damaged_data_is_a_failure_in_the_collective_wherever_its_sender_is_now():
    job = Driven(4, 8).running()
    job.beat_all(phase="data")
    told = job.tell(failure_at(job.of_slot(0), job.state.generation, "damaged", accused=(job.of_slot(2),)))
    failure, verdict = only(told, RecordFailure), only(told, RecordVerdict)
    assert (failure.slot, failure.phase, failure.kind, failure.sure) == (2, "collective", "corrupt", True)
    assert (verdict.slot, verdict.phase, verdict.sure) == (2, "collective", True)


def test_who_could_not_be_reached_again_and_again_has_to_go():
    job = Driven(4, 8).running()
    cut_off = job.of_slot(3)
    for _ in range(2):
        told = job.tell(failure_at(job.of_slot(0), job.state.generation, "lost", unreachable=(cut_off,)))
        assert not some(told, RecordFailure)
        job.form_view()
    told = job.tell(failure_at(job.of_slot(1), job.state.generation, "lost", unreachable=(cut_off,)))
    assert only(told, RecordFailure).member == cut_off


def test_who_could_not_be_reached_again_and_again_has_to_go_also_before_a_view_is_installed():
    job = Driven(4, 8).running()
    cut_off = job.of_slot(3)
    told = job.tell(failure_at(job.of_slot(0), job.state.generation, "lost", unreachable=(cut_off,)))
    for _ in range(2):
        assert not some(told, RecordFailure)
        job.report_all()
        assert job.state.phase is JobPhase.INSTALLING
        told = job.tell(failure_at(job.of_slot(0), job.state.generation, "lost", unreachable=(cut_off,)))
    assert only(told, RecordFailure).member == cut_off
