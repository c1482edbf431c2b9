"""Who is blamed, for what, and where: by the machine, and by what a worker left on its phase page."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.elastic.machine_driver import Driven, only, some

from paceline.core.events import Event, Verdict, WorkerFailed
from paceline.core.phase_page import PhasePage, page_file
from paceline.elastic.model import HasBroken, NoteFailure, NoteVerdict
from paceline.elastic.shell.seats import Seat
from paceline.elastic.shell.verdicts import Verdicts
from paceline.engines.local import protocol
from paceline.engines.local.worker import Worker


def test_damaged_data_is_a_failure_in_the_collective_wherever_its_sender_is_now():
    job = Driven(4, 8).running()
    job.beat_all(phase="data")
    told = job.tell(HasBroken(job.of_slot(0), job.state.generation, "damaged", accused=(job.of_slot(2),)))
    failure, verdict = only(told, NoteFailure), only(told, NoteVerdict)
    assert (failure.slot, failure.phase, failure.kind, failure.sure) == (2, "collective", "corrupt", True)
    assert (verdict.slot, verdict.phase, verdict.sure) == (2, "collective", True)


def test_who_could_not_be_reached_again_and_again_has_to_go():
    job = Driven(4, 8).running()
    cut_off = job.of_slot(3)
    for _ in range(2):
        told = job.tell(HasBroken(job.of_slot(0), job.state.generation, "lost", unreachable=(cut_off,)))
        assert not some(told, NoteFailure)
        job.regroup()
    told = job.tell(HasBroken(job.of_slot(1), job.state.generation, "lost", unreachable=(cut_off,)))
    assert only(told, NoteFailure).member == cut_off


@pytest.fixture
def seat():
    ours, theirs = protocol.pair()
    with theirs:
        worker = Worker(ours)
        yield Seat(5, 2, worker=worker)
        worker.close()


def phases_told(folder: Path, seat: Seat, *, sure: bool) -> set[str]:
    """The phases in the failure and in the verdict; the worker goes on between the two."""
    page = PhasePage(page_file(folder, 5))
    page.write("data", 7)
    written: list[Event] = []
    verdicts = Verdicts(written.append, folder)
    verdicts.open(NoteVerdict(5, 2, "collective", "it stands", "", "", sure=sure), seat, now=1.0)
    verdicts.failure(NoteFailure(5, 2, "collective", "silent", "it stands", sure=sure), seat, told=True)
    page.write("optimizer", 7)
    verdicts.close()
    page.close()
    assert {type(event) for event in written} == {WorkerFailed, Verdict}
    return {event.phase for event in written if isinstance(event, WorkerFailed | Verdict)}


def test_the_phase_page_knows_better_than_the_last_heartbeat(tmp_path, seat):
    assert phases_told(tmp_path, seat, sure=False) == {"data"}


def test_a_phase_that_is_sure_stays(tmp_path, seat):
    assert phases_told(tmp_path, seat, sure=True) == {"collective"}


def test_who_is_killed_while_it_waits_for_a_group_was_waiting(tmp_path, seat):
    page = PhasePage(page_file(tmp_path, 5))
    page.write("wait", 0)
    written: list[Event] = []
    Verdicts(written.append, tmp_path).failure(NoteFailure(5, 2, "start", "crash", "killed"), seat, told=True)
    page.close()
    (event,) = written
    assert isinstance(event, WorkerFailed)
    assert event.phase == "wait"
