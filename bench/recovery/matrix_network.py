"""The case of the matrix that needs a network: a second host joins the run with one command, and is cut off.

The hosts are network namespaces with real interfaces; their packets vanish, nothing is refused. Must not
know how the outcome is judged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.recovery.matrix_cases import RANK
from bench.recovery.matrix_run import BIND
from paceline.control import supervisor_address
from paceline.core import events, journal
from paceline.core.events import Event
from paceline.testing import netns

_ROOT = Path(__file__).parents[2]
_LOOK_SECONDS = 0.05
_STEPS_TOGETHER = 3


def why_not() -> str:
    return netns.why_not()


def run(folder: Path, seconds: float) -> dict[str, Any]:
    """One run: `RANK` workers on the first host, one more on the second, which is then cut off."""
    deadline = time.monotonic() + seconds
    with netns.Hosts(2) as hosts, (folder / "output.log").open("wb") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", BIND: hosts.addresses[0]}

        def start(host: int, *command: str) -> subprocess.Popen[bytes]:
            return hosts.start(
                host,
                [sys.executable, "-m", *command],
                env=environment,
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

        training = start(0, "bench.recovery.matrix_run", str(folder), "partition of one host")
        run_folder = folder / "run"
        if _wait(deadline, training, lambda: (run_folder / supervisor_address.ADDRESS_FILE).exists()):
            found = supervisor_address.read(run_folder)
            token = str(run_folder / supervisor_address.SECRET_FILE)
            where = f"{found.host}:{found.port}"
            start(1, "paceline", "join", where, "--workers", "1", "--token-file", token)
        if _wait(deadline, training, lambda: _trained_together(_read(run_folder))):
            hosts.cut(1)
        _wait(deadline, training, lambda: False)
    file = folder / "outcome.json"
    return dict(json.loads(file.read_text())) if file.exists() else {"hash": None, "error": "no outcome"}


def _wait(deadline: float, training: subprocess.Popen[bytes], condition: Callable[[], bool]) -> bool:
    """Whether it came true before the training ended and the time was over."""
    while training.poll() is None and time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def _trained_together(told: Sequence[Event]) -> bool:
    """Whether the guest has been a member for some steps."""
    joined = [e.step for e in told if isinstance(e, events.ViewChanged) and RANK in e.members]
    steps = [e.step for e in told if isinstance(e, events.StepCommitted)]
    return bool(joined and steps) and steps[-1] >= joined[0] + _STEPS_TOGETHER


def _read(run_folder: Path) -> Sequence[Event]:
    file = run_folder / "journal.jsonl"
    return journal.read(file).events if file.exists() else ()
