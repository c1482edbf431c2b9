"""Functions that trials call, and a program that searches; gates are files in a folder of the test's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

import paceline


def quadratic(params: Mapping[str, Any]) -> float:
    return -float((params["x"] - 1.0) ** 2)


def killed_once(params: dict[str, Any], folder: Path, target: str = "self") -> float:
    """Have the first attempt of trial 2 end with its process, or with its fork server, and leave one."""
    mark = folder / "killed"
    if paceline.tune.folder().name == "0002" and not mark.exists():
        paceline.tune.report(0, 1000.0)
        mark.touch()
        child = subprocess.Popen(["sleep", "1000"])
        (folder / f"pid-2-{child.pid}").touch()
        os.kill(os.getpid() if target == "self" else os.getppid(), signal.SIGKILL)
        signal.pause()
    paceline.tune.report(0, params["x"])
    with open(folder / "calls", "a") as calls:
        calls.write(f"{paceline.tune.folder().name}\n")
    return quadratic(params)


def meeting(params: dict[str, Any], folder: Path, slots: int) -> float:
    """Wait until as many trials have come as run at once."""
    (folder / f"here-{os.getpid()}").touch()
    wait_for(lambda: len(list(folder.glob("here-*"))) >= slots, "the other trials did not come")
    return float(os.getpgid(0) == os.getpid() and os.getsid(0) == os.getpid())


def gated(params: dict[str, Any], folder: Path) -> float:
    """Trials from number 3 on leave their process id, start a process, and wait for a file `go`."""
    number = int(paceline.tune.folder().name)
    if number >= 3:
        child = subprocess.Popen(["sleep", "1000"])
        (folder / f"pid-{number}-{os.getpid()}-{child.pid}").touch()
        wait_for((folder / "go").exists, "the gate stayed closed")
        child.kill()
        child.wait()
    return quadratic(params)


PROGRAM = """
import functools, sys
from pathlib import Path
import paceline
from tests.frontends.tuner.trial_functions import gated

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    tuner = paceline.DistributedTuner(
        functools.partial(gated, folder=folder), {"x": paceline.tune.uniform(-3, 3)},
        num_gpus=2, seed=4, study=folder / "study",
    )
    tuner.tune(8, resume=True)
"""


def start_program(folder: Path) -> subprocess.Popen[str]:
    """Start a program that searches, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def pids_in(folder: Path) -> list[int]:
    """Processes that trials have named: their own and those that they started."""
    return [int(pid) for file in folder.glob("pid-*") for pid in file.name.split("-")[2:]]
