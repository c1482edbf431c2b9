"""128 workers on one machine: start, train, kill 10 of them one after the other, finish with the right hash;
and how long it takes to know every worker's samples of an epoch.

The model is tiny: what is asked for is that so many processes meet, lose members and meet again.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.recovery import command
from bench.recovery.processes import Family
from bench.recovery.run_journal import RunJournal
from bench.recovery.supervised_run import NO_BACKOFF, RunSettings
from bench.report import Report, Target
from paceline.core.errors import UsageError
from paceline.data.batch_plan import assign, slices_of_step
from paceline.data.partition import DataPartitioner
from paceline.data.permutation import Permutation
from paceline.train.stop_signals import STOPPED_EXIT_CODE

WORKERS = 128
QUICK_WORKERS = 24
KILLS = 10
SEED = 3
STEPS = 1_000_000
START_SECONDS = 300.0
HEAL_SECONDS = 120.0
SHARDING_LIMIT = 0.1
SIZES = (100_000, 10_000_000)
BATCH = 1024
TRIES = 5


@dataclass(frozen=True)
class Crowd:
    """What became of a run: seconds to the first step, from each kill to the next step, and for all of it."""

    start: float
    repairs: list[float]
    seconds: float
    steps: int
    step_seconds: float
    equal: bool


def crowd(folder: Path, workers: int, kills: int) -> Crowd:
    """A run that loses `kills` workers, and one of as many steps that loses none."""
    settings = RunSettings(str(folder / "many"), STEPS, workers=workers, tiny=True, backoff=NO_BACKOFF)
    journal = RunJournal(settings.journal)
    dice = random.Random(SEED)
    repairs: list[float] = []
    with Family(folder / "many.log") as family:
        began = time.time()
        caller = family.start(settings.command())
        journal.wait_until(lambda now: now.step >= 10, family, START_SECONDS)
        start = journal.commits[0].time - began
        calm = [commit.seconds for commit in journal.commits[1:]]
        print(f"{workers} workers: first step after {start:.1f} s", file=sys.stderr, flush=True)
        for _ in range(kills):
            time.sleep(dice.uniform(0.0, 0.5))
            view = journal.read().views[-1]
            victim, killed = dice.choice(view.pids), time.time()
            os.kill(victim, signal.SIGKILL)
            journal.wait_until(_went_on_without(victim), family, HEAL_SECONDS)
            repairs.append(journal.commits[-1].time - killed)
            print(f"killed {victim}: {repairs[-1]:.2f} s", file=sys.stderr, flush=True)
        # To the end with all workers there again.
        journal.wait_until(lambda now: len(now.views[-1].members) == workers, family, HEAL_SECONDS)
        last = journal.step
        journal.wait_until(lambda now: now.step >= last + 10, family, HEAL_SECONDS)
        os.kill(caller, signal.SIGTERM)
        status = family.wait(0, HEAL_SECONDS)
        if status != STOPPED_EXIT_CODE:
            raise UsageError(f"the run ended with {status} when asked to stop\n{family.tail()}")
        seconds = time.time() - began
    steps = journal.read().step
    # As many shards, not as many workers: the number of workers changes no bit.
    alone = RunSettings(str(folder / "calm"), steps, workers=1, shards=workers, tiny=True)
    with Family(folder / "calm.log") as family:
        family.start(alone.command())
        family.finish(START_SECONDS + steps * 0.1 * workers)
    final = settings.final_hash()
    equal = final is not None and final == alone.final_hash()
    return Crowd(start, repairs, seconds, steps, median(calm), equal)


def _went_on_without(pid: int) -> Callable[[RunJournal], bool]:
    """Holds once a view without `pid` has committed a step."""

    def holds(journal: RunJournal) -> bool:
        view = journal.views[-1]
        return pid not in view.pids and journal.commits[-1].generation == view.generation

    return holds


def sharding_seconds(samples: int, workers: int) -> float:
    """The median time to know an epoch's order, the worker of every shard, the slices of every step, and each
    worker's first samples."""
    times = []
    for attempt in range(TRIES):
        slices_of_step.cache_clear()
        began = time.perf_counter()
        order = Permutation(samples, SEED, attempt)
        blocks = assign(workers, workers)
        parts = DataPartitioner(samples, workers)
        first = slices_of_step(0, BATCH, BATCH, workers)
        last = slices_of_step(samples - samples % BATCH, samples % BATCH, BATCH, workers)
        for worker, block in enumerate(blocks):
            for shard in block:
                order.take(first[shard].start, first[shard].stop)
                order.take(last[shard].start, last[shard].stop)
            parts.get_partition(worker)
        times.append(time.perf_counter() - began)
    return median(times)


def run(quick: bool = False, workers: int = 0) -> Report:
    """128 workers: start, train, kill 10, finish; and sharding of 100,000 and 10 million samples."""
    many = workers or (QUICK_WORKERS if quick else WORKERS)
    kills = 3 if quick else KILLS
    with tempfile.TemporaryDirectory(prefix="paceline-many-") as folder:
        found = crowd(Path(folder), many, kills)
    sharding = {samples: sharding_seconds(samples, many) for samples in SIZES}
    report = Report(
        "recovery_many_workers",
        f"{many} workers on {len(os.sched_getaffinity(0))} cores, {kills} killed",
        ("what", "figure"),
        data={"crowd": vars(found), "sharding": {str(size): time for size, time in sharding.items()}},
    )
    report.rows += [
        ("seconds to the first step", f"{found.start:.1f}"),
        ("ms a step before the kills", f"{found.step_seconds * 1e3:.0f}"),
        ("seconds from a kill to the next step, median", f"{median(found.repairs):.2f}"),
        ("worst", f"{max(found.repairs):.2f}"),
        ("steps, seconds for all of it", f"{found.steps}, {found.seconds:.0f}"),
        ("final hash equal to one worker's", "yes" if found.equal else "NO"),
        *((f"ms to shard {size:,} samples", f"{time * 1e3:.2f}") for size, time in sharding.items()),
    ]
    report.targets.append(Target("final hash equal to one worker's", float(found.equal), 1, unit=""))
    report.targets += [
        Target(f"sharding of {size:,} samples", time, SHARDING_LIMIT, at_least=False, unit=" s")
        for size, time in sharding.items()
    ]
    return report


if __name__ == "__main__":
    command.main(run, {"workers": 0})
