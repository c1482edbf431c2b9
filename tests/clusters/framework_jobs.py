"""Jobs of other frameworks in the tests: started as users start them, killed from outside, read by their
journal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

from paceline.core import journal
from paceline.core.events import Event

BIN = Path(sys.executable).parent
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}


@contextmanager
def started(
    command: list[str], log: Path, variables: Mapping[str, str] = {}
) -> Iterator[subprocess.Popen[Any]]:
    """Start a job in a session of its own, with its output in a file; whatever is left of it is killed."""
    environment = {**os.environ, **_QUIET, **variables, "PATH": f"{BIN}:{os.environ['PATH']}"}
    with log.open("wb") as output:
        job = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def at_gate(gate: Path, job: subprocess.Popen[Any], log: Path, seconds: float) -> int:
    """Return the process of a job that has come to a gate, where it waits."""
    wait_for(lambda: job.poll() is not None or (gate.exists() and gate.read_text()), str(log), seconds)
    assert job.poll() is None, log.read_text(errors="replace")
    return int(gate.read_text())


def finished(job: subprocess.Popen[Any], log: Path, seconds: float) -> str:
    """Return the output of a job that ends well within that time."""
    code = job.wait(seconds)
    text = log.read_text(errors="replace")
    assert code == 0, text
    return text


def events_of(folder: Path, kind: type[Event]) -> list[Any]:
    return [event for event in journal.iterate(folder / "journal.jsonl") if isinstance(event, kind)]
