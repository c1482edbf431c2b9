"""Workers whose supervisor stays away: they save and leave, and nothing of what they did is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.local.processes import all_gone, watch
from tests.frontends.gated_run import Gates
from tests.frontends.test_stopped_programs import family, program
from tests.train.small_run import STEPS, fit, journal_of, settings, steps_of, workers_of
from tests.waiting import wait_for
from typer.testing import CliRunner

import paceline
from paceline.checkpoint.store import CheckpointStore
from paceline.cli.main import app
from paceline.core import events

PATIENCE = 4.0  # on a busy machine, too, time enough to come from one gate to the next, or to the end
PROGRAM = [sys.executable, "-m", "tests.frontends.gated_run"]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory) -> str:
    """The hash of the run that nobody disturbs."""
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
def abandoned(folder: Path, gates: Path, *steps: int) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The program, stopped, with its supervisor killed while the workers are at the first gate; its family
    without the supervisor. The gate is open."""
    gates.mkdir()
    words = [str(gates), str(PATIENCE), ",".join(map(str, steps))]
    with program(folder, *words, command=PROGRAM) as process:
        at_gate(gates, steps[0], process)
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


def lose_patience() -> None:
    begun = time.monotonic()
    wait_for(lambda: time.monotonic() - begun > PATIENCE + 0.5)


def saved_step(folder: Path) -> int:
    return CheckpointStore(str(folder / "checkpoints")).manifests()[-1].info.step


def goes_on(folder: Path, workers: int, **changes) -> str:
    config = settings(folder, workers, resume="auto", **changes)
    return fit(config, [Gates(folder, [])]).state_hash


@pytest.mark.parametrize(("later", "care"), [(3, True), (1, False)])
def test_steps_that_nobody_heard_of_are_in_the_journal_after_a_resume(tmp_path, quiet, later, care):
    folder, gates = tmp_path / "run", tmp_path / "gates"
    with abandoned(folder, gates, 7, 14) as (process, others):
        at_gate(gates, 14, process)
        process.kill()
        workers = [pid for pid in workers_of(folder).values() if pid in others]
        with watch(workers) as leaving:
            lose_patience()
            (gates / "open-14").touch()
            assert all_gone(leaving, 30)
    heard, saved = steps_of(folder)[-1], saved_step(folder)
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


def test_the_first_worker_is_killed_while_nobody_looks(tmp_path, quiet):
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
            lose_patience()
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
