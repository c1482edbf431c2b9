"""Step time of torch's own DDP and FSDP2 over the backend "paceline" against Gloo.

2 and 4 workers on this host, one thread each; each backend in processes of its own, as scripts use it, which
take turns of a few steps. A ratio is the median over rounds of Gloo's time over Paceline's in the same
round; the spread is the first and the third quarter of them. A round's time is that of the slowest rank.

"memory kept" is the ratio to Gloo in processes that keep freed memory, which processes with a group of
"paceline" do by themselves. "at most" is Gloo's time over that of DDP without any exchange, with the memory
kept: no backend can have a higher ratio here."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from dataclasses import dataclass, field

from bench.report import Report, Target, main
from bench.train.backend_loop import CONTENDERS, GLOO, GLOO_KEPT, NO_EXCHANGE, PACELINE
from bench.train.turns import Peer
from bench.train.workload import SPEED, Workload

LOOPS = {"ddp": "DDP", "fsdp": "FSDP2"}
WORKERS = (2, 4)
ROUNDS = {"mlp_1m": 24, "conv": 14, "mlp_25m": 14}
TURN = {"mlp_1m": 8, "conv": 4, "mlp_25m": 2}
WANTED = {"mlp_1m": 1.2, "conv": 1.0, "mlp_25m": 1.3}
_FIRST_ROUNDS = 2  # that do not count


@dataclass(frozen=True)
class Row:
    """Seconds a step by contender and round."""

    loop: str
    work: Workload
    workers: int
    times: dict[str, list[float]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{LOOPS[self.loop]}, {self.workers} workers, {self.work.title}"

    @property
    def ratios(self) -> list[float]:
        return self._ratios(GLOO, PACELINE)

    def ratio(self, slower: str, faster: str) -> str:
        """Return the median ratio of two contenders; empty where one of them did not take part."""
        if slower not in self.times or faster not in self.times:
            return ""
        return f"{statistics.median(self._ratios(slower, faster)):.2f}x"

    def milliseconds(self, contender: str) -> str:
        return f"{statistics.median(self.times[contender]) * 1e3:.2f}"

    def _ratios(self, slower: str, faster: str) -> list[float]:
        pairs = zip(self.times[slower], self.times[faster], strict=True)
        return sorted(theirs / ours for theirs, ours in pairs)


def measure(loop: str, work: Workload, workers: int) -> Row:
    """All contenders in turns, in alternating order."""
    row, steps = Row(loop, work, workers), TURN[work.name]
    with contextlib.ExitStack() as stack:
        peers = {}
        for contender in CONTENDERS[loop]:
            settings = {"workload": work.name, "loop": loop, "contender": contender}
            peers[contender] = stack.enter_context(Peer("bench.train.backend_loop", settings, workers))
        order = list(peers)
        for number in range(_FIRST_ROUNDS + ROUNDS[work.name]):
            for contender in order:
                # A step that does not count: the caches hold another contender's weights.
                seconds = peers[contender].seconds_a_step(1, steps)
                if number >= _FIRST_ROUNDS:
                    row.times.setdefault(contender, []).append(seconds)
            order.reverse()
    low, middle, high = statistics.quantiles(row.ratios)
    said = ", ".join(f"{contender} {row.milliseconds(contender)} ms" for contender in row.times)
    print(f"{row.title}: {said}, {middle:.2f}x ({low:.2f} to {high:.2f})", file=sys.stderr, flush=True)
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
        (
            *("loop", "workers", "model", "batch", "paceline", "Gloo"),
            *("to Gloo", "spread", "memory kept", "at most"),
        ),
        notes=[
            "medians of rounds; to Gloo: its time over Paceline's in the same round; spread: its quarters; "
            "memory kept: to Gloo in processes that keep freed memory; at most: DDP without any exchange"
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
                row.milliseconds(PACELINE),
                row.milliseconds(GLOO),
                f"{middle:.2f}x",
                f"{low:.2f} to {high:.2f}",
                row.ratio(GLOO_KEPT, PACELINE),
                row.ratio(GLOO, NO_EXCHANGE),
            ]
        )
        report.targets.append(Target(row.title, middle, WANTED[row.work.name]))
    return report


if __name__ == "__main__":
    main(run)
