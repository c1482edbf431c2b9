"""The same bits on any number of workers: `state_hash` after 3 epochs over an uneven dataset.

Three models, each with and without accumulation, on 1, 2, 3, 4 and 6 workers with the same shards; then
stopped at a random step by SIGTERM and by SIGKILL of every process, and resumed on another number of workers.
A column is right when all its hashes are one. A resumed run must really go on from a checkpoint, and as a
control another seed must give another hash.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from bench.report import Report, Target, main
from bench.train import bits
from bench.train.bits import CASES, MICRO_BATCH, Case
from bench.train.interrupt import Manner, stop_at
from paceline.core import journal
from paceline.core.events import RunResumed

WORKERS = (1, 2, 3, 4, 6)
EVERY = 4
# Workers before and after the stop.
STOPS: tuple[tuple[Manner, int, int], ...] = (("SIGTERM", 3, 2), ("SIGKILL", 2, 6))
RANDOM = 2026


@dataclass(frozen=True)
class Stop:
    """A run that was ended after step `reached` and whose next start began with step `resumed` + 1."""

    manner: Manner
    before: int
    after: int
    reached: int
    resumed: int

    @property
    def right(self) -> bool:
        """After SIGTERM nothing is done twice; SIGKILL may cost the steps since the newest checkpoint."""
        return self.resumed == self.reached if self.manner == "SIGTERM" else self.resumed > 0

    def __str__(self) -> str:
        moved = f"{self.before} to {self.after} workers"
        return (
            f"{self.manner} after step {self.reached} of {bits.STEPS}, {moved}, from step {self.resumed} on"
        )


@dataclass
class Column:
    """Hashes of one model's runs by what was done to them."""

    case: Case
    micro_batch: int | None
    hashes: dict[str, str] = field(default_factory=dict)
    stops: list[Stop] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.case.title}, {'with' if self.micro_batch else 'no'} accumulation"

    @property
    def heading(self) -> str:
        return f"{self.case.name}, micro batch {self.micro_batch}" if self.micro_batch else self.case.name


def measure(case: Case, micro_batch: int | None, dice: random.Random, folder: Path) -> Column:
    """Undisturbed runs, then interrupted ones."""
    column = Column(case, micro_batch)
    for workers in WORKERS:
        run_dir = str(folder / f"{workers}-workers")
        history = bits.fit(case, workers=workers, micro_batch=micro_batch, run_dir=run_dir)
        column.hashes[str(workers)] = history.state_hash
    for manner, before, after in STOPS:
        run_dir_of_both = folder / manner
        # Late enough for a checkpoint, early enough that the signal arrives before the end.
        step = dice.randrange(EVERY + 2, bits.STEPS - 25)
        command = ["bench.train.bits", case.name, "--workers", str(before), "--every", str(EVERY)]
        command += ["--run-dir", str(run_dir_of_both)]
        if micro_batch:
            command += ["--micro-batch", str(micro_batch)]
        reached = stop_at(command, run_dir_of_both, step, manner)
        history = bits.fit(
            case,
            workers=after,
            micro_batch=micro_batch,
            run_dir=str(run_dir_of_both),
            resume="auto",
            checkpoint=bits.saving(EVERY),
        )
        column.hashes[manner] = history.state_hash
        column.stops.append(Stop(manner, before, after, reached, _resumed_after(run_dir_of_both)))
    return column


def _resumed_after(run_dir: Path) -> int:
    """The step of the checkpoint that the run last went on from; 0 where it began anew."""
    events = journal.iterate(run_dir / "journal.jsonl")
    return max((event.step for event in events if isinstance(event, RunResumed)), default=0)


def run() -> Report:
    """state_hash for 1 to 6 workers, and after stops."""
    dice = random.Random(RANDOM)
    columns = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for case in CASES.values():
            for micro_batch in (None, MICRO_BATCH):
                columns.append(measure(case, micro_batch, dice, Path(folder, f"{case.name}-{micro_batch}")))
        case = CASES["mlp"]
        other = bits.fit(case, workers=2, run_dir=str(Path(folder, "other")), seed=bits.SEED + 1).state_hash
    report = Report(
        "same_bits",
        f"state_hash after {bits.EPOCHS} epochs of {bits.SAMPLES} samples, global batch {bits.GLOBAL_BATCH}",
        ("run", *(column.heading for column in columns)),
        data={"hashes": {column.title: column.hashes for column in columns}},
        notes=[f"{column.heading}: {stop}" for column in columns for stop in column.stops],
    )
    for name in columns[0].hashes:
        run_text = f"{name} workers" if name.isdigit() else name
        report.rows.append((run_text, *(column.hashes[name][:8] for column in columns)))
    for column in columns:
        count = len(set(column.hashes.values()))
        what = f"{column.title}: different hashes of {len(column.hashes)} runs"
        report.targets.append(Target(what, count, 1, at_least=False, unit=""))
    stops = [stop for column in columns for stop in column.stops]
    right = sum(stop.right for stop in stops)
    report.targets.append(Target("resumed where the checkpoint was", right, len(stops), unit=" runs"))
    control = len({other, columns[0].hashes["1"]})
    report.targets.append(Target("control: different hashes of two seeds", control, 2, unit=""))
    return report


if __name__ == "__main__":
    main(run)
