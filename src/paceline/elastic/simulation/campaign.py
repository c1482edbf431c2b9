"""Many schedules, one after the other or in several processes, and what came of them.

A schedule's seed is the first seed plus its number, so each can be run again by itself. Must not know how it
is shown.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import final

from paceline.core.errors import UsageError
from paceline.elastic.simulation.world import Outcome, run

_MOST_KEPT = 20


@final
@dataclass
class Campaign:
    """What a number of schedules added up to."""

    workers: int
    first_seed: int
    processes: int
    schedules: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    events: int = 0
    happened: int = 0
    decisions: int = 0
    views: int = 0
    virtual_seconds: float = 0.0
    finished: int = 0
    violations: int = 0
    interrupted: bool = False  # by ctrl-C, before all schedules were run
    faults: Counter[str] = field(default_factory=Counter)
    failing: list[Outcome] = field(default_factory=list)

    @property
    def per_minute(self) -> float:
        """Schedules per minute of wall time."""
        return 60 * self.schedules / self.seconds if self.seconds > 0 else 0.0

    @property
    def per_core_minute(self) -> float:
        """Schedules per minute of one core's time, whatever else the machine does."""
        return 60 * self.schedules / self.cpu_seconds if self.cpu_seconds > 0 else 0.0

    def add(self, outcome: Outcome) -> None:
        self.schedules += 1
        self.events += outcome.events
        self.happened += outcome.happened
        self.decisions += outcome.decisions
        self.views += outcome.views
        self.virtual_seconds += outcome.virtual_seconds
        self.finished += outcome.ok
        self.faults.update(fault.kind for fault in outcome.faults)
        if outcome.violations:
            self.violations += 1
            if len(self.failing) < _MOST_KEPT:
                self.failing.append(outcome)


def run_many(
    workers: int,
    schedules: int,
    seed: int,
    processes: int = 1,
    told: Callable[[Campaign], None] | None = None,
) -> Campaign:
    """Run so many schedules; `told` hears how far it is after each. Ctrl-C ends it with what there is."""
    if workers < 1 or schedules < 1 or processes < 1:
        raise UsageError(
            f"cannot simulate {schedules} schedules of {workers} workers in {processes} processes",
            remedy="give numbers of at least 1",
        )
    campaign = Campaign(workers, seed, processes)
    began = time.perf_counter()
    try:
        for outcome, cpu in _outcomes(workers, schedules, seed, processes):
            campaign.add(outcome)
            campaign.cpu_seconds += cpu
            campaign.seconds = time.perf_counter() - began
            if told is not None:
                told(campaign)
    except KeyboardInterrupt:
        campaign.interrupted = True
    return campaign


def _outcomes(workers: int, schedules: int, seed: int, processes: int) -> Iterator[tuple[Outcome, float]]:
    seeds = range(seed, seed + schedules)
    if processes == 1:
        for one in seeds:
            yield _timed(one, workers)
        return
    # Spawned, not forked: the caller may have threads.
    with ProcessPoolExecutor(processes, get_context("spawn"), _leave_ctrl_c_to_the_caller) as pool:
        # Small: after ctrl-C the chunks that were begun are waited for.
        chunk = max(1, min(10, schedules // (4 * processes), 400 // workers))
        try:
            yield from pool.map(_timed, seeds, [workers] * schedules, chunksize=chunk)
        finally:
            # What was not begun is not needed, whatever ended this; no process of it outlives the caller.
            pool.shutdown(wait=True, cancel_futures=True)


def _leave_ctrl_c_to_the_caller() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _timed(seed: int, workers: int) -> tuple[Outcome, float]:
    began = time.process_time()
    outcome = run(seed, workers)
    return outcome, time.process_time() - began
