"""Training programs as processes, and the processes that belong to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.train.small_run import steps_of, workers_of
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]

PROGRAM = [sys.executable, "-m", "tests.train.small_run"]


@contextlib.contextmanager
def program(folder: Path, *words: str, command: list[str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process group of its own, and no process left of it however the test ends."""
    process = subprocess.Popen(
        [*(command or PROGRAM), str(folder), *words],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process that outlives it has its pipes: a test that leaves one behind fails, and does not hang.
        process.communicate(timeout=60)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    wait_for(lambda: process.poll() is not None or max(steps_of(folder), default=0) >= step)
    assert process.poll() is None, process.communicate()[1]


def family(process: subprocess.Popen[str], folder: Path) -> list[int]:
    """The program, its fork server, its supervisor and its workers."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [process.pid, *map(int, children), *workers_of(folder).values()]
