"""Schedules of faults: one, or many, one after the other or in several processes, and what came of them.

`run(seed, workers)` is a function of its arguments alone. A schedule's seed is the first seed plus its
number, so that each can be run again by itself.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from random import Random
from typing import final

from paceline.core.errors import UsageError
from paceline.core.wording import counted
from paceline.elastic.machine.machine_events import SupervisorBegan
from paceline.elastic.simulation import run_plan, simulated_faults
from paceline.elastic.simulation.simulated_faults import ScheduledFault
from paceline.elastic.simulation.world import World

MAX_EVENTS = 3_000_000
_MOST_KEPT = 20


@final
@dataclass(frozen=True)
class ScheduleOutcome:
    """Outcome of a schedule. `digest` is over all steps of the machine: equal seeds, equal digests."""

    seed: int
    workers: int
    faults: tuple[ScheduledFault, ...]
    violations: tuple[str, ...]
    ended: str
    ok: bool
    events: int
    happened: int
    decisions: int
    views: int
    virtual_seconds: float
    digest: int


def run(
    seed: int,
    workers: int,
    tracer: Callable[[str], None] | None = None,
    check_invariants: bool = True,
    *,
    nodes: int = 0,
) -> ScheduleOutcome:
    """Run one schedule from beginning to end. `nodes`: all workers come with the agents of an engine, which
    replaces agents that are lost."""
    draw = Random(f"{seed}:{workers}:schedule")
    plan = run_plan.drawn(draw, seed, workers)
    if nodes:
        plan = run_plan.on_engine(plan, nodes)
    schedule = simulated_faults.drawn(draw, workers)
    lasts = not any(fault.kind.startswith("supervisor") for fault in schedule)
    rng = Random(f"{seed}:{workers}:world")
    world = World(plan, rng, tracer, check_invariants=check_invariants, supervisor_lasts=lasts)
    world.note(f"{plan}")
    for fault in schedule:
        world.note(f"fault {fault}")
        world.time.at(fault.at, simulated_faults.apply, world, fault)
    quiet = max([0.0, *(fault.over_by for fault in schedule)])
    world.time.at(quiet + world.patience, world.must_have_moved, quiet)
    world.supervisor.begin(SupervisorBegan())
    for _ in range(plan.nodes):
        world.time.after(plan.boot_seconds, simulated_faults.start_agent, world)
    if not world.time.run(MAX_EVENTS):
        many = world.time.happened >= MAX_EVENTS
        why = "the job does not end" if many else "nothing is left to happen and the job has not ended"
        world.invariants.violation(why)
    end = world.supervisor.end
    if end is not None:
        world.check_end(end)
    return ScheduleOutcome(
        seed=seed,
        workers=workers,
        faults=schedule,
        violations=tuple(world.invariants.violations),
        ended=end.reason if end is not None else "",
        ok=end is not None and end.ok,
        events=world.supervisor.events,
        happened=world.time.happened,
        decisions=world.supervisor.decisions,
        views=world.supervisor.actions["InstallView"],
        virtual_seconds=world.time.now,
        digest=world.supervisor.digest,
    )


@final
@dataclass
class Campaign:
    """Totals of a number of schedules."""

    workers: int
    first_seed: int
    processes: int
    schedules: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    events: int = 0
    decisions: int = 0
    views: int = 0
    virtual_seconds: float = 0.0
    finished: int = 0
    violations: int = 0
    interrupted: bool = False  # by ctrl-C, before all schedules were run
    faults: Counter[str] = field(default_factory=Counter)
    failing: list[ScheduleOutcome] = field(default_factory=list)

    @property
    def per_minute(self) -> float:
        """Schedules per minute of wall time."""
        return 60 * self.schedules / self.seconds if self.seconds > 0 else 0.0

    @property
    def per_core_minute(self) -> float:
        """Schedules per minute of one core's time, whatever else the host does."""
        return 60 * self.schedules / self.cpu_seconds if self.cpu_seconds > 0 else 0.0

    def add(self, outcome: ScheduleOutcome) -> None:
        self.schedules += 1
        self.events += outcome.events
        self.decisions += outcome.decisions
        self.views += outcome.views
        self.virtual_seconds += outcome.virtual_seconds
        self.finished += outcome.ok
        self.faults.update(fault.kind for fault in outcome.faults)
        if outcome.violations:
            self.violations += 1
            if len(self.failing) < _MOST_KEPT:
                self.failing.append(outcome)


def run_schedules(
    workers: int,
    schedules: int,
    seed: int,
    processes: int = 1,
    progress: Callable[[Campaign], None] | None = None,
) -> Campaign:
    """Run this number of schedules; call `progress` after each. Ctrl-C ends it with what there is."""
    if workers < 1 or schedules < 1 or processes < 1:
        raise UsageError(
            f"cannot simulate {counted(schedules, 'schedule')} of {counted(workers, 'worker')} in "
            f"{processes} process{'' if processes == 1 else 'es'}",
            remedy="give numbers of at least 1",
        )
    campaign = Campaign(workers, seed, processes)
    began = time.perf_counter()
    try:
        for outcome, cpu in _outcomes(workers, schedules, seed, processes):
            campaign.add(outcome)
            campaign.cpu_seconds += cpu
            campaign.seconds = time.perf_counter() - began
            if progress is not None:
                progress(campaign)
    except KeyboardInterrupt:
        campaign.interrupted = True
    return campaign


def _outcomes(
    workers: int, schedules: int, seed: int, processes: int
) -> Iterator[tuple[ScheduleOutcome, float]]:
    seeds = range(seed, seed + schedules)
    if processes == 1:
        for one in seeds:
            yield _timed(one, workers)
        return
    # Spawned, not forked: the caller may have threads. Ctrl-C is left to the caller.
    with ProcessPoolExecutor(
        processes, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN)
    ) as pool:
        # Small: after ctrl-C the chunks that were begun are waited for.
        chunk = max(1, min(10, schedules // (4 * processes), 400 // workers))
        try:
            yield from pool.map(_timed, seeds, [workers] * schedules, chunksize=chunk)
        finally:
            # What was not begun is not needed, whatever ended this; no process of it outlives the caller.
            pool.shutdown(wait=True, cancel_futures=True)


def _timed(seed: int, workers: int) -> tuple[ScheduleOutcome, float]:
    began = time.process_time()
    outcome = run(seed, workers)
    return outcome, time.process_time() - began
