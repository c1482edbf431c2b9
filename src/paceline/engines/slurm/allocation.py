"""The allocation that this process runs in, from the variables that SLURM sets in every job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

_COUNT: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@final
@dataclass(frozen=True)
class Allocation:
    """A job of SLURM that this process is part of."""

    job: str
    nodes: str
    node_count: int
    cpus_per_node: tuple[int, ...]
    tasks_per_node: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Allocation | None:
        """Return the allocation of this process; None outside of one."""
        job = environment.get("SLURM_JOB_ID", "")
        nodes = environment.get("SLURM_JOB_NODELIST", "")
        if not job or not nodes:
            return None
        cpus = _counts(environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
        tasks = environment.get("SLURM_NTASKS_PER_NODE", "")
        if not tasks.isdigit():
            # srun -n 8 -N 4 sets only the number for each node: 2(x4).
            tasks = str(max(_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", "")), default=1))
        count = environment.get("SLURM_JOB_NUM_NODES", "")
        return cls(job, nodes, int(count) if count.isdigit() else max(1, len(cpus)), cpus, max(1, int(tasks)))

    def cpus_of(self, index: int) -> int:
        """Return the processors of the allocation on its host of this index; 0 where SLURM did not say."""
        return self.cpus_per_node[index] if index < len(self.cpus_per_node) else 0


@final
@dataclass(frozen=True)
class StepTask:
    """This process is one of several that one srun started with the same command."""

    job: str
    step: str
    rank: int
    size: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> StepTask | None:
        """Return which task of its step this process is; None where it is the only one, or in no step."""
        job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "")
        rank, size = environment.get("SLURM_PROCID", ""), environment.get("SLURM_STEP_NUM_TASKS", "")
        if not (job and step.isdigit() and rank.isdigit() and size.isdigit()) or int(size) < 2:
            return None
        return cls(job, step, int(rank), int(size))


def _counts(text: str) -> tuple[int, ...]:
    """Return the numbers of "4(x2),8"."""
    return tuple(
        int(number) for number, times in _COUNT.findall(text) for _ in range(int(times) if times else 1)
    )
