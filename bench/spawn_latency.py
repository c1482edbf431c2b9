"""How long `paceline.spawn` takes to reach the ranks' code, and to come back: first, second and later calls.

    python bench/spawn_latency.py --workers 4 --repeat 20 --json

Both clocks start when `spawn` is called. "reached" is when the last rank runs its first line, "returned" when
`spawn` has the results and every rank is gone. The first call starts the fork server, which imports torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import paceline
from paceline.engines.local import shutdown

LIMIT_SECONDS = 0.3


def first_line(ctx: Any) -> float:
    """The system-wide clock as the first thing a rank does."""
    return time.monotonic()


def one_call(workers: int) -> tuple[float, float]:
    """Seconds until the last rank's code ran, and until all was over."""
    started = time.monotonic()
    reached: list[float] = paceline.spawn(first_line, workers=workers)  # type: ignore[operator]
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="Latency of paceline.spawn, e.g. spawn_latency.py --workers 4 --json"
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=20, help="later calls in each round")
    parser.add_argument("--rounds", type=int, default=3, help="fresh fork servers")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    rows = measure(options.workers, options.repeat, options.rounds)
    if options.json:
        print(json.dumps({"workers": options.workers, "limit_seconds": LIMIT_SECONDS, "calls": rows}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"paceline.spawn, {options.workers} workers: milliseconds from the call")
    for column in ("call", "reached rank code", "worst", "returned", "calls"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for name, row in rows.items():
        reached, worst, returned = (
            f"{row[key] * 1000:.0f}" for key in ("reached", "reached_worst", "returned")
        )
        table.add_row(name, reached, worst, returned, f"{row['calls']}")
    Console().print(table)
    within = rows["second"]["reached"] < LIMIT_SECONDS
    print(f"second call under {LIMIT_SECONDS * 1000:.0f} ms: {'yes' if within else 'NO'}")


if __name__ == "__main__":
    main()
