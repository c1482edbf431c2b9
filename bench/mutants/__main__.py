"""Plant small bugs in the deciding code, one at a time, and count how many the fast tests and a short
simulation notice.

    python -m bench.mutants                     # 300 mutants and those planted by hand, two at a time
    python -m bench.mutants --mutants 9999 --only shard_assignment.py
    python -m bench.mutants --seed 2            # another draw: what the tests were not written for

The mutants are drawn per area (targets.py), and the result is printed per area and per kind of change.
Mutants that change nothing are in equivalent.toml, each with a reason, and are not counted.
"""

from __future__ import annotations

import argparse
import sys

from bench.mutants.planted import planted
from bench.mutants.score import ROOT, Verdict, drawn, shown, tried

ENOUGH = 0.95


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.mutants", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--mutants", type=int, default=300, help="how many are drawn; many: all there are")
    parser.add_argument("--only", default="", help="only in files whose path has this in it")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds of processor time for one mutant"
    )
    parser.add_argument("--verbose", action="store_true", help="every mutant with what caught it")
    asked = parser.parse_args()
    mutants = [one for one in planted(ROOT) if asked.only in one.path]
    mutants += drawn(asked.seed, asked.mutants, asked.only)
    done = 0

    def report(verdict: Verdict) -> None:
        nonlocal done
        done += 1
        if asked.verbose or not (verdict.by or verdict.excused):
            fate = verdict.by or verdict.excused or "SURVIVED"
            print(f"{done}/{len(mutants)} {shown(verdict.mutant)}: {fate}", flush=True)

    score = tried(mutants, jobs=asked.jobs, timeout=asked.timeout, report=report)
    print(score.text())
    return 0 if score.share >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
