"""A queue of runs that train and wait at gates, served by a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.frontends.gated_run import Gates
from tests.train.small_run import STEPS, fit, journal_of, settings
from tests.waiting import wait_for

from paceline.core.errors import PacelineError
from paceline.core.events import RunEnded, ViewChanged
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
    """A queue, served by a process of its own, with runs that wait at gates. `options`: of `paceline train`,
    for all runs."""

    def __init__(self, place: Path, capacity: int, options: Sequence[str] = ()) -> None:
        self.place, self.capacity, self.options = place, capacity, options
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
        words = ["--name", name, "--workers", workers, "--run-dir", f"runs/{name}", *self.options]
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "queue", "add", "train.py", *words, "--no-server",
             "--priority", str(priority), "--queue", str(self.folder.path), "--", str(self.place / name),
             *map(str, steps)],
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
def training(place: Path, capacity: int, options: Sequence[str] = ()) -> Iterator[TrainingQueue]:
    """No process is left in the end, however it ends."""
    queue = TrainingQueue(place, capacity, options)
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


def undisturbed_hash(place: Path, *steps: int) -> str:
    """The hash of the same run in one process, with nothing in its way."""
    gates = place / "gates"
    gates.mkdir()
    for step in steps:
        (gates / f"open-{step}").touch()
    return fit(settings(place / "run", 1), [Gates(gates, list(steps))]).state_hash


def members(folder: Path) -> list[int]:
    """How many members each view had."""
    return [len(event.members) for event in journal_of(folder) if isinstance(event, ViewChanged)]
