"""Kill -9 of one of 4 workers, 200 times at random moments in one run: what each kill costs, and what is left
of it at the end.

A kill comes at a random moment after the view is whole again. "next step" is from the kill to the first step
committed by a view without the lost worker: a step that was on its way already does not count. "back" is from
the kill to the first step committed by a view that has the rank again. Then the run is asked to stop, and an
undisturbed run of as many steps gives the hash to compare with.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.recovery import command, workload
from bench.recovery.processes import Family
from bench.recovery.run_journal import RunJournal
from bench.recovery.supervised_run import NO_BACKOFF, RunSettings
from bench.report import Report, Target
from paceline.core.errors import UsageError
from paceline.train.stop_signals import STOPPED_EXIT_CODE

KILLS = 200
QUICK_KILLS = 15
SEED = 5
LONGEST_WAIT = 0.4
START_SECONDS = 120.0
HEAL_SECONDS = 60.0
# Far more than the kills take: the run is stopped when they are done.
STEPS = 1_000_000


@dataclass(frozen=True)
class Kill:
    """One kill: `time` is right before it, `step` the newest one committed then, `generation` the view."""

    time: float
    rank: int
    pid: int
    step: int
    generation: int
    others: frozenset[int]


@dataclass(frozen=True)
class Cost:
    """Seconds from a kill to the next step, and to the replacement's first; `changed` pids of others."""

    next_step: float
    back: float
    changed: int


def disturb(settings: RunSettings, kills: int, seed: int) -> tuple[list[Kill], RunJournal]:
    """A run with so many kills, then stopped."""
    dice = random.Random(seed)
    done: list[Kill] = []
    journal = RunJournal(settings.journal)
    with Family(Path(settings.run_dir).with_suffix(".log")) as family:
        caller = family.start(settings.command())
        journal.wait_until(lambda now: now.step >= 20, family, START_SECONDS)
        while len(done) < kills:
            time.sleep(dice.uniform(0.0, LONGEST_WAIT))
            done.append(kill_one(journal.read(), dice))
            journal.wait_until(partial(is_back, done[-1]), family, HEAL_SECONDS)
            if len(done) % 20 == 0:
                print(f"{len(done)} kills, step {journal.step}", file=sys.stderr, flush=True)
        os.kill(caller, signal.SIGTERM)
        status = family.wait(0, HEAL_SECONDS)
        if status != STOPPED_EXIT_CODE:
            raise UsageError(f"the run ended with {status} when asked to stop\n{family.tail()}")
    return done, journal.read()


def kill_one(journal: RunJournal, dice: random.Random) -> Kill:
    view = journal.views[-1]
    rank = dice.choice(view.members)
    pid = view.pids[view.members.index(rank)]
    kill = Kill(time.time(), rank, pid, journal.step, view.generation, frozenset(view.pids) - {pid})
    os.kill(pid, signal.SIGKILL)
    return kill


def is_back(kill: Kill, journal: RunJournal) -> bool:
    """Whether a view with a new process for the rank has committed a step."""
    view, commit = journal.views[-1], journal.commits[-1]
    return kill.rank in view.members and kill.pid not in view.pids and commit.generation == view.generation


def cost(journal: RunJournal, kill: Kill) -> Cost:
    after = next(commit for commit in journal.commits if commit.generation > kill.generation)
    later = [view for view in journal.views if view.generation > kill.generation]
    whole = next(view for view in later if kill.rank in view.members and kill.pid not in view.pids)
    back = next(commit for commit in journal.commits if commit.generation >= whole.generation)
    return Cost(after.time - kill.time, back.time - kill.time, len(kill.others - set(whole.pids)))


def steps_wrong(journal: RunJournal) -> int:
    """Steps that are missing from the journal, or there more than once."""
    steps = [commit.step for commit in journal.commits]
    return len(steps) - len(set(steps)) + len(set(range(1, max(steps) + 1)) - set(steps))


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def run(quick: bool = False, kills: int = 0, seed: int = SEED) -> Report:
    """200 kills -9 in one run: time to the next step, time until the replacement is back, and the hash."""
    wanted = kills or (QUICK_KILLS if quick else KILLS)
    with tempfile.TemporaryDirectory(prefix="paceline-kills-") as folder:
        settings = RunSettings(str(Path(folder, "disturbed")), STEPS, backoff=NO_BACKOFF)
        done, journal = disturb(settings, wanted, seed)
        calm = RunSettings(str(Path(folder, "calm")), journal.step)
        with Family(Path(folder, "calm.log")) as family:
            family.start(calm.command())
            family.finish(60.0 + journal.step * 0.2)
        hashes = settings.final_hash(), calm.final_hash()
        unproved = settings.unproved()
    costs = [cost(journal, kill) for kill in done]
    return _report(costs, journal, hashes[0] is not None and hashes[0] == hashes[1], unproved)


def _report(costs: Sequence[Cost], journal: RunJournal, equal: bool, unproved: Sequence[str]) -> Report:
    next_step, back = [one.next_step for one in costs], [one.back for one in costs]
    seconds = journal.commits[-1].time - journal.commits[0].time
    report = Report(
        "recovery_kills",
        f"{len(costs)} kills -9 of one of {workload.WORKERS} workers in one run of {journal.step} steps",
        ("seconds from the kill", "p50", "p99", "worst"),
        data={"next_step": next_step, "back": back},
        notes=[
            f"{seconds:.0f} s, a kill every {seconds / len(costs):.2f} s; "
            f"{len(journal.views)} views, {len(journal.failures)} worker_failed",
            *unproved,
        ],
    )
    for name, times in (("to the next step", next_step), ("until the replacement contributes", back)):
        cells = [f"{quantile(times, share):.3f}" for share in (0.5, 0.99, 1.0)]
        report.rows.append((name, *cells))
    changed, wrong = sum(one.changed for one in costs), steps_wrong(journal)
    report.targets += [
        Target("next step, p50", quantile(next_step, 0.5), 0.15, at_least=False, unit=" s"),
        Target("next step, p99", quantile(next_step, 0.99), 1.0, at_least=False, unit=" s"),
        Target("replacement contributes, p50", quantile(back, 0.5), 1.0, at_least=False, unit=" s"),
        Target("pids of others that changed", changed, 0, at_least=False, unit=""),
        Target("steps lost or committed twice", wrong, 0, at_least=False, unit=""),
        Target("what paceline audit finds wrong", len(unproved), 0, at_least=False, unit=""),
        Target("final hash equal to the undisturbed run's", float(equal), 1, unit=""),
    ]
    return report


if __name__ == "__main__":
    command.main(run, {"kills": 0, "seed": SEED})
