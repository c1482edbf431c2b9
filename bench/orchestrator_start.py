"""How long `initialize_workers` of an orchestrator takes: the first call of a process, which starts the fork
server, and the calls after it, which find it warm."""

from __future__ import annotations

import asyncio
import statistics
import time

from bench.report import Report, Target, main
from paceline import DistributedTrainingOrchestrator

WORKERS = 4
ROUNDS = 15
LIMIT_SECONDS = 0.2


async def start_seconds() -> float:
    orchestrator = DistributedTrainingOrchestrator(num_workers=WORKERS)
    begun = time.perf_counter()
    await orchestrator.initialize_workers()
    seconds = time.perf_counter() - begun
    await orchestrator.cleanup()
    return seconds


def run() -> Report:
    first = asyncio.run(start_seconds())
    warm = sorted(asyncio.run(start_seconds()) for _ in range(ROUNDS))
    middle = statistics.median(warm)
    report = Report(
        "orchestrator_start",
        f"initialize_workers of {WORKERS} workers, seconds",
        ("first call", f"warm, median of {ROUNDS}", "lowest", "highest"),
    )
    report.rows.append(tuple(f"{one:.3f}" for one in (first, middle, warm[0], warm[-1])))
    report.targets.append(Target("warm start", middle, LIMIT_SECONDS, at_least=False, unit=" s"))
    report.data = {"first": first, "warm": warm}
    return report


if __name__ == "__main__":
    main(run)
