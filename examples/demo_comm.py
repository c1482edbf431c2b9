"""Four ranks on this machine: every all-reduce algorithm against Gloo, with time, bytes and equality.

python examples/demo_comm.py [--workers 4] [--size 4MB]
"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

import paceline
from paceline.cli.bench import parse_size, size_text
from paceline.comm.benchmark import GlooPeer, interleaved

ALGORITHMS = ("direct", "canonical", "hierarchical", "tree", "ring")


@dataclass(frozen=True)
class Result:
    """One algorithm on one rank."""

    seconds: float
    bytes_sent: int
    messages: int
    correct: bool
    digest: str


def compare(ctx: paceline.DistributedContext, nbytes: int) -> dict[str, Result]:
    """Run every algorithm and Gloo inside a rank, and compare sums and times."""
    torch.set_num_threads(1)
    data = torch.arange(nbytes // 4, dtype=torch.float32).remainder_(1000) + ctx.rank
    # Small whole numbers add up exactly in any order: every algorithm has to give exactly this.
    expected = torch.arange(nbytes // 4, dtype=torch.float32).remainder_(1000) * ctx.world_size
    expected += ctx.world_size * (ctx.world_size - 1) / 2

    outcomes: dict[str, tuple[bool, str, int, int]] = {}
    for algorithm in ALGORITHMS:
        before = ctx.transport.traffic.snapshot()
        total = ctx.all_reduce(data, algorithm=algorithm)
        after = ctx.transport.traffic.snapshot()
        digest = hashlib.sha256(total.numpy().tobytes()).hexdigest()
        outcomes[algorithm] = (
            torch.equal(total, expected),
            digest,
            after[1] - before[1],
            after[0] - before[0],
        )

    zeros = torch.zeros_like(data)
    with GlooPeer(ctx) as gloo:
        actions = {
            name: lambda name=name: ctx.all_reduce(zeros, algorithm=name, out=zeros) for name in ALGORITHMS
        }
        seconds = interleaved(ctx, {**actions, "gloo": gloo.all_reduce_of(nbytes)}, rounds=3, calls=5)

    results = {
        name: Result(seconds[name], sent, messages, correct, digest)
        for name, (correct, digest, sent, messages) in outcomes.items()
    }
    results["gloo"] = Result(seconds["gloo"], 0, 0, True, "")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--size", default="4MB")
    options = parser.parse_args()
    nbytes = parse_size(options.size)

    by_rank = paceline.spawn(compare, nbytes, workers=options.workers, threads=1)

    console = Console(width=max(100, Console().width))
    table = Table(title=f"all-reduce of {size_text(nbytes)} on {options.workers} ranks of this machine")
    for column in (
        "algorithm",
        "time",
        "faster than Gloo",
        "sent per rank",
        "messages",
        "equal on all ranks",
    ):
        table.add_column(column, justify="left" if column == "algorithm" else "right")
    gloo = by_rank[0]["gloo"].seconds
    wrong = 0
    for name in (*ALGORITHMS, "gloo"):
        mine = [result[name] for result in by_rank]
        if name == "gloo":
            table.add_row("Gloo (torch)", f"{gloo * 1e3:.2f} ms", "", "", "", "")
            continue
        good = all(result.correct for result in mine) and len({result.digest for result in mine}) == 1
        wrong += not good
        table.add_row(
            name,
            f"{mine[0].seconds * 1e3:.2f} ms",
            f"{gloo / mine[0].seconds:.1f}x",
            f"{mine[0].bytes_sent / 2**20:.2f} MiB",
            str(mine[0].messages),
            "yes" if good else "NO",
        )
    console.print(table)
    if wrong:
        console.print(f"{wrong} algorithms gave a wrong sum", style="red")
        return 1
    console.print(
        "Every algorithm gave the same, exact sum on every rank. No process, port or memory is left."
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
