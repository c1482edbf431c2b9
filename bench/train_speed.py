"""Step time of exact training against hand-written loops (torch DDP over Gloo, plain), Lightning, Accelerate.

1, 2 and 4 workers on this host, one thread each, the same model, data, optimizer and batch per worker. Every
contender does a block of steps in turn, several times over, in an order that rotates; a ratio is the median
over rounds of the peer's time over Paceline's in the same round. A block's time is the wall time of its
steps, whatever happens between them (epochs begin and end), on the slowest rank.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from bench.report import Report, Target, main
from bench.train import paceline_loop
from bench.train.turns import Peer
from bench.train.workload import SPEED, Workload

WORKERS = (1, 2, 4)
ROUNDS = 5
WARMUP = 5
STEPS = {"mlp_1m": 100, "conv": 30, "mlp_25m": 10}
FRAMEWORKS = ("lightning", "accelerate")
WANTED = {"mlp_25m": 1.5}
WANTED_OF_PLAIN = 0.97

Contender = Callable[[], float]


@dataclass(frozen=True)
class Row:
    """Seconds a step by contender and round."""

    work: Workload
    workers: int
    times: dict[str, list[float]]

    @property
    def loop(self) -> str:
        """The hand-written peer."""
        return "plain" if self.workers == 1 else "ddp"

    def milliseconds(self, name: str) -> str:
        return f"{statistics.median(self.times[name]) * 1e3:.2f}" if name in self.times else "-"

    def ratio(self, peer: str) -> float:
        pairs = zip(self.times[peer], self.times["paceline"], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    def ratio_text(self, peer: str) -> str:
        return f"{self.ratio(peer):.2f}x" if peer in self.times else "-"


def measure(work: Workload, workers: int) -> Row:
    """All contenders in turns."""
    steps = STEPS[work.name]
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {
            "paceline": partial(paceline_loop.seconds_a_step, work, workers, WARMUP, steps)
        }
        for name in ("plain" if workers == 1 else "ddp", *_installed()):
            peer = stack.enter_context(Peer(f"bench.train.{name}_loop", {"workload": work.name}, workers))
            contenders[name] = partial(peer.seconds_a_step, WARMUP, steps)
        times: dict[str, list[float]] = {name: [] for name in contenders}
        order = list(contenders)
        for _ in range(ROUNDS):
            for name in order:
                times[name].append(contenders[name]())
            order = [*order[1:], order[0]]
    row = Row(work, workers, times)
    said = ", ".join(f"{name} {row.milliseconds(name)} ms" for name in times)
    print(f"{workers} workers, {work.title}: {said}", file=sys.stderr, flush=True)
    return row


def _installed() -> list[str]:
    return [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]


def run() -> Report:
    """Step time of exact training against hand-written loops and frameworks."""
    cores = len(os.sched_getaffinity(0))
    rows = [measure(work, workers) for workers in WORKERS for work in SPEED]
    report = Report(
        "train_speed",
        f"Exact training on one host, {cores} cores, fp32, one thread a worker: ms a step",
        (
            "workers",
            "model",
            "batch",
            "Paceline",
            "by hand",
            "to hand",
            "Lightning",
            "to Lightning",
            "Accelerate",
            "to Accelerate",
        ),
        notes=[
            "by hand: plain loop for 1 worker, torch DDP over Gloo for more; to: their time over Paceline's",
            f"medians of {ROUNDS} rounds; steps a round: "
            + ", ".join(f"{work.title} {STEPS[work.name]}" for work in SPEED),
        ],
        data={
            "measurements": [
                {"model": row.work.name, "workers": row.workers, "seconds": row.times} for row in rows
            ]
        },
    )
    for row in rows:
        cells = [str(row.workers), row.work.title, str(row.work.batch), row.milliseconds("paceline")]
        for peer in (row.loop, *FRAMEWORKS):
            cells += [row.milliseconds(peer), row.ratio_text(peer)]
        report.rows.append(cells)
        report.targets += _targets(row)
    missing = [name for name in FRAMEWORKS if name not in _installed()]
    if missing:
        report.notes.append(f"not installed, not measured: {', '.join(missing)}")
    return report


def _targets(row: Row) -> list[Target]:
    what = f"{row.workers} worker{'s' if row.workers > 1 else ''}, {row.work.title}"
    if row.workers == 1:
        targets = [Target(f"{what}, against a plain loop", row.ratio("plain"), WANTED_OF_PLAIN)]
    else:
        targets = [Target(f"{what}, against DDP", row.ratio("ddp"), WANTED.get(row.work.name, 1.0))]
    for name in FRAMEWORKS:
        if name in row.times:
            targets.append(Target(f"{what}, against {name.capitalize()}", row.ratio(name), 1.0))
    return targets


if __name__ == "__main__":
    main(run)
