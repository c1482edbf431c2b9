"""A run that is handed over as a job of SLURM: how it is queued and stopped, what became of it, and what it
wrote."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from paceline.control.spool import STOPPED_EXIT_CODE
from paceline.core.errors import (
    CommTimeoutError,
    PacelineError,
    PlatformError,
    UnavailableError,
    UsageError,
)
from paceline.engines.batch import BatchState, BatchStatus
from paceline.engines.slurm import directives, slurm_commands as commands
from paceline.engines.slurm.job_agents import LOST_STATES, PENDING_STATES, RUNNING_STATES
from paceline.engines.slurm.slurm_commands import JobRecord

_STOPPED: Final = ("CANCELLED", "PREEMPTED", "TIMEOUT", "DEADLINE")


def submit(script: str, folder: str, options: Mapping[str, str]) -> str:
    """Queue a script that is to run in `folder`; return the number of its job. `options`: those that it has.
    Where SLURM's answer does not come, cancel what it may have queued."""
    with _written(script) as path:
        # As arguments too: SBATCH_PARTITION and the like win over the lines of a script.
        command = ["sbatch", "--parsable", *directives.arguments(options), f"--chdir={folder}", str(path)]
        try:
            return commands.call(command, options=options).strip().split(";")[0]
        except (UnavailableError, CommTimeoutError) as error:
            error.add_note(_cancel_unanswered(path))
            raise
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_cancel_unanswered(path)) from None


@contextmanager
def _written(script: str) -> Iterator[Path]:
    """Write a script to a file whose path no other job has: SLURM shows it as the job's command."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(TemporaryDirectory(prefix="paceline-"))
            path = Path(folder, "run.sh")
            path.write_text(script)
        except OSError as error:
            raise PlatformError(
                f"the batch script cannot be written: {error.strerror}",
                remedy="make room in the folder for temporary files, or name another one with TMPDIR",
            ) from error
        yield path


def _cancel_unanswered(path: Path) -> str:
    """Cancel the job of a request that was not answered; return what is known of it."""
    known = "it is not in the queue now"
    try:
        if jobs := commands.jobs_in(path.parent, "Command"):
            for job in jobs:
                commands.cancel(job)
            return f"job {', '.join(jobs)} was queued all the same, and is cancelled"
    except PacelineError:
        known = "whether it is queued is not known"
    look = f"squeue --me --format='%i %o' | grep {path.parent}"
    return f"{known}; `{look}` shows its number once it is, and scancel ends it"


def status_of(record: JobRecord) -> BatchStatus:
    """Return what became of one job, or of one task of an array."""
    reason = "" if record.reason == "None" else record.reason
    if record.state in PENDING_STATES:
        return BatchStatus("pending", None, reason)
    if record.state in RUNNING_STATES or record.state == "COMPLETING":
        return BatchStatus("running", None, record.nodes)
    if record.state in LOST_STATES:
        return BatchStatus("lost", None, record.state)
    code = os.waitstatus_to_exitcode(record.status)
    return BatchStatus(_ended(record.state, code), code, record.state)


def _ended(state: str, code: int) -> BatchState:
    if code == STOPPED_EXIT_CODE or state in _STOPPED:
        return "stopped"
    return "succeeded" if state == "COMPLETED" and code == 0 else "failed"


def combined(found: Sequence[BatchStatus]) -> BatchStatus:
    """Return the status of all tasks together: the first of these that any of them has."""
    for state in ("running", "pending", "lost", "failed", "stopped"):
        for one in found:
            if one.state == state:
                return one
    return found[0]


def log_reader(identifier: str) -> Callable[[], dict[str, str]]:
    """Return a function that returns what a job, or each task of an array, wrote so far, by the name of its
    file: also once SLURM has forgotten the job."""
    paths: list[str] = []

    def read() -> dict[str, str]:
        nonlocal paths
        with suppress(UsageError):
            paths = output_files(commands.call(["scontrol", "--oneliner", "show", "job", identifier]))
        texts: dict[str, str] = {}
        for path in paths:
            with suppress(OSError):  # it has not begun, or its file server is away
                texts[path] = Path(path).read_text(errors="replace")
        return texts

    return read


def output_files(text: str) -> list[str]:
    """Return the files of standard output in what `scontrol --oneliner show job` says; a path may have
    spaces."""
    return re.findall(r" StdOut=(.+?)(?= [A-Za-z]\w*=|$)", text, re.MULTILINE)


def stop(identifier: str) -> None:
    """Have a job save and leave, and not be queued again; one that has not begun is taken off the queue."""
    found = commands.records([identifier])
    if all(status_of(record).is_over for record in found):
        return
    with suppress(UsageError):  # of an array some tasks may be over
        commands.call(["scontrol", "update", f"JobId={identifier}", "Requeue=0"])
    for record in found:
        name = f"{record.job}_{record.task}" if record.task else identifier
        if record.state in PENDING_STATES:
            commands.cancel(name)
        elif record.state in RUNNING_STATES:
            commands.cancel(name, signal="TERM", batch=True)
