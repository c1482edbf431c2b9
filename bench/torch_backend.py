"""Step time of torch's own DDP and FSDP2 over the backend "paceline" against Gloo.

2 and 4 workers on this host, one thread each; both backends in the same processes, each with a model of its
own, in turns of a few steps. A ratio is the median over rounds of Gloo's time over Paceline's in the same
round; the spread is the first and the third quarter of them. A round's time is that of the slowest rank.
"at most" is the ratio of DDP without any exchange: no backend can have a higher one here."""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import dataclass

from bench.report import Report, Target, main
from bench.train.backend_loop import BACKENDS, NO_EXCHANGE
from bench.train.turns import Peer
from bench.train.workload import SPEED, Workload

LOOPS = {"ddp": "DDP", "fsdp": "FSDP2"}
WORKERS = (2, 4)
ROUNDS = {"mlp_1m": 30, "conv": 16, "mlp_25m": 16}
TURN = {"mlp_1m": 8, "conv": 4, "mlp_25m": 2}
WANTED = {"mlp_1m": 1.2, "conv": 1.0, "mlp_25m": 1.3}


@dataclass(frozen=True)
class Row:
    """Seconds a step by backend and round."""

    loop: str
    work: Workload
    workers: int
    times: dict[str, list[float]]

    @property
    def ratios(self) -> list[float]:
        return self._to_gloo("paceline")

    @property
    def most(self) -> float | None:
        """The ratio of steps that exchange nothing."""
        return statistics.median(self._to_gloo(NO_EXCHANGE)) if NO_EXCHANGE in self.times else None

    def _to_gloo(self, other: str) -> list[float]:
        pairs = zip(self.times["gloo"], self.times[other], strict=True)
        return sorted(theirs / ours for theirs, ours in pairs)

    def milliseconds(self, backend: str) -> str:
        return f"{statistics.median(self.times[backend]) * 1e3:.2f}"


def measure(loop: str, work: Workload, workers: int) -> Row:
    """Both backends in turns."""
    with Peer("bench.train.backend_loop", {"workload": work.name, "loop": loop}, workers) as peer:
        peer.turn(2, TURN[work.name])
        answers = peer.turn(ROUNDS[work.name], TURN[work.name])
    times = {
        backend: [max(ranks) for ranks in zip(*(answer["times"][backend] for answer in answers), strict=True)]
        for backend in answers[0]["times"]
    }
    row = Row(loop, work, workers, times)
    said = ", ".join(f"{backend} {row.milliseconds(backend)} ms" for backend in BACKENDS)
    low, middle, high = statistics.quantiles(row.ratios)
    print(
        f"{LOOPS[loop]}, {workers} workers, {work.title}: {said}, {middle:.2f}x ({low:.2f} to {high:.2f})"
        + (f", at most {row.most:.2f}x" if row.most else ""),
        file=sys.stderr,
        flush=True,
    )
    return row


def run() -> Report:
    """Step time of DDP and FSDP2 over the backend "paceline" against Gloo."""
    # One measurement, by name, for those who change something: BENCH_ONLY=ddp,mlp_25m,2
    only = set(filter(None, os.environ.get("BENCH_ONLY", "").split(",")))
    rows = [
        measure(loop, work, workers)
        for loop in LOOPS
        for workers in WORKERS
        for work in SPEED
        if only <= {loop, work.name, str(workers)}
    ]
    report = Report(
        "torch_backend",
        f"DDP and FSDP2 on one host, {len(os.sched_getaffinity(0))} cores, one thread a worker: ms a step",
        ("loop", "workers", "model", "batch", "paceline", "Gloo", "to Gloo", "spread", "at most"),
        notes=[
            "medians of rounds; to Gloo: its time over Paceline's in the same round; spread: its quarters"
        ],
        data={
            "measurements": [
                {"loop": row.loop, "model": row.work.name, "workers": row.workers, "seconds": row.times}
                for row in rows
            ]
        },
    )
    for row in rows:
        low, middle, high = statistics.quantiles(row.ratios)
        report.rows.append(
            [
                LOOPS[row.loop],
                str(row.workers),
                row.work.title,
                str(row.work.batch),
                row.milliseconds("paceline"),
                row.milliseconds("gloo"),
                f"{middle:.2f}x",
                f"{low:.2f} to {high:.2f}",
                f"{row.most:.2f}x" if row.most else "",
            ]
        )
        what = f"{LOOPS[row.loop]}, {row.workers} workers, {row.work.title}"
        report.targets.append(Target(what, middle, WANTED[row.work.name]))
    return report


if __name__ == "__main__":
    main(run)
