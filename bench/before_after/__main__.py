"""Measure two checkouts in turns, and print one table: before, after, and the ratio.

    git worktree add ../before REVISION
    python -m bench.before_after ../before                    # everything, three rounds
    python -m bench.before_after ../before --only all_reduce --rounds 7

Every round measures both checkouts, in an order that alternates: steps and all-reduces in turns of processes
that are alive at once, the rest one after the other. A ratio is the median over rounds of after / before in
the same round, with its range. More than 1 is slower.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from bench.before_after.probes import PROBES
from bench.before_after.turns import TOGETHER, Pairs, environment_of
from bench.report import Report

HERE = Path(__file__).parents[2]
PROBE = Path(__file__).with_name("probes.py")
# The slowest probe, 128 workers on 2 cores, takes some minutes.
LONGEST = 900.0

NAMES = [*TOGETHER, *PROBES]


def measure(checkout: Path, probe: str) -> dict[str, float]:
    """Run a probe in a process that sees a checkout's own `paceline` and `bench`."""
    done = subprocess.run(
        [sys.executable, str(PROBE), probe],
        cwd=checkout,
        env={**os.environ, **environment_of(checkout)},
        stdout=subprocess.PIPE,
        timeout=LONGEST,
        check=True,
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure_both(before: Path, probe: str, turn: int) -> Pairs:
    """Run a probe in both checkouts; which of them comes first alternates."""
    order = (before, HERE) if turn % 2 == 0 else (HERE, before)
    found = {checkout: measure(checkout, probe) for checkout in order}
    return {name: (found[before][name], seconds) for name, seconds in found[HERE].items()}


def run(before: Path, probes: list[str], rounds: int) -> Report:
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for checkout in (before, HERE):
        # A checkout that was never run would be compiled by every process of the first round, or, where
        # PYTHONDONTWRITEBYTECODE is set, of all rounds.
        compileall.compile_dir(checkout / "src", quiet=1)
        compileall.compile_dir(checkout / "bench", quiet=1)
    for turn in range(rounds):
        for probe in probes:
            together = TOGETHER.get(probe)
            found = together(before, HERE, turn) if together else measure_both(before, probe, turn)
            for name, both in found.items():
                pairs[name].append(both)
            print(f"round {turn + 1}: {probe}", file=sys.stderr, flush=True)
    report = Report(
        "before_after",
        f"Before and after; rounds in turns: {rounds}",
        ("figure", "before", "after", "after / before", "range"),
    )
    for name, both in pairs.items():
        ratios = sorted(after / earlier for earlier, after in both)
        report.rows.append(
            (
                name,
                _in_words(name, median(earlier for earlier, _ in both)),
                _in_words(name, median(after for _, after in both)),
                f"{median(ratios):.2f}",
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            )
        )
    return report


def _in_words(name: str, seconds: float) -> str:
    if name.startswith(("calls", "instructions")):
        return f"{seconds:.5g}"
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-4 else f"{seconds * 1e3:.3g} ms"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.before_after",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path, help="the root of the other checkout")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    report = run(asked.before.resolve(), asked.only, asked.rounds)
    report.show()
    report.save()


if __name__ == "__main__":
    main()
