"""`python -m paceline.testing.gauntlet`: see the package."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from paceline.testing.gauntlet import runner
from paceline.testing.gauntlet.attempt import AttemptResult
from paceline.testing.gauntlet.features import FEATURES


def main() -> int:
    """Run the plans; return 1 where a run went wrong."""
    parser = argparse.ArgumentParser(prog="python -m paceline.testing.gauntlet", description=__doc__)
    add = parser.add_argument
    add("--runs", type=int, default=200, help="how many runs, spread over the features")
    add("--jobs", type=int, default=2, help="how many runs at a time")
    add("--feature", action="append", choices=sorted(FEATURES), help="only this one; repeatable")
    add("--seed", type=int, default=1, help="the first seed of each feature")
    add("--times", type=int, default=0, help="run the plan of --seed this often, and no other")
    add("--minutes", type=float, default=0.0, help="begin no run after this time; 0: no limit")
    add("--keep", type=Path, default=Path("gauntlet-wrong"), help="where runs that went wrong stay")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        runner.serve(given.keep)
        return 0
    chosen = given.feature or list(FEATURES)
    if given.times:
        tasks = [(feature, given.seed) for feature in chosen for _ in range(given.times)]
    else:
        tasks = [(chosen[i % len(chosen)], given.seed + i // len(chosen)) for i in range(given.runs)]
    return _report(tasks, given.jobs, given.keep, given.minutes)


def _report(tasks: list[tuple[str, int]], jobs: int, keep: Path, minutes: float) -> int:
    began = time.monotonic()
    findings: list[AttemptResult] = []
    running = runner.run(tasks, jobs, keep)
    for finding in running:
        findings.append(finding)
        if finding.wrong:
            print(f"WRONG {finding.feature!r} seed {finding.seed}: {finding.wrong}")
            print(f"    plan: {finding.plan}")
            print(f"    kept: {finding.kept}")
            print(
                f"    again: python -m paceline.testing.gauntlet --feature {finding.feature!r} "
                f"--seed {finding.seed} --times 20",
                flush=True,
            )
        elif len(findings) % 50 == 0:
            print(f"{len(findings)} of {len(tasks)} runs, {time.monotonic() - began:.0f} s", flush=True)
        if minutes and time.monotonic() - began > 60.0 * minutes:
            running.close()
            break
    print("\n".join(runner.table(findings)))
    wrong = sum(bool(finding.wrong) for finding in findings)
    met = sum(map(runner.disturbed, findings))
    print(f"{len(findings)} runs ({met} met a failure) in {time.monotonic() - began:.0f} s: {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
