"""Verdicts and failures: the phase they name, the stack they wait for, and what is shown once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.elastic.supervisor.shell_parts import Shell, heartbeat, written

from paceline.control.messages import StackRequest, WorkerException
from paceline.core.errors import ResourceError
from paceline.core.events import Note, Verdict, WorkerFailed
from paceline.core.phase_page import PhasePage, page_file
from paceline.elastic.machine.actions import RecordFailure, RecordVerdict
from paceline.elastic.supervisor.process_probe import MAX_STACK_SECONDS, STACK_SECONDS
from paceline.elastic.supervisor.verdict_reports import VerdictReports
from paceline.elastic.supervisor.worker_record import WorkerRecord

VERDICT = RecordVerdict(5, 2, "collective", "it stands", "rank 0 waits", "it is replaced")


@pytest.fixture
def verdicts(shell: Shell) -> VerdictReports:
    return shell.verdicts


@pytest.fixture
def record(shell) -> WorkerRecord:
    return WorkerRecord(5, 2, process=shell.process()[0])


def phases_of(folder: Path, verdicts: VerdictReports, record: WorkerRecord, *, sure: bool) -> set[str]:
    """The phases in the failure and in the verdict; the worker goes on between the two."""
    page = PhasePage(page_file(folder, 5))
    page.write("data", 7)
    verdicts.open(RecordVerdict(5, 2, "collective", "it stands", "", "", sure=sure), record)
    failure = RecordFailure(5, 2, "collective", "silent", "it stands", sure=sure)
    verdicts.failure(failure, record, has_verdict=True)
    page.write("optimizer", 7)
    verdicts.close()
    page.close()
    found = [*written(folder / "journal.jsonl", WorkerFailed), *written(folder / "journal.jsonl", Verdict)]
    assert len(found) == 2
    return {event.phase for event in found}


def test_the_phase_page_is_newer_than_the_last_heartbeat(tmp_path, verdicts, record):
    assert phases_of(tmp_path, verdicts, record, sure=False) == {"data"}


def test_a_phase_that_is_sure_stays(tmp_path, verdicts, record):
    assert phases_of(tmp_path, verdicts, record, sure=True) == {"collective"}


def test_a_worker_that_is_killed_while_it_waits_for_a_group_was_waiting(tmp_path, verdicts, record):
    page = PhasePage(page_file(tmp_path, 5))
    page.write("wait", 0)
    verdicts.failure(RecordFailure(5, 2, "start", "crash", "killed"), record, has_verdict=True)
    page.close()
    (event,) = written(tmp_path / "journal.jsonl", WorkerFailed)
    assert (event.phase, event.time) == ("wait", 1e9)


def test_a_stack_that_does_not_come_is_waited_for_so_long_and_the_kill_after_it(
    tmp_path, shell: Shell, verdicts, record, capfd
):
    record.heartbeat, record.heartbeat_at = heartbeat(7), shell.clock.now() - 3.0
    verdicts.open(VERDICT, record)
    killed: list[int] = []
    assert verdicts.after(5, lambda: killed.append(5))
    began = shell.clock.now()
    while not killed:
        shell.clock.advance(verdicts.due - shell.clock.now())
        verdicts.tick(shell.clock.now())
    assert shell.clock.now() - began == pytest.approx(STACK_SECONDS, abs=0.03)
    assert verdicts.due == float("inf")
    (verdict,) = written(tmp_path / "journal.jsonl", Verdict)
    assert (verdict.rank, verdict.line, verdict.waiting) == (2, "", "rank 0 waits")
    assert "its Python line is not known; last heartbeat 3.4 s ago: forward for 0.5 s" in verdict.text
    assert verdict.text == verdicts.last_text == capfd.readouterr().err.rstrip("\n")


def test_a_verdict_for_which_no_rank_waits_says_nothing_about_the_others(verdicts, record):
    verdicts.open(RecordVerdict(5, 2, "collective", "it stands", "", "the job ends"), record)
    verdicts.close()
    assert "the others" not in verdicts.last_text
    assert verdicts.last_text.endswith("what was done: the job ends")


def test_without_a_verdict_a_kill_does_not_wait(verdicts):
    assert not verdicts.after(5, lambda: None)


def test_an_agent_is_asked_and_its_reply_completes_the_verdict(tmp_path, shell, verdicts):
    agent = shell.agent()
    verdicts.open(VERDICT, WorkerRecord(5, 2, agent_id=1))
    assert agent.received()[-1] == StackRequest(member=5)
    verdicts.stack_found(6, "", ["another.py:1"])
    assert not written(tmp_path / "journal.jsonl", Verdict)
    verdicts.stack_found(5, "the process is stopped (SIGSTOP)", ["model.py:3 in forward", "run.py:9"])
    (verdict,) = written(tmp_path / "journal.jsonl", Verdict)
    assert verdict.line == "model.py:3 in forward"
    assert "the kernel says: the process is stopped (SIGSTOP)" in verdict.text
    assert "called from run.py:9" in verdict.text


def test_an_agent_has_as_long_as_its_probe_and_a_round_trip(tmp_path, shell, verdicts):
    shell.agent()
    verdicts.open(VERDICT, WorkerRecord(5, 2, agent_id=1))
    shell.clock.advance(MAX_STACK_SECONDS + 0.5)
    verdicts.tick(shell.clock.now())
    assert not written(tmp_path / "journal.jsonl", Verdict)
    shell.clock.advance(0.2)
    verdicts.tick(shell.clock.now())
    assert written(tmp_path / "journal.jsonl", Verdict)


def test_an_agent_that_cannot_be_asked_is_not_waited_for(tmp_path, shell, verdicts):
    verdicts.open(VERDICT, WorkerRecord(5, 2, agent_id=3))
    assert verdicts.due == shell.clock.now()
    verdicts.tick(shell.clock.now())
    assert written(tmp_path / "journal.jsonl", Verdict)


def test_the_same_exception_of_several_ranks_is_shown_once(shell, verdicts, capfd):
    exception = WorkerException(
        summary="ValueError: no",
        traceback='Traceback:\n  File "net.py", line 7, in forward\n    x\nValueError: no\n',
        phase="forward",
        fault="code",
        step=3,
    )
    for slot in (0, 1):
        record = WorkerRecord(slot, slot, exception=exception)
        verdicts.failure(RecordFailure(slot, slot, "data", "raised", "no"), record, has_verdict=False)
    shown = capfd.readouterr().err
    assert "Traceback" not in shown
    assert shown.count("ValueError") == 1
    assert "rank 0 (pid 0) raised in phase forward at net.py:7 in forward: ValueError: no\n" in shown
    assert "rank 1 (pid 0) raised the same as rank 0\n" in shown
    shell.clock.advance(11.0)
    record = WorkerRecord(2, 2, exception=exception)
    verdicts.failure(RecordFailure(2, 2, "data", "raised", "no"), record, has_verdict=False)
    assert "rank 2 (pid 0) raised in phase forward at" in capfd.readouterr().err


def test_a_worker_that_never_started_does_not_fail(tmp_path, verdicts):
    failure = RecordFailure(5, 2, "start", "preempted", "its machine is gone")
    verdicts.failure(failure, WorkerRecord(5, 2), has_verdict=False)
    assert not written(tmp_path / "journal.jsonl", WorkerFailed)


def test_a_warning_is_shown_and_noted(tmp_path, verdicts, capfd):
    verdicts.warn(ResourceError("no descriptor is left", remedy="raise the limit"))
    assert "paceline: no descriptor is left" in capfd.readouterr().err
    (note,) = written(tmp_path / "journal.jsonl", Note)
    assert "raise the limit" in note.text
