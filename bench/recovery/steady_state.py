"""What supervision costs while nothing happens: heartbeats, journal, the transaction of a step.

The same training with a supervisor and without (`fault_tolerance` off: spawned ranks, the first failure ends
them). Three things hide a cost of a few per cent. Machines drift: so all kinds are started together, and
each in turn is let run for a moment while the others are suspended. Where its memory lies makes a process
faster or slower by several per cent for as long as it lives: so they are started anew many times. And of two
runs of the same kind, the one that was started first is two per cent slower: so every other fleet is started
the other way round, and two such fleets are one measurement. Of each run the median over its steps counts. A
cost is the ratio of two runs that were started together and took turns, and the median of these ratios is
the figure: from one fleet to the next the machine itself changes by ten per cent, which is in both. What
cannot be hidden by that is CPU time: how much of it goes, in one supervised run, to anything but the
workers' main threads. And the supervisor's own, as a share of one core, while 64 workers train a tiny model.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import median, quantiles
from typing import final

from bench.recovery import command, workload
from bench.recovery.processes import Family
from bench.recovery.run_journal import RunJournal
from bench.recovery.supervised_run import RunSettings
from bench.report import Report, Target

MANY = 64
WARMUP_STEPS = 20
SETTLING = 6  # steps after a turn began that do not count
ENDLESS = 10_000_000
START_SECONDS = 180.0
RUN_SECONDS = 60.0


@dataclass(frozen=True)
class Fleet:
    """Seconds a step of one run of each kind. `sealed`: gradients in shared memory carry checksums too."""

    supervised: float
    spawned: float
    sealed: float


@final
class Contestant:
    """A run that makes a few steps when it is its turn."""

    def __init__(
        self,
        command: Sequence[str],
        run_dir: Path,
        stack: ExitStack,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._journal = RunJournal(run_dir / "journal.jsonl")
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self._family = stack.enter_context(Family(run_dir.with_suffix(".log")))
        self._family.start(command, environment)
        self._journal.wait_until(lambda now: now.step >= WARMUP_STEPS, self._family, START_SECONDS)
        self._family.suspend()
        self._steps, self._used = 0, 0.0

    def make(self, steps: int) -> list[float]:
        """Seconds of so many steps, from one commit to the next; the first ones find cold caches."""
        first, resumed, used = self._journal.read().step, time.time(), self._processor_seconds()
        self._family.resume()
        self._journal.wait_until(lambda now: now.step >= first + SETTLING + steps, self._family, RUN_SECONDS)
        self._family.suspend()
        self._used += self._processor_seconds() - used
        self._steps += self._journal.read().step - first
        times = [commit.time for commit in self._journal.commits if commit.time > resumed]
        return [later - earlier for earlier, later in pairwise(times[SETTLING:])]

    def processor_seconds_a_step(self) -> float:
        """Processor time of all processes of the run, over all turns."""
        return self._used / self._steps

    def _processor_seconds(self) -> float:
        return sum(sum(thread_seconds(process.pid).values()) for process in self._family.processes())


def measure(folder: Path, turns: int, steps: int, *, reverse: bool) -> Fleet:
    """All kinds in turns. `reverse`: the last is started first."""
    kinds = {
        "supervised": RunSettings(str(folder / "supervised"), ENDLESS),
        "spawned": RunSettings(str(folder / "spawned"), ENDLESS, supervised=False),
        "sealed": RunSettings(str(folder / "sealed"), ENDLESS, checksums=True),
    }
    with ExitStack() as stack:
        order = list(reversed(kinds)) if reverse else list(kinds)
        running = {
            kind: Contestant(kinds[kind].command(), Path(kinds[kind].run_dir), stack) for kind in order
        }
        return Fleet(**in_turns(running, turns, steps))


def in_turns(running: Mapping[str, Contestant], turns: int, steps: int) -> dict[str, float]:
    """Median seconds of a step of each run, the last first in every second turn."""
    seconds: dict[str, list[float]] = {kind: [] for kind in running}
    for turn in range(turns):
        for kind in list(running) if turn % 2 == 0 else reversed(running):
            seconds[kind] += running[kind].make(steps)
    return {kind: median(times) for kind, times in seconds.items()}


def thread_seconds(pid: int) -> dict[int, float]:
    """CPU time of each thread of a process so far."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def beside_training(folder: Path, seconds: float) -> float:
    """CPU time of all but the workers' main threads, as a share of theirs: supervisor, caller, heartbeats."""
    settings = RunSettings(str(folder / "beside"), ENDLESS)
    journal = RunJournal(settings.journal)
    with Family(folder / "beside.log") as family:
        caller = family.start(settings.command())
        journal.wait_until(lambda now: now.step >= WARMUP_STEPS, family, START_SECONDS)
        pids = {caller, *(process.pid for process in family.descendants())}
        before = {pid: thread_seconds(pid) for pid in pids}
        time.sleep(seconds)
        training = beside = 0.0
        for pid in pids:
            for thread, used in thread_seconds(pid).items():
                used -= before[pid].get(thread, 0.0)
                if pid in journal.views[-1].pids and thread == pid:
                    training += used
                else:
                    beside += used
        return beside / training


@dataclass(frozen=True)
class Share:
    """The supervisor's part of one core, over so many seconds in which so many steps were committed."""

    share: float
    seconds: float
    steps: int


def supervisor_share(folder: Path, workers: int, seconds: float) -> Share:
    settings = RunSettings(str(folder / "many"), ENDLESS, workers=workers, tiny=True)
    journal = RunJournal(settings.journal)
    with Family(folder / "many.log") as family:
        family.start(settings.command())
        journal.wait_until(lambda now: now.step >= WARMUP_STEPS, family, START_SECONDS)
        pid = journal.supervisors[-1].pid
        began, used, first = time.monotonic(), sum(thread_seconds(pid).values()), journal.step
        time.sleep(seconds)
        passed, used = time.monotonic() - began, sum(thread_seconds(pid).values()) - used
        return Share(used / passed, passed, journal.read().step - first)


def run(quick: bool = False) -> Report:
    """Step time with and without a supervisor, and the supervisor's CPU time with 64 workers."""
    fleets, turns, steps, seconds = (4, 4, 30, 5.0) if quick else (16, 6, 34, 20.0)
    found = []
    with tempfile.TemporaryDirectory(prefix="paceline-steady-") as folder:
        for number in range(fleets):
            found.append(measure(Path(folder, str(number)), turns, steps, reverse=number % 2 == 1))
            print(f"fleet {number}: {found[-1]}", file=sys.stderr, flush=True)
        beside = beside_training(Path(folder), seconds)
        share = supervisor_share(Path(folder), MANY, seconds)
    return _report(found, beside, share, turns * steps)


def _costs(ratios: Sequence[float]) -> list[float]:
    """In per cent, of each two fleets: what who is started first loses is in one of them, and its inverse in
    the other."""
    return [(sqrt(one * other) - 1.0) * 100 for one, other in zip(ratios[::2], ratios[1::2], strict=True)]


def _report(found: Sequence[Fleet], beside: float, share: Share, steps: int) -> Report:
    supervised = median(one.supervised for one in found) * 1e3
    spawned = median(one.spawned for one in found) * 1e3
    costs = _costs([one.supervised / one.spawned for one in found])
    cost, sealed = median(costs), median(_costs([one.sealed / one.spawned for one in found]))
    low, _, high = quantiles(costs, n=4)
    report = Report(
        "recovery_steady_state",
        f"What being elastic costs: {workload.WORKERS} workers, MLP of 1 M parameters, ms a step",
        ("supervised", "fault_tolerance off", "cost", "cost with checksums=True"),
        data={"fleets": [vars(one) for one in found], "beside": beside, "supervisor": vars(share)},
        notes=[
            f"medians of {len(found)} fleets, of {steps} steps of each kind; without a supervisor "
            f"between {min(one.spawned for one in found) * 1e3:.1f} and "
            f"{max(one.spawned for one in found) * 1e3:.1f} ms",
            f"half of the {len(costs)} pairs of fleets, one started in each order, say between "
            f"{low:+.1f} and {high:+.1f} %",
            f"CPU time beside the workers' main threads (supervisor, caller, heartbeats): {beside:.2%}",
            f"supervisor of {MANY} workers: {share.share:.1%} of one core over {share.seconds:.0f} s, "
            f"{share.steps / share.seconds:.1f} steps a second",
        ],
    )
    report.rows.append((f"{supervised:.2f}", f"{spawned:.2f}", f"{cost:+.1f} %", f"{sealed:+.1f} %"))
    report.targets += [
        Target("cost of being elastic", cost, 2.0, at_least=False, unit=" %"),
        Target(
            f"supervisor of {MANY} workers, of one core", share.share * 100, 5.0, at_least=False, unit=" %"
        ),
    ]
    return report


if __name__ == "__main__":
    command.main(run)
