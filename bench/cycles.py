"""500 cycles of spawn, collective and teardown: nothing may be left, and nothing may grow."""

from __future__ import annotations

import time

import psutil
import torch

from bench.report import Report, Target, main
from paceline.comm.context import DistributedContext
from paceline.frontends.spawn import spawn
from paceline.testing import leaks

CYCLES = 500
WORKERS = 2


def collective(ctx: DistributedContext) -> float:
    return float(ctx.all_reduce(torch.ones(50_000)).sum())


def run() -> Report:
    """What 500 spawns leave behind."""
    report = Report("cycles", f"{CYCLES} cycles of spawn, all-reduce, teardown", ("what", "before", "after"))
    for _ in range(3):
        spawn(collective, workers=WORKERS)
    before, memory, start = leaks.snapshot(), psutil.Process().memory_info().rss, time.monotonic()
    for _ in range(CYCLES):
        spawn(collective, workers=WORKERS)
    seconds = time.monotonic() - start
    left = leaks.since(before)
    grown = (psutil.Process().memory_info().rss - memory) / 2**20
    report.rows.append(("left behind", "", "; ".join(map(str, left)) or "nothing"))
    report.rows.append(
        ("memory of the parent, MiB", f"{memory / 2**20:.1f}", f"{memory / 2**20 + grown:.1f}")
    )
    report.notes.append(f"{seconds / CYCLES * 1e3:.0f} ms a cycle")
    report.targets.append(Target("things left behind", len(left), 0, at_least=False, unit=""))
    report.targets.append(Target("growth of the parent", grown, 8, at_least=False, unit=" MiB"))
    return report


if __name__ == "__main__":
    main(run)
