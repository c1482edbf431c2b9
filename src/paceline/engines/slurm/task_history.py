"""What became of a job that was handed over, or of each task of an array. SLURM's controller forgets every
task some minutes after its own end, so what was seen of it is remembered, and the accounting is asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, final

from paceline.core.errors import UnavailableError, UsageError
from paceline.engines.batch import BatchStatus
from paceline.engines.slurm import slurm_commands as commands
from paceline.engines.slurm.batch_jobs import combined, status_of
from paceline.engines.slurm.slurm_commands import JobRecord

_TASKS: Final = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


@final
class TaskHistory:
    """The last that was seen of each task of the jobs that were asked about; "" is the task of a job that is
    no array."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, BatchStatus]] = {}

    def status(self, identifier: str) -> BatchStatus:
        """Return what became of a job; of an array, the least finished of its tasks counts."""
        found = {record.task: status_of(record) for record in commands.records([identifier])}
        seen = self._seen.setdefault(identifier, {})
        seen.update(found)
        if "" in found or not all(status.is_over for status in found.values()):
            return combined([*found.values()])
        over = {task: status for task, status in seen.items() if status.is_over}
        # Tasks may have been forgotten before they were seen here.
        known = {**_accounted(identifier, over), **over}
        lost = BatchStatus("lost", None, f"SLURM has no record of job {identifier} any more")
        return combined([known.get(task, lost) for task in {**seen, **known}] or [lost])


def _accounted(identifier: str, over: Mapping[str, BatchStatus]) -> dict[str, BatchStatus]:
    """Return what the accounting says of each task. `over`: the tasks whose ends are known without it; with
    these, a cluster may have no accounting."""
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={identifier}"]
    try:
        lines = commands.call([*command, "--format=JobID,State,ExitCode"]).splitlines()
    except UsageError:
        return {}
    except UnavailableError:
        if over:
            return {}
        raise
    found: dict[str, BatchStatus] = {}
    for line in lines:
        name, state, code = line.split("|")[:3]
        number, signal = (int(part) for part in code.split(":"))
        job, _, tasks = name.partition("_")
        for task in tasks_in(tasks):
            # "CANCELLED by 1000"
            record = JobRecord(job, task, state.split()[0], "", "", number << 8 or signal)
            found[task] = status_of(record)
    return found


def tasks_in(text: str) -> list[str]:
    """Return the tasks in a text of sacct like "3" or "[0-8:2,11%4]"; [""] where there are none."""
    found: list[str] = []
    for first, last, step in _TASKS.findall(text.partition("%")[0]):
        found += [str(task) for task in range(int(first), int(last or first) + 1, int(step or 1))]
    return found or [""]
