"""What being looked after costs while nothing happens: heartbeats, journal, the transaction of a step.

The same training with a supervisor and without (`fault_tolerance` off: spawned ranks, the first failure ends
them), in turns; of each run the median over its steps, and a ratio is the median over the rounds. And the
supervisor's own CPU time, as a share of one core, while 64 workers train a tiny model.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.recovery import command, workload
from bench.recovery.processes import Family
from bench.recovery.run_journal import RunJournal
from bench.recovery.supervised_run import RunSettings
from bench.report import Report, Target

MANY = 64
WARMUP_STEPS = 20
START_SECONDS = 180.0
RUN_SECONDS = 600.0


@dataclass(frozen=True)
class Round:
    """Seconds a step of each kind, next to each other in time. `sealed`: gradients in shared memory carry
    checksums too."""

    supervised: float
    spawned: float
    sealed: float


def step_seconds(settings: RunSettings) -> float:
    """The median over the steps of one run, from one commit to the next."""
    journal = RunJournal(settings.journal)
    with Family(Path(settings.run_dir).with_suffix(".log")) as family:
        family.start(settings.command())
        family.finish(RUN_SECONDS)
    times = [commit.time for commit in journal.read().commits][WARMUP_STEPS:]
    return median(later - earlier for earlier, later in pairwise(times))


def measure(folder: Path, rounds: int, steps: int) -> list[Round]:
    """All kinds in turns, the last first in every second round."""
    kinds = {
        "supervised": RunSettings("", steps),
        "spawned": RunSettings("", steps, supervised=False),
        "sealed": RunSettings("", steps, checksums=True),
    }
    found = []
    for number in range(rounds):
        times: dict[str, float] = {}
        for kind in list(kinds) if number % 2 == 0 else reversed(kinds):
            settings = dataclasses.replace(kinds[kind], run_dir=str(folder / f"{number}-{kind}"))
            times[kind] = step_seconds(settings)
        found.append(Round(**times))
        print(f"round {number}: {found[-1]}", file=sys.stderr, flush=True)
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Share:
    """The supervisor's part of one core, over so many seconds in which so many steps were committed."""

    share: float
    seconds: float
    steps: int


def supervisor_share(folder: Path, workers: int, seconds: float) -> Share:
    settings = RunSettings(str(folder / "many"), 10_000_000, workers=workers, tiny=True)
    journal = RunJournal(settings.journal)
    with Family(folder / "many.log") as family:
        family.start(settings.command())
        journal.wait_until(lambda now: now.step >= WARMUP_STEPS, family, START_SECONDS)
        pid = journal.supervisors[-1].pid
        began, used, first = time.monotonic(), cpu_seconds(pid), journal.step
        time.sleep(seconds)
        passed, used = time.monotonic() - began, cpu_seconds(pid) - used
        return Share(used / passed, passed, journal.read().step - first)


def run(quick: bool = False) -> Report:
    """Step time with and without a supervisor, and the supervisor's CPU time with 64 workers."""
    rounds, steps, seconds = (2, 150, 5.0) if quick else (6, 500, 20.0)
    with tempfile.TemporaryDirectory(prefix="paceline-steady-") as folder:
        found = measure(Path(folder), rounds, steps)
        share = supervisor_share(Path(folder), MANY, seconds)
    return _report(found, share, steps)


def _report(found: Sequence[Round], share: Share, steps: int) -> Report:
    supervised = median(one.supervised for one in found) * 1e3
    spawned = median(one.spawned for one in found) * 1e3
    cost = (median(one.supervised / one.spawned for one in found) - 1.0) * 100
    sealed = (median(one.sealed / one.spawned for one in found) - 1.0) * 100
    report = Report(
        "recovery_steady_state",
        f"What being elastic costs: {workload.WORKERS} workers, MLP of 1 M parameters, ms a step",
        ("supervised", "fault_tolerance off", "cost", "cost with checksums=True"),
        data={"rounds": [vars(one) for one in found], "supervisor": vars(share)},
        notes=[
            f"medians of {len(found)} rounds of {steps} steps",
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
