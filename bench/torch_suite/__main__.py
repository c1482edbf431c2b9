"""Run PyTorch's own distributed test suite against Gloo and against the backend "paceline", and compare.

    python -m bench.torch_suite [--world-size 3 --world-size 8] [--match TEXT] [--keep FOLDER]

Prints how many tests pass with Gloo, how many of them with Paceline, and the rest with the reason from
reasons.toml. Exit code 0 if at least 98 % pass and every other test has a reason. The suite needs the package
`expecttest`. Without CUDA devices about two thirds of its tests are skipped, with either backend.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from paceline.core.errors import RankFailedError

WANTED = 0.98
WORLD_SIZES = (3, 8)
REASONS = Path(__file__).with_name("reasons.toml")


def outcomes(backend: str, world_size: int, match: str, folder: Path) -> dict[str, str]:
    """Run the suite in a process of its own; return the outcome of each test."""
    out, log = folder / f"{backend}-{world_size}.jsonl", folder / f"{backend}-{world_size}.log"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.torch_suite.backend_run", "--backend", backend]
    command += ["--world-size", str(world_size), "--match", match, "--out", str(out)]
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ, check=False)
    if done.returncode or not out.exists():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
        raise RankFailedError(
            f"the suite itself failed with {backend} (exit code {done.returncode}):\n{tail}"
        )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return {row["test"]: row["outcome"] for row in rows}


def compare(
    gloo: dict[str, str], ours: dict[str, str], reasons: dict[str, str]
) -> tuple[int, int, list[str]]:
    """Return how many tests pass with Gloo, how many of them with Paceline, and a line for each of the
    rest."""
    wanted = [test for test, outcome in gloo.items() if outcome == "passed"]
    rest = [test for test in wanted if ours.get(test) != "passed"]
    lines = [
        f"  {test} ({ours.get(test, 'not run')}): {reasons.get(test, 'NO REASON LISTED')}" for test in rest
    ]
    return len(wanted), len(wanted) - len(rest), lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, action="append", help="several are run one after the other")
    parser.add_argument("--match", default="", help="only tests whose name contains it")
    parser.add_argument("--keep", default="", help="a folder for the outcomes and logs")
    given = parser.parse_args()
    reasons: dict[str, str] = tomllib.loads(REASONS.read_text())["tests"]
    good = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for size in given.world_size or WORLD_SIZES:
            gloo = outcomes("gloo", size, given.match, folder)
            ours = outcomes("paceline", size, given.match, folder)
            passing, also, rest = compare(gloo, ours, reasons)
            skipped = sum(outcome == "skipped" for outcome in gloo.values())
            share = also / passing if passing else 0.0
            print(
                f"{size} ranks: {len(gloo)} tests, {passing} pass with Gloo ({skipped} are skipped here), "
                f"{also} of them with paceline: {share:.1%}"
            )
            print("\n".join(rest), end="\n" if rest else "")
            good = good and share >= WANTED and not any("NO REASON" in line for line in rest)
            unneeded = sorted(test for test in reasons if ours.get(test) == "passed")
            if unneeded:
                print(f"  reasons that are no longer needed: {', '.join(unneeded)}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
