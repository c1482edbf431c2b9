"""The canonical sum: one SHA-256 for any number of ranks, and its cost over the plain all-reduce."""

from __future__ import annotations

import hashlib

import torch

from bench.report import Report, Target, main
from paceline.cli.bench import size_text
from paceline.comm import benchmark
from paceline.comm.context import DistributedContext
from paceline.frontends.spawn import spawn

RANKS = (1, 2, 3, 4, 5, 7, 8)
SHARDS = (8, 12)
ELEMENTS = 300_007
COST_SIZES = (4096, 1 << 20, 25 << 20)


def shard(index: int) -> torch.Tensor:
    """Random values over some forty orders of magnitude: any other order of summation gives other bits."""
    generator = torch.Generator().manual_seed(1000 + index)
    exponent = torch.rand(ELEMENTS, generator=generator) * 40 - 20
    return torch.randn(ELEMENTS, generator=generator) * 10.0**exponent


def hash_of_sum(ctx: DistributedContext, shards: int) -> str:
    first, last = ctx.rank * shards // ctx.world_size, (ctx.rank + 1) * shards // ctx.world_size
    total = ctx.canonical_sum({index: shard(index) for index in range(first, last)}, shards=shards)
    return hashlib.sha256(total.numpy().tobytes()).hexdigest()


def cost(ctx: DistributedContext) -> list[benchmark.Row]:
    methods = ("direct", "canonical", "direct, ctx.empty", "canonical, ctx.empty")
    return benchmark.compare(ctx, COST_SIZES, methods, rounds=7)


def run() -> Report:
    """Same bits for any number of ranks; time against the plain all-reduce."""
    report = Report("canonical", "Canonical sum", ("shards", "ranks", "SHA-256 of the sum"))
    for shards in SHARDS:
        hashes = {ranks: set(spawn(hash_of_sum, shards, workers=ranks, threads=1)) for ranks in RANKS}
        for ranks, found in hashes.items():
            report.rows.append((str(shards), str(ranks), " ".join(sorted(found))))
        different = len(set().union(*hashes.values()))
        report.targets.append(
            Target(f"different hashes over {shards} shards", different, 1, at_least=False, unit="")
        )
    for ranks in (2, 4):
        seconds = {(row.nbytes, row.method): row.seconds for row in spawn(cost, workers=ranks, threads=1)[0]}
        for nbytes in COST_SIZES:
            for place in ("", ", ctx.empty"):
                ratio = seconds[nbytes, "canonical" + place] / seconds[nbytes, "direct" + place]
                what = f"time over plain all-reduce, {ranks} ranks, {size_text(nbytes)}{place}"
                report.targets.append(Target(what, ratio, 1.15, at_least=False))
    return report


if __name__ == "__main__":
    main(run)
