"""Workers whose supervisor stays away: they save and leave, and nothing of what they did is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.engines.local.processes import all_gone, watch
from tests.frontends.gated_run import Gates
from tests.frontends.training_programs import family, program
from tests.train.small_run import STEPS, fit, journal_of, settings, steps_of, workers_of
from tests.waiting import wait_for
from typer.testing import CliRunner

import paceline
from paceline.checkpoint.store import CheckpointStore
from paceline.cli.main import app
from paceline.core import events

PATIENCE = 4.0  # on a busy machine, too, time enough to come from one gate to the next, or to the end
LONG = 300.0  # no worker loses patience in a test
PROGRAM = [sys.executable, "-m", "tests.frontends.gated_run"]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory) -> str:
    """The hash of the undisturbed run."""
    folder = tmp_path_factory.mktemp("quiet")
    off = paceline.FaultTolerance(enabled=False)
    return fit(settings(folder / "run", 1, fault_tolerance=off), [Gates(folder, [])]).state_hash


def of(kind: type, folder: Path) -> list:
    return [event for event in journal_of(folder) if isinstance(event, kind)]


def check_proved(folder: Path) -> None:
    done = CliRunner().invoke(app, ["audit", str(folder)])
    assert done.exit_code == 0, done.output
    assert steps_of(folder) == list(range(1, STEPS + 1))  # none is missing, and none was done again
    assert not (folder / "unheard").exists()


@contextlib.contextmanager
def gated(
    folder: Path, gates: Path, *steps: int, patience: float = PATIENCE
) -> Iterator[subprocess.Popen[str]]:
    """The program, at its first gate."""
    gates.mkdir()
    words = [str(gates), str(patience), ",".join(map(str, steps))]
    with program(folder, *words, command=PROGRAM) as process:
        try:
            at_gate(gates, steps[0], process)
            yield process
        except BaseException:
            for pid in workers_of(folder).values():  # at a gate that is not opened any more
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise


@contextlib.contextmanager
def abandoned(
    folder: Path, gates: Path, *steps: int, patience: float = PATIENCE
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The program, stopped, with its supervisor killed while the workers are at the first gate; its family
    without the supervisor. The gate is open."""
    with gated(folder, gates, *steps, patience=patience) as process:
        # Steps travel with heartbeats: the first may arrive after the workers are at the gate.
        wait_for(lambda: bool(steps_of(folder)))
        supervisor = json.loads((folder / "control.json").read_text())["pid"]
        others = [pid for pid in family(process, folder) if pid != supervisor]
        process.send_signal(signal.SIGSTOP)  # it would start another supervisor
        os.kill(supervisor, signal.SIGKILL)
        (gates / f"open-{steps[0]}").touch()
        yield process, others


def at_gate(gates: Path, step: int, process: subprocess.Popen[str]) -> None:
    there = [gates / f"at-{step}-{rank}" for rank in range(2)]
    wait_for(lambda: process.poll() is not None or all(file.exists() for file in there))
    assert process.poll() is None, process.communicate()[1]


@contextlib.contextmanager
def opened_when(ready: Callable[[], bool], gate: Path) -> Iterator[None]:
    """Beside what follows: the gate is opened once it is ready."""

    def open_it() -> None:
        wait_for(ready)
        gate.touch()

    opener = threading.Thread(target=open_it)
    opener.start()
    yield
    opener.join()


def kill(pids: Sequence[int]) -> None:
    """All at once, and no process is left."""
    with watch(pids) as killed:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert all_gone(killed, 30)


def lose_patience(folder: Path) -> None:
    """Wait until both workers know that the supervisor stays away: they say so while they are at the gate."""
    logs = [folder / "logs" / f"rank-{rank}.log" for rank in range(2)]
    wait_for(lambda: all("the supervisor stayed away" in log.read_text() for log in logs))


def saved_step(folder: Path) -> int:
    return CheckpointStore(str(folder / "checkpoints")).manifests()[-1].info.step


def goes_on(folder: Path, workers: int, **changes) -> str:
    config = settings(folder, workers, resume="auto", **changes)
    return fit(config, [Gates(folder, [])]).state_hash


@pytest.mark.parametrize(("later", "care"), [(3, True), (1, False)])
def test_steps_that_no_supervisor_heard_of_are_in_the_journal_after_a_resume(tmp_path, quiet, later, care):
    folder, gates = tmp_path / "run", tmp_path / "gates"
    with abandoned(folder, gates, 7, 14) as (process, others):
        at_gate(gates, 14, process)
        process.kill()
        workers = [pid for pid in workers_of(folder).values() if pid in others]
        with watch(workers) as leaving:
            lose_patience(folder)
            (gates / "open-14").touch()
            assert all_gone(leaving, 30)
    heard, saved = max(steps_of(folder)), saved_step(folder)
    assert heard < 14 <= saved < STEPS
    assert len(list((folder / "unheard").glob("*.jsonl"))) == 2
    assert goes_on(folder, later, fault_tolerance=paceline.FaultTolerance(enabled=care)) == quiet
    check_proved(folder)
    assert [event.step for event in of(events.RunResumed, folder)] == [saved]


def test_workers_that_came_to_the_end_unheard(tmp_path, quiet):
    folder, gates = tmp_path / "run", tmp_path / "gates"
    with abandoned(folder, gates, 7) as (process, others):
        process.kill()
        with watch([pid for pid in workers_of(folder).values() if pid in others]) as leaving:
            assert all_gone(leaving, 30)
    assert saved_step(folder) == STEPS
    assert goes_on(folder, 2) == quiet
    check_proved(folder)


def test_the_first_worker_is_killed_without_a_supervisor(tmp_path, quiet):
    """The other one tells the steps that the first one was to tell, and its save is the one that counts."""
    folder, gates = tmp_path / "run", tmp_path / "gates"
    with abandoned(folder, gates, 7, 14) as (process, _):
        at_gate(gates, 14, process)
        process.kill()
        first, second = (workers_of(folder)[rank] for rank in range(2))
        with watch([second]) as leaving:
            os.kill(first, signal.SIGKILL)
            (gates / "open-14").touch()
            assert all_gone(leaving, 30)
    assert saved_step(folder) == 14
    assert goes_on(folder, 2) == quiet
    check_proved(folder)


def test_a_supervisor_that_comes_back_too_late_starts_the_workers_again(tmp_path, quiet):
    """No failures are allowed here, and none is counted."""
    folder, gates = tmp_path / "run", tmp_path / "gates"
    with abandoned(folder, gates, 7, 14) as (process, _):
        at_gate(gates, 14, process)
        with watch(list(workers_of(folder).values())) as leaving:
            lose_patience(folder)
            (gates / "open-14").touch()
            assert all_gone(leaving, 30)
        saved = saved_step(folder)
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert out.strip() == quiet
    failed = of(events.WorkerFailed, folder)
    assert sorted((event.rank, event.cause) for event in failed) == [(0, "unattended"), (1, "unattended")]
    assert [event.step for event in of(events.RunResumed, folder)] == [saved]
    check_proved(folder)


def test_all_processes_are_killed_before_the_journal_has_what_is_saved(tmp_path, quiet):
    """The checkpoint holds the records of its last steps."""
    folder, gates = tmp_path / "run", tmp_path / "gates"
    with abandoned(folder, gates, 7, 21, patience=LONG) as (process, others):
        at_gate(gates, 21, process)
        kill(others)
    heard, saved = steps_of(folder)[-1], saved_step(folder)
    assert heard < 12 < saved
    assert goes_on(folder, 2) == quiet
    check_proved(folder)
    recalled = [e.step for e in of(events.StepCommitted, folder) if e.generation == events.RECALLED]
    assert recalled == list(range(heard + 1, saved + 1))


def test_all_processes_are_killed_while_the_supervisor_hangs(tmp_path, quiet):
    """It is there and its connections are open, but the journal has nothing of what it is told."""
    folder, gates = tmp_path / "run", tmp_path / "gates"
    with gated(folder, gates, 7, 21, patience=LONG) as process:
        supervisor = json.loads((folder / "control.json").read_text())["pid"]
        processes = family(process, folder)
        os.kill(supervisor, signal.SIGSTOP)
        (gates / "open-7").touch()
        # Before step 20 was saved all have waited for the version of step 16: it is there. That steps stay
        # unheard however long ago they were is tested with a clock, in tests/train/state/test_recorder.py.
        at_gate(gates, 21, process)
        kill(processes)
    heard, saved = steps_of(folder)[-1], saved_step(folder)
    assert heard < 12 < saved
    assert goes_on(folder, 2) == quiet
    check_proved(folder)


def test_a_start_does_not_wait_for_workers_that_have_nothing_yet(tmp_path, quiet):
    """They are being built, and would look for their supervisor for minutes."""
    folder, gates = tmp_path / "run", tmp_path / "gates"
    gates.mkdir()
    with program(folder, str(gates), str(LONG), "99", command=PROGRAM) as process:
        wait_for(lambda: len(list((folder / "logs").glob("phase-*"))) == 2)
        supervisor = json.loads((folder / "control.json").read_text())["pid"]
        for pid in (process.pid, supervisor):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        assert goes_on(folder, 2) == quiet
    check_proved(folder)


def test_a_run_that_is_started_again_while_its_workers_train_on(tmp_path, quiet, caplog):
    """They save and leave, although they would have waited for a supervisor for long."""
    folder, gates = tmp_path / "run", tmp_path / "gates"
    with abandoned(folder, gates, 7, 14, patience=LONG) as (process, others):
        at_gate(gates, 14, process)
        process.kill()
        process.wait()
        workers = sorted(pid for pid in workers_of(folder).values() if pid in others)
        with opened_when(lambda: (folder / "leave").exists(), gates / "open-14"):
            assert goes_on(folder, 2) == quiet
    check_proved(folder)
    assert (
        f"processes {workers[0]} and {workers[1]} of an earlier start of this run still run in {folder}"
        in caplog.text
    )
    assert of(events.RunResumed, folder)[0].step >= 14
    assert not (folder / "leave").exists()


def test_a_run_that_is_started_again_while_its_supervisor_ends_it(tmp_path, quiet):
    """Only the caller was killed: two supervisors would write one journal."""
    folder, gates = tmp_path / "run", tmp_path / "gates"
    with gated(folder, gates, 7, patience=LONG) as process:
        process.kill()
        process.wait()
        with opened_when(lambda: (folder / "leave").exists(), gates / "open-7"):
            assert goes_on(folder, 2) == quiet
    check_proved(folder)
    first, second = of(events.SupervisorStarted, folder)
    assert (first.attempt, second.attempt) == (1, 1)
    ended = [type(event) for event in journal_of(folder)].index(events.RunEnded)
    assert ended < journal_of(folder).index(second)


def test_an_earlier_start_that_does_not_leave_is_named(tmp_path, monkeypatch):
    folder, gates = tmp_path / "run", tmp_path / "gates"
    monkeypatch.setattr("paceline.frontends.run_preparation._LEAVE_SECONDS", 0.0)
    with abandoned(folder, gates, 7, 14, patience=LONG) as (process, _):
        at_gate(gates, 14, process)
        process.kill()
        process.wait()
        ranks = workers_of(folder)
        hasty = paceline.FaultTolerance(patience=0.5)
        with pytest.raises(paceline.UsageError, match=f"{ranks[0]}.* still run .* did not exit within"):
            goes_on(folder, 2, fault_tolerance=hasty)
        kill(list(ranks.values()))


def test_a_journal_that_a_crash_of_the_machine_cut_short_is_completed(tmp_path):
    """Without a supervisor, too."""
    folder = tmp_path / "run"
    off = paceline.FaultTolerance(enabled=False)
    digest = fit(settings(folder, 1, fault_tolerance=off)).state_hash
    file = folder / "journal.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    cut = next(
        n for n, line in enumerate(lines) if '"type":"step_committed"' in line and '"step":27,' in line
    )
    file.write_text("".join(lines[:cut]))
    assert steps_of(folder)[-1] == 26
    assert fit(settings(folder, 1, resume="auto", fault_tolerance=off)).state_hash == digest
    check_proved(folder)
