"""What the processes of a run hold, sampled while it goes on: memory, descriptors, threads, bytes on disk.

Read from /proc, from outside. Workers come and go, and one that a fault lets fill its memory is no growth of
the others: theirs is the median over those that live. Must not know what disturbs the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import psutil


@dataclass(frozen=True)
class Vital:
    """One process, or the median over several."""

    rss: float
    descriptors: float
    threads: float


@dataclass(frozen=True)
class Sample:
    """One look at a run. `step` is the newest committed."""

    seconds: float
    step: int
    caller: Vital | None
    supervisor: Vital | None
    workers: Vital | None
    processes: int
    journal: int
    events: int
    disk: int


def vital(pid: int) -> Vital | None:
    """What the process holds; None when it is gone. Memory that is shared with the processes it was forked
    from counts only as far as it is the process's own."""
    try:
        process = psutil.Process(pid)
        memory = process.memory_full_info()
        return Vital(memory.uss, process.num_fds(), process.num_threads())
    except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError):
        return None


def typical(vitals: Sequence[Vital | None]) -> Vital | None:
    there = [one for one in vitals if one is not None]
    if not there:
        return None
    return Vital(
        median(one.rss for one in there),
        median(one.descriptors for one in there),
        median(one.threads for one in there),
    )


def slope(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float:
    """Growth a minute, of the line through the samples that have the value (least squares)."""
    points = [(sample.seconds, found) for sample in samples if (found := value(sample)) is not None]
    if len(points) < 2:
        return 0.0
    middle = sum(x for x, _ in points) / len(points)
    level = sum(y for _, y in points) / len(points)
    spread = sum((x - middle) ** 2 for x, _ in points)
    if spread == 0.0:
        return 0.0
    return 60.0 * sum((x - middle) * (y - level) for x, y in points) / spread
