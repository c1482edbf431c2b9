"""What checkpoints cost: 400 MB of state saved every 20 steps, against no saves, and against
torch.distributed.checkpoint.async_save in a hand-written DDP loop on the same work.

An MLP of 33.5 million parameters with AdamW: weights and two moments. Each of the four blocks (Paceline and
DDP, with and without saves) is done in turn; the slowdown is against the same loop without saves in the same
round. Three saves fall into a block, and ten steps follow the last, so that its writing is paid for too. Both
sides sync what they write. Files go to the system's temporary folder.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.report import Report, Target, main
from bench.train import paceline_loop
from bench.train.turns import Peer
from bench.train.workload import STATE

EVERY = 20
WARMUP = 10
STEPS = 60
SAVES = STEPS // EVERY
WORKERS = (1, 2)
ROUNDS = 3
LIMIT = 0.05


@dataclass
class Cost:
    """Seconds of one loop's blocks by round, and how much longer each step with a save took than others."""

    plain: list[float] = field(default_factory=list)
    saving: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)

    @property
    def slowdown(self) -> float:
        pairs = zip(self.saving, self.plain, strict=True)
        # Less than nothing is noise.
        return max(0.0, statistics.median(saving / plain - 1 for saving, plain in pairs))

    @property
    def per_save(self) -> float:
        """All that a save cost: its stall, and what the writing took away from the steps after it."""
        pairs = zip(self.saving, self.plain, strict=True)
        return statistics.median((saving - plain) / SAVES for saving, plain in pairs)

    def note(self, ends: Sequence[float], every: int) -> None:
        """One block, by the ends of its steps."""
        took = ends[-1] - ends[WARMUP - 1]
        if not every:
            self.plain.append(took)
            return
        self.saving.append(took)
        lengths = [after - before for before, after in itertools.pairwise(ends)]
        usual = statistics.median(lengths[WARMUP - 1 :])
        for step in range(every, len(ends), every):
            # A save is started at the end of its step or at the beginning of the next, before or after
            # the clock is read: the two together hold it.
            self.stalls.append(max(0.0, lengths[step - 2] + lengths[step - 1] - 2 * usual))


def measure(workers: int) -> dict[str, Cost]:
    """Both loops with and without saves, in turns."""
    costs = {"Paceline": Cost(), "DDP, async_save": Cost()}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        settings = {"workload": STATE.name, "folder": str(Path(folder, "saves"))}
        with Peer("bench.train.async_save_loop", settings, workers) as peer:
            for _ in range(ROUNDS):
                for every in (0, EVERY):
                    run = paceline_loop.train(STATE, workers, WARMUP + STEPS, every or None)
                    costs["Paceline"].note(run.ends, every)
                    answers = peer.turn(WARMUP, STEPS, every=every)
                    slowest = max(answers, key=lambda answer: float(answer["seconds"]))
                    costs["DDP, async_save"].note(slowest["ends"], every)
    return costs


def run() -> Report:
    """What saving 400 MB every 20 steps costs."""
    cores = len(os.sched_getaffinity(0))
    report = Report(
        "checkpoint_stall",
        f"A checkpoint of 402 MB every {EVERY} steps, batch {STATE.batch} a worker, {cores} cores",
        (
            "workers",
            "loop",
            "ms a step, no saves",
            "with saves",
            "slowdown",
            "stall a save, ms",
            "worst, ms",
            "all a save costs, ms",
        ),
        notes=[
            f"medians of {ROUNDS} rounds of {STEPS} steps with {SAVES} saves",
            "stall: how much longer the step that saves took; all: time of the block over that without saves",
        ],
    )
    measured = {workers: measure(workers) for workers in WORKERS}
    for workers, costs in measured.items():
        for name, cost in costs.items():
            report.rows.append(
                (
                    str(workers),
                    name,
                    f"{statistics.median(cost.plain) / STEPS * 1e3:.1f}",
                    f"{statistics.median(cost.saving) / STEPS * 1e3:.1f}",
                    f"{cost.slowdown:.1%}",
                    f"{statistics.median(cost.stalls) * 1e3:.0f}",
                    f"{max(cost.stalls) * 1e3:.0f}",
                    f"{cost.per_save * 1e3:.0f}",
                )
            )
        ours, theirs = costs["Paceline"], costs["DDP, async_save"]
        what = f"{workers} worker{'s' if workers > 1 else ''}"
        report.targets += [
            Target(f"{what}, slowdown", ours.slowdown * 100, LIMIT * 100, at_least=False, unit=" %"),
            Target(
                f"{what}, slowdown against async_save's",
                ours.slowdown * 100,
                theirs.slowdown * 100,
                at_least=False,
                unit=" %",
            ),
            Target(
                f"{what}, stall of a save against async_save's",
                statistics.median(ours.stalls) * 1e3,
                statistics.median(theirs.stalls) * 1e3,
                at_least=False,
                unit=" ms",
            ),
        ]
    report.data = {
        "measurements": [
            {
                "workers": workers,
                "loop": name,
                "seconds_without": cost.plain,
                "seconds_with": cost.saving,
                "stalls": cost.stalls,
            }
            for workers, costs in measured.items()
            for name, cost in costs.items()
        ]
    }
    return report


if __name__ == "__main__":
    main(run)
