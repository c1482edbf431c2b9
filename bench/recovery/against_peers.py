"""The same kill -9 for Paceline and its peers: seconds until training is past the step it had reached.

One of 4 workers is killed in the middle of a run, at the same step and rank for every contender; they take
turns. The clock stops when a group that formed after the kill has committed a step that the old group had
not. The final hash is compared with that of the contender's own undisturbed runs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.recovery import command, kill_one, workload
from bench.recovery.contenders import PACELINE, PEERS, TORCHRUN, Contender, installed
from bench.report import Report, Target
from paceline.core.errors import PacelineError

WANTED_OF_TORCHRUN = 8.0


@dataclass
class Row:
    """A contender's runs. `failed` are those that did not come past the kill at all."""

    contender: Contender
    right: set[str | None] = field(default_factory=set)
    outcomes: list[kill_one.Outcome] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return median(outcome.seconds for outcome in self.outcomes)

    @property
    def rounds(self) -> int:
        return len(self.outcomes) + len(self.failed)

    def hash_text(self) -> str:
        if len(self.right) != 1:
            return "its undisturbed runs differ"
        equal = sum(outcome.hash in self.right for outcome in self.outcomes)
        return f"{equal} of {self.rounds}"

    def cells(self) -> Sequence[str]:
        if not self.outcomes:
            return (self.contender.name, "did not recover", *[""] * 6)
        times = [outcome.seconds for outcome in self.outcomes]
        return (
            self.contender.name,
            f"{self.seconds:.2f}",
            f"{max(times):.2f}",
            f"{median(outcome.repeated for outcome in self.outcomes):.0f}",
            f"{median(outcome.lost for outcome in self.outcomes):.0f}",
            f"{max(outcome.restarted for outcome in self.outcomes)} of {workload.WORKERS - 1}",
            self.hash_text(),
            f"{median(outcome.step_seconds for outcome in self.outcomes) * 1e3:.0f}",
        )


def measure(contenders: Sequence[Contender], rounds: int, steps: int, folder: Path) -> list[Row]:
    """All contenders in turns; each run in a folder of its own."""
    rows = [Row(contender) for contender in contenders]
    for number in range(rounds):
        plan = kill_one.Plan.of(number, steps)
        for place, row in enumerate(rows):
            here = folder / f"{place}-{number}"
            try:
                if number < 2:
                    row.right.add(_undisturbed(row, here.with_suffix(".calm"), steps))
                row.outcomes.append(_disturbed(row, here, plan))
            except PacelineError as error:
                row.failed.append(str(error))
                _say(f"{row.contender.name}: {error}")
    return rows


def _undisturbed(row: Row, folder: Path, steps: int) -> str | None:
    folder.mkdir()
    found = kill_one.undisturbed(row.contender.start, row.contender.reader(folder), folder, steps)
    _say(f"{row.contender.name}, undisturbed: {found or 'no hash'}")
    return found


def _disturbed(row: Row, folder: Path, plan: kill_one.Plan) -> kill_one.Outcome:
    folder.mkdir()
    outcome = kill_one.disturbed(row.contender.start, row.contender.reader(folder), folder, plan)
    _say(f"{row.contender.name}, rank {plan.rank} killed at step {plan.kill_step}: {outcome}")
    return outcome


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(quick: bool = False, contenders: Sequence[Contender] = (PACELINE, *PEERS)) -> Report:
    """Seconds from a kill -9 until training is past the step it had reached, for Paceline and its peers."""
    rounds, steps = (1, 200) if quick else (3, 400)
    there = [contender for contender in contenders if installed(contender)]
    with tempfile.TemporaryDirectory(prefix="paceline-recovery-") as folder:
        rows = measure(there, rounds, steps, Path(folder))
    cores = len(os.sched_getaffinity(0))
    report = Report(
        "recovery_against_peers",
        f"kill -9 of one of {workload.WORKERS} workers, MLP of 1 M parameters, {cores} cores: "
        "until training is past the step it had reached",
        (
            "contender",
            "seconds",
            "worst",
            "repeated samples",
            "lost samples",
            "others restarted",
            "final hash right",
            "ms a step",
        ),
        data={
            "outcomes": {row.contender.name: [vars(outcome) for outcome in row.outcomes] for row in rows},
            "failed": {row.contender.name: row.failed for row in rows},
        },
    )
    report.rows += [row.cells() for row in rows]
    for contender in contenders:
        if contender not in there:
            report.rows.append((contender.name, "not installed", *[""] * 6))
    report.notes += [f"{row.contender.name}: {row.contender.note}" for row in rows]
    report.notes += [
        f"{row.contender.name}: {len(row.failed)} of {row.rounds} runs did not recover"
        for row in rows
        if row.failed
    ]
    report.notes.append(f"{rounds} kills each, the same steps and ranks for all, in runs of {steps} steps")
    report.targets += _targets(rows)
    return report


def _targets(rows: Sequence[Row]) -> list[Target]:
    ours = next((row for row in rows if row.contender is PACELINE and row.outcomes), None)
    if ours is None:
        return []
    wrong = ours.rounds - sum(outcome.hash in ours.right for outcome in ours.outcomes)
    targets = [Target("Paceline's final hash wrong", wrong, 0, at_least=False, unit=f" of {ours.rounds}")]
    for row in rows:
        if row is not ours and row.outcomes:
            bound = WANTED_OF_TORCHRUN if row.contender is TORCHRUN else 1.0
            targets.append(Target(f"ahead of {row.contender.name}", row.seconds / ours.seconds, bound))
    return targets


if __name__ == "__main__":
    command.main(run)
