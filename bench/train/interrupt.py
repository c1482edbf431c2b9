"""Ends a run from outside when its journal says that it has come to a step: by SIGTERM to its main process,
or by SIGKILL of every process it has. Must not know what the run trains.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import psutil

from paceline.core.errors import CommTimeoutError, UsageError
from paceline.train.stop_signals import STOPPED_EXIT_CODE

Manner = Literal["SIGTERM", "SIGKILL"]

PATIENCE_SECONDS = 120.0
ROOT = Path(__file__).parents[2]


def stop_at(command: Sequence[str], run_dir: Path, step: int, manner: Manner) -> int:
    """Starts `python -m command`, ends it once `step` is committed, and gives the newest committed step."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    journal = run_dir / "journal.jsonl"
    try:
        _wait_for_step(process, journal, step)
        if manner == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        else:
            _kill_all(process.pid)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        _kill_all(process.pid)
        process.communicate()
    if process.returncode == 0:
        raise UsageError(
            f"the run ended by itself before {manner} reached it at step {step}",
            remedy="stop it at an earlier step or give it more to do",
        )
    wanted = STOPPED_EXIT_CODE if manner == "SIGTERM" else -signal.SIGKILL
    if process.returncode != wanted:
        raise UsageError(f"the run ended with {process.returncode}, not {wanted}\n{errors[-2000:]}")
    return newest_step(journal)


def newest_step(journal: Path) -> int:
    """Of the journal's `step_committed` events; 0 when there is none yet."""
    if not journal.exists():
        return 0
    newest = 0
    for line in journal.read_bytes().split(b"\n")[:-1]:
        if b"step_committed" in line:
            newest = max(newest, int(json.loads(line)["step"]))
    return newest


def _wait_for_step(process: subprocess.Popen[str], journal: Path, step: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while newest_step(journal) < step:
        if process.poll() is not None:
            _, errors = process.communicate()
            raise UsageError(f"the run ended with {process.returncode} before step {step}\n{errors[-4000:]}")
        if time.monotonic() > deadline:
            raise CommTimeoutError(f"the run did not come to step {step} in {PATIENCE_SECONDS:.0f} s")
        time.sleep(0.001)


def _kill_all(pid: int) -> None:
    """The process and all its descendants; ends once none of them is left."""
    try:
        main = psutil.Process(pid)
        family = [main, *main.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family[1:], timeout=PATIENCE_SECONDS)
