"""The main process of a batch job: run a command, have it save and leave when SLURM wants the nodes back, and
have SLURM queue the job again.

    python -m paceline.engines.slurm.requeue_on_signal COMMAND ...

SLURM announces the time limit to the batch shell (`--signal=B:TERM@60`), in whose place this process runs,
and a preemption to the job's steps: so a step that does nothing waits for it. Both become one SIGTERM to the
command. A command that ends with code 75 (it has saved) after that is queued again; one that ends so without
a signal was stopped by a person (`paceline stop`), and is not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Final, final

from paceline.control.spool import STOPPED_EXIT_CODE
from paceline.core.errors import PacelineError
from paceline.engines.slurm import slurm_commands as commands
from paceline.engines.slurm.step_command import SRUN

SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
_LOOK_SECONDS: Final = 0.1
_SIGNALLED: Final = tuple(128 + number for number in SIGNALS)  # codes of an srun whose task a signal ended
_KILLED_SECONDS: Final = 120.0  # within which SLURM ends a job that it has queued again


@final
class _RequeuedCommand:
    """A command, and the first signal that it was sent."""

    def __init__(self, command: list[str]) -> None:
        self.got: int | None = None
        self._pending: int | None = None
        for number in SIGNALS:
            signal.signal(number, self._note)
        self._process = subprocess.Popen(command)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending = number

    def wait(self, waiting_step: subprocess.Popen[bytes]) -> int:
        """Wait for the command's end; pass on the first signal that comes meanwhile, here or to the step."""
        while self._process.poll() is None:
            if waiting_step.poll() in _SIGNALLED:
                self._pending = self._pending or signal.SIGTERM
            if self._pending is not None and self.got is None:
                self.got = self._pending
                # Once: a second signal would end the command before it has saved.
                self._process.send_signal(signal.SIGTERM)
            time.sleep(_LOOK_SECONDS)
        return self._process.returncode


def run(command: list[str]) -> int:
    """Run the command to its end; return its exit code."""
    running = _RequeuedCommand(command)
    with _waiting_step() as waiting_step:
        try:
            code = running.wait(waiting_step)
        finally:
            waiting_step.terminate()
    if code == STOPPED_EXIT_CODE and running.got is not None:
        return _requeue(signal.Signals(running.got).name)
    return 128 - code if code < 0 else code


def _waiting_step() -> subprocess.Popen[bytes]:
    """Start a step on this node that does nothing, and that a signal of SLURM to the job's steps ends."""
    where = [f"--nodelist={name}"] if (name := os.environ.get("SLURMD_NODENAME", "")) else []
    # Without `--gres=none` SLURM asks this node for the GPUs of the whole job.
    command = [*SRUN, "--quiet", *where, "--gres=none", "--input=none"]
    # One process, without a shell around it: a child of the task would outlive it and keep srun waiting.
    command += ["--job-name=paceline-signals", "sleep", "infinity"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _requeue(why: str) -> int:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID", ""), os.environ.get("SLURM_ARRAY_TASK_ID", "")
    job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
    try:
        commands.call(["scontrol", "requeue", job])
    except PacelineError as error:
        print(
            f"the run has saved after {why}; job {job} is not queued again: {error.message}", file=sys.stderr
        )
        return STOPPED_EXIT_CODE
    print(f"the run has saved after {why}; job {job} is queued again and goes on from there", flush=True)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    time.sleep(_KILLED_SECONDS)  # SLURM ends this job now
    return STOPPED_EXIT_CODE


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
