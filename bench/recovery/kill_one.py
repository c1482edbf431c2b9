"""One disturbed run of one contender: a worker is killed at a random moment, and what it cost is read from
the log of steps. Must not know who the contender is.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.recovery import workload
from bench.recovery.processes import Family
from bench.recovery.step_log import Line
from paceline.core.errors import CommTimeoutError, RankFailedError

START_SECONDS = 120.0
RUN_SECONDS = 240.0
# The one who looks shares the cores with those who are measured.
LOOK_SECONDS = 0.02

Start = Callable[[Family, Path, int], None]


class Reader(Protocol):
    """How a contender's steps are read while it runs and afterwards."""

    def read(self) -> list[Line]: ...

    def final_hash(self) -> str | None: ...


@dataclass(frozen=True)
class Plan:
    """How long the run is and when the kill comes: at the same step and rank for every contender."""

    steps: int
    kill_step: int
    rank: int
    delay: float

    @staticmethod
    def of(seed: int, steps: int) -> Plan:
        dice = random.Random(seed)
        step = dice.randint(steps // 4, steps // 2)
        return Plan(steps, step, dice.randrange(workload.WORKERS), dice.uniform(0.0, 0.04))


@dataclass(frozen=True)
class Outcome:
    """What one kill cost.

    seconds     from the kill until a new group had committed a step that the old one had not
    repeated    samples of steps that were done again
    lost        samples that no step of the run applied
    restarted   processes that were well and are not in the run any more
    """

    seconds: float
    repeated: int
    lost: int
    restarted: int
    step_seconds: float
    hash: str | None


def undisturbed(start: Start, reader: Reader, folder: Path, steps: int) -> str | None:
    """The final hash of an undisturbed run."""
    with Family(folder / "output.log") as family:
        start(family, folder, steps)
        family.finish(RUN_SECONDS)
    return reader.final_hash()


def disturbed(start: Start, reader: Reader, folder: Path, plan: Plan) -> Outcome:
    """One run with one kill."""
    with Family(folder / "output.log") as family:
        start(family, folder, plan.steps)
        _wait_for_step(family, reader, plan.kill_step)
        time.sleep(plan.delay)
        victim = [line.pid for line in reader.read() if line.rank == plan.rank][-1]
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        family.finish(RUN_SECONDS)
    return outcome(reader.read(), killed, victim, plan.steps, reader.final_hash())


def outcome(lines: Sequence[Line], killed: float, victim: int, steps: int, final: str | None) -> Outcome:
    """Reads the log of a run in which `victim` was killed at `killed`."""
    before = [line for line in lines if line.time <= killed]
    old = before[-1].group
    reached = max(line.step for line in lines if line.group == old)
    after = [line for line in lines if line.time > killed and line.group != old]
    past = [line for line in after if line.step > reached]
    if not past:
        raise RankFailedError(f"no step after {reached} was committed once pid {victim} was killed")
    well = {line.pid for line in before if line.group == old} - {victim}
    used = {line.step: line.samples for line in lines}
    return Outcome(
        seconds=past[0].time - killed,
        repeated=max(0, reached - min(line.step for line in after) + 1) * workload.GLOBAL_BATCH,
        lost=sum(workload.GLOBAL_BATCH - used.get(step, 0) for step in range(1, steps + 1)),
        restarted=len(well - {line.pid for line in past}),
        step_seconds=_step_seconds(before),
        hash=final,
    )


def _step_seconds(before: Sequence[Line]) -> float:
    """The mean of the last half of the steps before the kill."""
    rank = before[-1].rank
    times = [line.time for line in before if line.rank == rank]
    times = times[len(times) // 2 :]
    return (times[-1] - times[0]) / max(1, len(times) - 1)


def _wait_for_step(family: Family, reader: Reader, step: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not any(line.step >= step for line in reader.read()[-8:]):
        if not family.running():
            raise RankFailedError(f"the run ended before step {step}: {family.status()}\n{family.tail()}")
        if time.monotonic() > deadline:
            raise CommTimeoutError(f"step {step} was not reached in {START_SECONDS:.0f} s\n{family.tail()}")
        time.sleep(LOOK_SECONDS)
