"""Liveness by the process: an interpreter that is held, workers that one hand stops, and who is named."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.elastic.outside_programs import JOIN, script
from tests.elastic.supervised_jobs import Run, drop, running
from tests.waiting import wait_for

from paceline.core.events import Note, SupervisorStarted, Verdict, ViewChanged, WorkerFailed
from paceline.elastic.supervisor.process_probe import kernel_state
from paceline.elastic.supervisor.supervisor_recovery import STATE_FILE

STOPPED_SECONDS = 3.5  # longer than the 2 s after which silence is judged


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def let_pass(run: Run, seconds: float) -> None:
    """As a caller waits; the fault itself takes this long."""
    outcome = run.supervised.wait(seconds)
    assert outcome is None, f"the job ended: {outcome}"


def test_a_call_that_holds_the_interpreters_lock_is_not_silence(tmp_path):
    with running(tmp_path, steps=10**6, grip_at=[2, 20, 4.0]) as run:
        run.until((tmp_path / "let-go").exists)
        run.until_step(run.steps[-1] + 20)
        run.supervised.stop("seen")
        assert drop(run.finish()).ok
    assert not run.of(WorkerFailed)
    assert len(run.of(ViewChanged)) == 1


def test_a_held_interpreter_on_another_machine_is_asked_for_there(tmp_path):
    with running(tmp_path, workers=2, steps=10**6, shared=str(tmp_path), grip_at=[2, 0, 4.0]) as run:
        run.until_step(5)
        host, port = run.supervised.address
        with script(JOIN, host, port, tmp_path / "control.secret", 1, PACELINE_HOST="far") as agent:
            run.until((tmp_path / "let-go").exists)
            run.until_step(run.steps[-1] + 20)
            run.supervised.stop("seen")
            assert drop(run.finish()).ok
            assert agent.wait(20) == 0
    assert not run.of(WorkerFailed)


def test_one_that_hangs_with_the_lock_held_is_named_with_phase_and_line(tmp_path):
    with running(tmp_path, steps=60, grip_at=[0, 20, 0], machine={"hang_least": 3.0}) as run:
        run.until(lambda: run.of(Verdict))
        assert drop(run.finish()).ok
    (verdict,) = run.of(Verdict)
    assert (verdict.rank, verdict.phase) == (0, "data")
    assert "a call holds the interpreter's lock" in verdict.text
    assert "_grip_here" in verdict.line
    assert run.of(WorkerFailed)[0].cause == "hung"
    assert run.steps == list(range(1, 61))


def test_all_workers_that_one_hand_stops_and_lets_go_on_are_not_replaced(tmp_path):
    with running(tmp_path, steps=10**6, machine={"hang_least": 5.0}) as run:
        run.until_step(20)
        pids = list(run.pids().values())
        signal_all(pids, signal.SIGSTOP)
        let_pass(run, STOPPED_SECONDS)
        signal_all(pids, signal.SIGCONT)
        run.until_step(run.steps[-1] + 50)
        run.supervised.stop("seen")
        assert drop(run.finish()).ok
    assert not run.of(WorkerFailed)
    assert run.steps == list(range(1, len(run.steps) + 1))


class Freezer:
    """A control group whose processes can be stopped all at once, of the first version that can be made."""

    def __init__(self, name: str) -> None:
        self.why_not = "no control group with a freezer can be made here"
        for top, self._file, self._states in (
            ("unified", "cgroup.freeze", ("0", "1")),
            ("", "cgroup.freeze", ("0", "1")),
            ("freezer", "freezer.state", ("THAWED", "FROZEN")),
        ):
            self._group = Path("/sys/fs/cgroup", top, name)
            with suppress(OSError):
                self._group.mkdir()
                if (self._group / self._file).exists():
                    self.why_not = ""
                    return
                self._group.rmdir()

    def hold(self, pids: Iterable[int]) -> None:
        for pid in pids:
            (self._group / "cgroup.procs").write_text(str(pid))
        self._set(True)

    def _set(self, frozen: bool) -> None:
        (self._group / self._file).write_text(self._states[frozen])

    def let_go(self) -> None:
        self._set(False)

    def remove(self) -> None:
        """Once its processes have ended: they are the test's own."""

        def gone() -> bool:
            with suppress(OSError):
                self._group.rmdir()
            return not self._group.exists()

        if not self.why_not:
            self.let_go()
            wait_for(gone, "the control group is empty")


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    made = Freezer(f"paceline-test-{os.getpid()}")
    if made.why_not:
        pytest.skip(made.why_not)
    yield made
    made.remove()


def test_all_workers_that_a_freezer_holds_are_not_replaced(tmp_path, freezer):
    with running(tmp_path, steps=10**6, machine={"hang_least": 5.0}) as run:
        run.until_step(20)
        pids = list(run.pids().values())
        freezer.hold(pids)
        let_pass(run, STOPPED_SECONDS)
        assert [kernel_state(pid) for pid in pids] == ["the process is frozen (cgroup freezer)"] * len(pids)
        freezer.let_go()
        run.until_step(run.steps[-1] + 50)
        run.supervised.stop("seen")
        assert drop(run.finish()).ok
    assert not run.of(WorkerFailed)
    assert run.steps == list(range(1, len(run.steps) + 1))


def test_a_worker_that_a_freezer_holds_alone_is_named_and_replaced(tmp_path, freezer):
    with running(tmp_path, steps=10**6, machine={"hang_least": 5.0}) as run:
        run.until_step(20)
        pids = run.pids()
        freezer.hold([pids[2]])
        run.until(lambda: run.of(Verdict))
        freezer.let_go()  # what is frozen takes no signal, not even the one that ends it (version 1)
        run.supervised.stop("seen")
        assert drop(run.finish()).ok
    (verdict,) = run.of(Verdict)
    assert (verdict.rank, verdict.pid) == (2, pids[2])
    assert "cgroup freezer" in verdict.text


def test_the_one_that_stays_stopped_when_the_others_go_on_is_named(tmp_path):
    with running(tmp_path, steps=10**6, machine={"hang_least": 5.0}) as run:
        run.until_step(20)
        pids = run.pids()
        signal_all(list(pids.values()), signal.SIGSTOP)
        let_pass(run, STOPPED_SECONDS)
        signal_all([pids[0], pids[1]], signal.SIGCONT)
        run.until(lambda: run.of(Verdict))
        run.supervised.stop("seen")
        assert drop(run.finish()).ok
    (verdict,) = run.of(Verdict)
    assert (verdict.rank, verdict.pid) == (2, pids[2])
    assert "SIGSTOP" in verdict.text


@pytest.mark.parametrize("harm", ["removed", "halved", "emptied"])
def test_a_supervisor_whose_predecessors_memory_is_gone_says_so_and_goes_on(tmp_path, harm, capfd):
    with running(tmp_path, steps=10**6) as run:
        run.until_step(20)
        before = run.pids()
        os.kill(run.supervised.pid, signal.SIGSTOP)
        file = tmp_path / STATE_FILE
        if harm == "removed":
            file.unlink()
        else:
            whole = file.read_bytes()
            file.write_bytes(whole[: len(whole) // 2 if harm == "halved" else 0])
        os.kill(run.supervised.pid, signal.SIGKILL)
        run.until(lambda: len(run.of(SupervisorStarted)) == 2 and len(run.of(ViewChanged)) == 2)
        run.until_step(run.steps[-1] + 30)
        assert run.pids() == before
        run.supervised.stop("seen")
        assert drop(run.finish()).ok
    first, second = run.of(ViewChanged)
    assert second.generation > first.generation
    (note,) = [note for note in run.of(Note) if "supervisor before this one knew is lost" in note.text]
    assert str(file) in note.text
    assert note.text in capfd.readouterr().err
    assert not run.of(WorkerFailed)
    assert run.steps == list(range(1, len(run.steps) + 1))
