"""The same bits on any number of workers: `state_hash` after 3 epochs over an uneven dataset.

Three models, each with and without accumulation, on 1, 2, 3, 4 and 6 workers with the same shards; then
stopped at a random step by SIGTERM and by SIGKILL of every process, and resumed on another number of workers.
A row is right when all its hashes are one. As a control another seed must give another hash.
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

WORKERS = (1, 2, 3, 4, 6)
EVERY = 4
# Workers before and after the stop.
STOPS: tuple[tuple[Manner, int, int], ...] = (("SIGTERM", 3, 2), ("SIGKILL", 2, 6))
RANDOM = 2026


@dataclass
class Row:
    """Hashes of one model's runs by what was done to them."""

    case: Case
    micro_batch: int | None
    hashes: dict[str, str] = field(default_factory=dict)
    stops: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.case.title}, {'with' if self.micro_batch else 'no'} accumulation"


def measure(case: Case, micro_batch: int | None, dice: random.Random, folder: Path) -> Row:
    """Undisturbed runs, then interrupted ones."""
    row = Row(case, micro_batch)
    for workers in WORKERS:
        run_dir = str(folder / f"{workers}-workers")
        history = bits.fit(case, workers=workers, micro_batch=micro_batch, run_dir=run_dir)
        row.hashes[str(workers)] = history.state_hash
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
        row.hashes[manner] = history.state_hash
        row.stops.append(f"{manner} at step {reached}, {before} to {after} workers")
    return row


def run() -> Report:
    """state_hash for 1 to 6 workers, and after stops."""
    dice = random.Random(RANDOM)
    rows = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for case in CASES.values():
            for micro_batch in (None, MICRO_BATCH):
                rows.append(measure(case, micro_batch, dice, Path(folder, f"{case.name}-{micro_batch}")))
        case = CASES["mlp"]
        other = bits.fit(case, workers=2, run_dir=str(Path(folder, "other")), seed=bits.SEED + 1).state_hash
    report = Report(
        "same_bits",
        f"state_hash after {bits.EPOCHS} epochs of {bits.SAMPLES} samples, global batch {bits.GLOBAL_BATCH}",
        (
            "model",
            "shards",
            "micro batch",
            *(f"{workers} workers" if workers > 1 else "1 worker" for workers in WORKERS),
            *(manner for manner, _, _ in STOPS),
            "stopped",
        ),
        data={"hashes": {row.title: row.hashes for row in rows}},
    )
    for row in rows:
        report.rows.append(
            (
                row.case.title,
                str(row.case.shards),
                str(row.micro_batch or "-"),
                *(text[:8] for text in row.hashes.values()),
                "; ".join(row.stops),
            )
        )
        count = len(set(row.hashes.values()))
        what = f"{row.title}: different hashes of {len(row.hashes)} runs"
        report.targets.append(Target(what, count, 1, at_least=False, unit=""))
    control = len({other, rows[0].hashes["1"]})
    report.targets.append(Target("control: different hashes of two seeds", control, 2, unit=""))
    return report


if __name__ == "__main__":
    main(run)
