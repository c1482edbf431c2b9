"""Run a command; have SLURM queue this job again where a signal made it save and leave.

    python -m paceline.engines.slurm.requeue_on_signal COMMAND ...

SLURM sends SIGTERM before the time limit (`--signal=TERM@60`) and before a preemption, to every process of a
step: so the command has got it too, saves, and ends with code 75. A command that ends with 75 and without a
signal was stopped by a person (`paceline stop`) and is not started again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Final

from paceline.core.errors import PacelineError
from paceline.engines.slurm import slurm_commands as commands

_STOPPED_EXIT_CODE: Final = 75  # train.stop_signals.STOPPED_EXIT_CODE, which is not for engines to import
_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)
_KILLED_SECONDS: Final = 120.0  # within which SLURM ends a step that it has queued again


def run(command: list[str]) -> int:
    """Run the command to its end; return its exit code."""
    got: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        got.append(number)

    for number in _SIGNALS:
        signal.signal(number, note)
    code = subprocess.Popen(command).wait()
    if code != _STOPPED_EXIT_CODE or not got:
        return 128 - code if code < 0 else code
    return _requeue(signal.Signals(got[0]).name)


def _requeue(why: str) -> int:
    job = os.environ.get("SLURM_ARRAY_JOB_ID", "") and (
        f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    )
    job = job or os.environ["SLURM_JOB_ID"]
    try:
        commands.call(["scontrol", "requeue", job])
    except PacelineError as error:
        print(
            f"the run has saved after {why}; job {job} is not queued again: {error.message}", file=sys.stderr
        )
        return _STOPPED_EXIT_CODE
    print(f"the run has saved after {why}; job {job} is queued again and goes on from there", flush=True)
    time.sleep(_KILLED_SECONDS)  # SLURM ends this step now
    return _STOPPED_EXIT_CODE


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
