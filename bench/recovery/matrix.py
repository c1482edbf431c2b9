"""The fault matrix: kinds of faults x phases, each a real training run of its own.

    python -m bench recovery.matrix

A run is right when its final hash is the undisturbed run's, the journal names the right rank and phase, and
training never stood still for longer than stated. Must not know how a fault is done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.recovery import matrix_cases, matrix_network
from bench.recovery.matrix_cases import Case
from bench.recovery.processes import Family
from bench.report import Report, Target
from paceline.core import events, journal
from paceline.core.errors import RankFailedError

RUN_SECONDS = 120.0
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Result:
    """`stood` is the longest time between two steps of the journal after the first one."""

    case: Case
    hash: str | None
    right_hash: bool
    said: str
    right_verdict: bool
    stood: float
    seconds: float
    error: str | None

    @property
    def in_time(self) -> bool:
        """A run that did not come to its end stood still for ever."""
        return self.hash is not None and self.stood <= self.case.seconds

    @property
    def right(self) -> bool:
        return self.right_hash and self.right_verdict and self.in_time


def run(only: Sequence[str] = ()) -> Report:
    """All cases, or those whose kind is named."""
    results: list[Result] = []
    skipped: list[Sequence[str]] = []
    chosen: list[Case] = []
    for case in matrix_cases.cases():
        if only and case.kind not in only:
            continue
        why = _why_not(case)
        if why:
            skipped.append((case.kind, case.phase, "-", "-", f"not run: {why}", "-", "-"))
        else:
            chosen.append(case)
    with tempfile.TemporaryDirectory(prefix="paceline-matrix-") as scratch:
        for result in disturbed(Path(scratch), chosen):
            results.append(result)
            print(_line(result), flush=True)
    return _report(results, skipped)


def disturbed(scratch: Path, cases: Sequence[Case]) -> Iterator[Result]:
    """Each case, compared with a run that nothing is done to. Each has a folder of its own in `scratch`."""
    with contextlib.closing(
        _outcomes(scratch, ["", *(c.name for c in cases if c.tool != "network")])
    ) as many:
        folder, calm = next(many)
        if calm.get("hash") is None:
            raise RankFailedError(f"the undisturbed run failed: {calm}\n{_output(scratch)}")
        for case in cases:
            if case.tool == "network":
                folder = scratch / "network"
                folder.mkdir()
                outcome = matrix_network.run(folder, RUN_SECONDS)
            else:
                folder, outcome = next(many)
            told = _journal(folder)
            said, right = case.judge(told, _logs(folder))
            yield Result(
                case=case,
                hash=outcome.get("hash"),
                right_hash=outcome.get("hash") == calm["hash"],
                said=said,
                right_verdict=right,
                stood=_longest_stand(told),
                seconds=float(outcome.get("seconds") or 0.0),
                error=outcome.get("error"),
            )


def _outcomes(scratch: Path, names: Sequence[str]) -> Generator[tuple[Path, dict[str, Any]], None, None]:
    """Runs these cases one after the other in one process, which has imported everything once. What does not
    end in time is ended, and another process goes on with the rest."""
    left = [(scratch / str(number), name) for number, name in enumerate(names)]
    for folder, _ in left:
        folder.mkdir()
    while left:
        with Family(scratch / "output.log") as family:
            words = [word for folder, name in left for word in (str(folder), name)]
            family.start(
                [sys.executable, "-m", "bench.recovery.matrix_run", *words], {"OMP_NUM_THREADS": "1"}
            )
            while left:
                folder, _ = left.pop(0)
                outcome = _wait(family, folder / "outcome.json")
                yield folder, outcome or {"hash": None, "error": "no end in time, or a dead process"}
                if outcome is None:
                    break


def _wait(family: Family, file: Path) -> dict[str, Any] | None:
    limit = time.monotonic() + RUN_SECONDS
    while not file.exists():
        if time.monotonic() > limit or not family.running():
            return None
        family.descendants()  # so that orphans are known, too
        time.sleep(_LOOK_SECONDS)
    return dict(json.loads(file.read_text()))


def _output(scratch: Path) -> str:
    return (scratch / "output.log").read_text(errors="replace")[-4000:]


def _journal(folder: Path) -> list[events.Event]:
    file = folder / "run" / "journal.jsonl"
    return list(journal.read(file).events) if file.exists() else []


def _logs(folder: Path) -> str:
    return "\n".join(file.read_text(errors="replace") for file in folder.glob("run/logs/*.log"))


def _longest_stand(told: Sequence[events.Event]) -> float:
    times = [event.time for event in told if isinstance(event, events.StepCommitted)]
    return max((after - before for before, after in pairwise(times)), default=0.0)


def _why_not(case: Case) -> str:
    if case.tool == "disk" and os.geteuid() != 0:
        return "mounting a small disk needs root"
    if case.tool == "network":
        return matrix_network.why_not()
    return ""


def _line(result: Result) -> str:
    mark = "ok   " if result.right else "WRONG"
    return f"{mark} {result.case.name}: {result.said}; stood {result.stood:.2f} s{_trouble(result)}"


def _trouble(result: Result) -> str:
    if result.error:
        return f"; {result.error}"
    return "" if result.right_hash else "; another hash"


def _report(results: Sequence[Result], skipped: list[Sequence[str]]) -> Report:
    rows: list[Sequence[str]] = [
        (
            one.case.kind,
            one.case.phase,
            "equal" if one.right_hash else (one.error or "DIFFERENT"),
            "right" if one.right_verdict else "WRONG",
            one.said,
            f"{one.stood:.2f}",
            f"{one.case.seconds:g}",
        )
        for one in results
    ]
    count = max(1, len(results))
    kinds = len({one.case.kind for one in results})
    targets = [
        Target("kinds of faults", kinds, 14, unit=""),
        Target(
            "runs with the right hash", 100 * sum(one.right_hash for one in results) / count, 100, unit=" %"
        ),
        Target("right verdicts", 100 * sum(one.right_verdict for one in results) / count, 95, unit=" %"),
        Target("in the stated time", 100 * sum(one.in_time for one in results) / count, 100, unit=" %"),
    ]
    return Report(
        name="recovery_matrix",
        title=f"{len(results)} runs of {matrix_cases.WORKERS} workers, each with one fault",
        columns=(
            "fault",
            "phase",
            "final hash",
            "verdict",
            "what the journal said",
            "stood (s)",
            "at most (s)",
        ),
        rows=[*rows, *skipped],
        targets=targets,
        data={"finished": time.time(), "runs": [_plain(one) for one in results]},
    )


def _plain(result: Result) -> dict[str, object]:
    return {
        "kind": result.case.kind,
        "phase": result.case.phase,
        "right_hash": result.right_hash,
        "right_verdict": result.right_verdict,
        "said": result.said,
        "stood": result.stood,
        "seconds": result.seconds,
    }


def main() -> None:
    """`python -m bench.recovery.matrix [--save] [KIND ...]`"""
    parser = argparse.ArgumentParser(description=run.__doc__)
    kinds = sorted({case.kind for case in matrix_cases.cases()})
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"some of: {', '.join(kinds)}")
    parser.add_argument("--save", action="store_true", help="write table, data and plot to bench/results/")
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(kinds):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(kinds)}")
    report = run(options.kinds)
    report.show()
    if options.save:
        report.save()


if __name__ == "__main__":
    main()
