"""The fault matrix: kinds of faults x phases, each a real training run in a process of its own.

    python -m bench recovery.matrix

A run is right when its final hash is the undisturbed run's, the journal names the right rank and phase, and
training never stood still for longer than stated. Must not know how a fault is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.recovery import matrix_cases, matrix_network
from bench.recovery.matrix_cases import Case
from bench.recovery.processes import Family
from bench.report import Report, Target
from paceline.core import events, journal
from paceline.core.errors import CommTimeoutError, RankFailedError

RUN_SECONDS = 120.0


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
    with tempfile.TemporaryDirectory(prefix="paceline-matrix-") as scratch:
        wanted = undisturbed(Path(scratch))
        for number, case in enumerate(matrix_cases.cases()):
            if only and case.kind not in only:
                continue
            why = _why_not(case)
            if why:
                skipped.append((case.kind, case.phase, "-", "-", f"not run: {why}", "-", "-"))
                continue
            result = disturbed(Path(scratch) / str(number), case, wanted)
            results.append(result)
            print(_line(result), flush=True)
    return _report(results, skipped)


def undisturbed(scratch: Path) -> str:
    """The hash that every run must end with."""
    folder = scratch / "calm"
    folder.mkdir()
    outcome = _outcome(folder, [])
    if outcome.get("hash") is None:
        raise RankFailedError(
            f"the undisturbed run failed: {outcome}\n{(folder / 'output.log').read_text()[-4000:]}"
        )
    return str(outcome["hash"])


def disturbed(folder: Path, case: Case, wanted: str) -> Result:
    """One case."""
    folder.mkdir()
    if case.tool == "network":
        outcome = matrix_network.run(folder, RUN_SECONDS)
    else:
        outcome = _outcome(folder, [case.name])
    told = _journal(folder)
    said, right = case.judge(told, _logs(folder))
    return Result(
        case=case,
        hash=outcome.get("hash"),
        right_hash=outcome.get("hash") == wanted,
        said=said,
        right_verdict=right,
        stood=_longest_stand(told),
        seconds=float(outcome.get("seconds") or 0.0),
        error=outcome.get("error"),
    )


def _outcome(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Runs it; what does not end in time is ended."""
    command = [sys.executable, "-m", "bench.recovery.matrix_run", str(folder), *arguments]
    status = "no end in time"
    with Family(folder / "output.log") as family:
        family.start(command, {"OMP_NUM_THREADS": "1"})
        with contextlib.suppress(CommTimeoutError):
            status = f"exit code {family.wait(0, RUN_SECONDS)}"
    file = folder / "outcome.json"
    if not file.exists():
        return {"hash": None, "error": f"{status}, and no outcome", "seconds": RUN_SECONDS}
    return dict(json.loads(file.read_text()))


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
    """`python -m bench.recovery.matrix [KIND ...]`"""
    report = run(sys.argv[1:])
    report.show()
    if not sys.argv[1:]:
        report.save()


if __name__ == "__main__":
    main()
