"""How long `paceline.spawn` takes to reach the ranks' code, and to come back: first, second and later calls.

Both clocks start when `spawn` is called. "reached" is when the last rank runs its first line, "returned" when
`spawn` has the results and every rank is gone. The first call starts the fork server, which imports torch.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import paceline
from bench.report import Report, Target, main
from paceline.engines.local import shutdown

LIMIT_SECONDS = 0.3
WORKERS = 4


def first_line(ctx: Any) -> float:
    """The system-wide clock as the first thing a rank does."""
    return time.monotonic()


def one_call(workers: int) -> tuple[float, float]:
    """Seconds until the last rank's code ran, and until all was over."""
    started = time.monotonic()
    reached: list[float] = paceline.spawn(first_line, workers=workers)
    return max(reached) - started, time.monotonic() - started


def measure(workers: int, repeat: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians in seconds for the first, the second and the later calls, over several fresh servers."""
    calls: dict[str, list[tuple[float, float]]] = {"first": [], "second": [], "later": []}
    for _ in range(rounds):
        shutdown()
        calls["first"].append(one_call(workers))
        calls["second"].append(one_call(workers))
        calls["later"] += [one_call(workers) for _ in range(repeat)]
    return {
        name: {
            "reached": statistics.median(reached for reached, _ in times),
            "reached_worst": max(reached for reached, _ in times),
            "returned": statistics.median(returned for _, returned in times),
            "calls": len(times),
        }
        for name, times in calls.items()
    }


def run() -> Report:
    """Milliseconds from the call of spawn."""
    rows = measure(WORKERS, repeat=20, rounds=3)
    report = Report(
        "spawn_latency",
        f"paceline.spawn, {WORKERS} workers: milliseconds from the call",
        ("call", "reached rank code", "worst", "returned", "calls"),
        data={"calls": rows},
    )
    for name, row in rows.items():
        times = (f"{row[key] * 1000:.0f}" for key in ("reached", "reached_worst", "returned"))
        report.rows.append((name, *times, f"{row['calls']}"))
    second = rows["second"]["reached"]
    report.targets.append(
        Target("second call reaches rank code", second, LIMIT_SECONDS, at_least=False, unit=" s")
    )
    return report


if __name__ == "__main__":
    main(run)
