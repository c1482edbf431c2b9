"""Runs that train, in a queue whose server and processes are killed: the same bits as undisturbed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.frontends.gated_run import Gates
from tests.train.small_run import STEPS, fit, journal_of, settings, steps_of
from tests.waiting import wait_for

from paceline.core.errors import PacelineError
from paceline.core.events import RunEnded, ViewChanged
from paceline.core.journal import iterate
from paceline.frontends.run_queue import queue_client, run_observation
from paceline.frontends.run_queue.queue_folder import QueueFolder
from paceline.frontends.run_queue.queued_run import QueuedRun
from paceline.monitor.audit import audit

ROOT = Path(__file__).parents[3]
SECONDS = 150.0

SCRIPT = """
import sys
from pathlib import Path
from tests.frontends.gated_run import Gates
from tests.train.small_run import fit, settings

if __name__ == "__main__":
    gates, *steps = sys.argv[1:]
    # The folder and the number of workers are those that the queue gives.
    history = fit(settings(Path("unused"), 1), [Gates(Path(gates), [int(step) for step in steps])])
    print(history.state_hash)
"""


class TrainingQueue:
    """A queue, served by a process of its own, with runs that wait at gates."""

    def __init__(self, place: Path, capacity: int) -> None:
        self.place, self.capacity = place, capacity
        self.folder = QueueFolder.at(str(place / "queue"))
        (place / "train.py").write_text(SCRIPT)
        self.server: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        with open(self.place / "server.log", "ab") as log:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "paceline", "queue", "serve", "--workers", str(self.capacity),
                 "--queue", str(self.folder.path)],
                cwd=self.place, env=self._environment, stdout=log, stderr=log,
            )  # fmt: skip
        wait_for(lambda: self.folder.is_served, "the server did not start", SECONDS)

    def kill_server(self) -> None:
        assert self.server is not None
        self.server.kill()
        self.server.wait()

    @property
    def _environment(self) -> dict[str, str]:
        paths = [str(ROOT / "src"), str(ROOT)]
        return {**os.environ, "PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1"}

    def add(self, name: str, workers: str, *steps: int, priority: int = 0) -> str:
        """A run that waits at these steps for its gates; return its name."""
        (self.place / name).mkdir()
        words = [
            "--name",
            name,
            "--workers",
            workers,
            "--priority",
            str(priority),
            "--run-dir",
            f"runs/{name}",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "queue", "add", "train.py", *words, "--no-server",
             "--queue", str(self.folder.path), "--", name, *map(str, steps)],
            cwd=self.place, env=self._environment, text=True, capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return name

    def run(self, name: str) -> QueuedRun:
        return queue_client.find_run(self.folder.read(), name)

    def run_dir(self, name: str) -> Path:
        return self.place / "runs" / name

    def at_gate(self, name: str, step: int) -> None:
        self.until(lambda: bool([*(self.place / name).glob(f"at-{step}-*")]), f"{name} is not at step {step}")

    def open_gate(self, name: str, step: int) -> None:
        (self.place / name / f"open-{step}").touch()

    def until_state(self, name: str, state: str) -> None:
        self.until(lambda: self.run(name).state == state, f"{name} is not {state}")

    def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            wait_for(condition, what, SECONDS)
        except TimeoutError:
            runs = [(run.request.name, run.state, run.reason, run.tail) for run in self.folder.read().runs]
            raise AssertionError(f"{what}: {runs}") from None

    def process(self, name: str) -> int:
        """The process of a run that calls `fit`."""
        group = run_observation.process_group(self.folder, self.run(name))
        assert group is not None
        return int(Path(f"/proc/{group}/task/{group}/children").read_text().split()[0])


@contextlib.contextmanager
def training(place: Path, capacity: int) -> Iterator[TrainingQueue]:
    """No process is left in the end, however it ends."""
    queue = TrainingQueue(place, capacity)
    queue.serve()
    try:
        yield queue
    finally:
        for run in queue.folder.read().runs:
            with contextlib.suppress(PacelineError):
                queue_client.want(queue.folder, str(run.id), "kill")
        wait_for(lambda: not queue.folder.read().has_work, "runs are left", SECONDS)
        assert queue.server is not None
        queue.server.send_signal(signal.SIGTERM)
        assert queue.server.wait(60) == 0


def check_undisturbed(folder: Path, expected: str) -> None:
    """The bits of a run that nothing happened to; each step and each sample counted once."""
    end = [event for event in journal_of(folder) if isinstance(event, RunEnded)][-1]
    assert (end.reason, end.step, end.hash) == ("finished", STEPS, expected)
    assert audit(journal_of(folder)).wrong == ()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The hash of the same run in one process, with nothing in its way."""
    place = tmp_path_factory.mktemp("undisturbed")
    gates = place / "gates"
    gates.mkdir()
    for step in (5, 12):
        (gates / f"open-{step}").touch()
    return fit(settings(place / "run", 1), [Gates(gates, [5, 12])]).state_hash


@pytest.mark.timeout(600)
def test_preempted_and_killed_runs_leave_no_trace(tmp_path, expected):
    with training(tmp_path, capacity=2) as queue:
        low = queue.add("low", "1-2", 5, 12)
        queue.at_gate(low, 5)
        # Both workers are needed: the run is stopped at the end of its step, and nothing is lost.
        high = queue.add("high", "2", 5, 12, priority=5)
        queue.until_state(low, "stopping")
        queue.open_gate(low, 5)
        queue.until_state(low, "waiting")
        assert queue.run(low).code == 75
        stopped = steps_of(queue.run_dir(low))
        assert stopped == list(range(1, len(stopped) + 1))
        assert queue.run(low).reason == f"saved after step {len(stopped)}: run 2 of priority 5 gets workers"

        # The server is killed; the run that trains does not notice, and ends while there is none.
        queue.at_gate(high, 5)
        queue.kill_server()
        assert not queue.folder.is_served
        queue.open_gate(high, 5)
        queue.open_gate(high, 12)
        queue.until(lambda: run_observation.exit_code(queue.folder, queue.run(high)) == 0, "high has no end")
        assert queue.run(high).state == "running"
        queue.serve()
        queue.until_state(high, "finished")
        assert queue.run(high).attempt == 1
        check_undisturbed(queue.run_dir(high), expected)

        # The run continues; its process is killed, and it continues again.
        queue.at_gate(low, 12)
        assert queue.run(low).workers == 2
        assert steps_of(queue.run_dir(low))[: len(stopped) + 1] == list(range(1, len(stopped) + 2))
        os.kill(queue.process(low), signal.SIGKILL)
        queue.open_gate(low, 12)
        queue.until_state(low, "finished")
        assert queue.run(low).attempt == 3
        check_undisturbed(queue.run_dir(low), expected)


@pytest.mark.timeout(600)
def test_runs_shrink_and_grow_at_step_boundaries(tmp_path, expected):
    with training(tmp_path, capacity=2) as queue:
        first = queue.add("first", "1-2", 5, 12)
        queue.at_gate(first, 5)
        assert _members(queue.run_dir(first)) == [2]
        second = queue.add("second", "1", 5, 12, priority=5)
        queue.until(lambda: queue.run(first).workers == 1, "it was not told to shrink")
        assert queue.run(second).state == "waiting"  # its worker is not free yet
        queue.open_gate(first, 5)
        queue.until_state(second, "running")
        queue.at_gate(first, 12)
        assert _members(queue.run_dir(first)) == [2, 1]
        for step in (5, 12):
            queue.open_gate(second, step)
        queue.until_state(second, "finished")
        queue.until(lambda: queue.run(first).workers == 2, "it was not told to grow")
        queue.until(
            lambda: run_observation.workers_now(queue.run_dir(first)) == 2, "the second worker did not come"
        )
        queue.open_gate(first, 12)
        queue.until_state(first, "finished")
        assert queue.run(first).attempt == queue.run(second).attempt == 1
        for name in (first, second):
            check_undisturbed(queue.run_dir(name), expected)


def _members(folder: Path) -> list[int]:
    """How many members each view had."""
    views = [event for event in iterate(folder / "journal.jsonl") if isinstance(event, ViewChanged)]
    return [len(view.members) for view in views]
