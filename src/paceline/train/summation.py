"""How the contributions of all shards become one sum on every rank: one way per class, all of one shape.

    start(block, shards)        a step begins; what an abandoned one left is forgotten
    deposit(gradients, tail)    the next shard of this rank's block
    finish(ballot)              the sum of all shards and of all ranks' ballots

Canonical: the fixed tree over the shards, the same bits for any number of ranks. Plain: the fastest
all-reduce, one contribution per rank (mode="fast"). Compressed sums are in compressed_summation.py. Must not
know what gradients are used for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from paceline.comm.compression.base import Compression
from paceline.comm.context import DistributedContext
from paceline.comm.shards import Holdings
from paceline.data.plan import deal
from paceline.train.gradients import Flat, Layout
from paceline.train.shard_fold import ShardFold


class Summation(Protocol):
    def start(self, block: Sequence[int], shards: int) -> None: ...

    def deposit(self, gradients: Sequence[Tensor | None], tail: Tensor) -> None: ...

    def finish(self, ballot: Tensor) -> Flat: ...


def holdings_of(shards: int, workers: int) -> Holdings:
    return Holdings(shards, tuple(tuple(block) for block in deal(shards, workers)))


def flat_maker(context: DistributedContext, layout: Layout, device: torch.device) -> Flat:
    """Gradients on the CPU of several ranks lie where the peers reach them."""

    def memory(size: int, dtype: torch.dtype, where: torch.device) -> Tensor:
        if where.type == "cpu" and context.world_size > 1:
            return context.empty(size, dtype=dtype)
        return torch.empty(size, dtype=dtype, device=where)

    return Flat(layout, memory, device)


@final
class Staging:
    """Gradients of a GPU travel through the host's memory; on the CPU they are where they have to be."""

    def __init__(self, context: DistributedContext, layout: Layout, device: torch.device) -> None:
        self._context, self._layout = context, layout
        self._needed = device.type != "cpu"
        self._host: list[Flat] = []

    def out(self, flats: Sequence[Flat]) -> list[Flat]:
        if not self._needed:
            return list(flats)
        while len(self._host) < len(flats):
            self._host.append(flat_maker(self._context, self._layout, torch.device("cpu")))
        for host, flat in zip(self._host, flats, strict=False):
            host.copy_flat(flat)
        return self._host[: len(flats)]

    def back(self, host: Flat, flat: Flat) -> Flat:
        if host is not flat:
            flat.copy_flat(host)
        return flat


@final
class CanonicalSummation:
    def __init__(self, context: DistributedContext, layout: Layout, device: torch.device) -> None:
        self._context = context
        self._fold = ShardFold(lambda: flat_maker(context, layout, device))
        self._staging = Staging(context, layout, device)
        self._holdings = holdings_of(1, context.world_size)

    def start(self, block: Sequence[int], shards: int) -> None:
        if shards != self._holdings.shards:
            self._holdings = holdings_of(shards, self._context.world_size)
        self._fold.start(block, shards)

    def deposit(self, gradients: Sequence[Tensor | None], tail: Tensor) -> None:
        self._fold.deposit(gradients, tail)

    def finish(self, ballot: Tensor) -> Flat:
        mine = self._fold.partials
        if self._context.world_size == 1:
            mine[0].ballot.copy_(ballot)
            return mine[0]
        target = mine[0] if mine else self._fold.spare()
        partials = self._staging.out(mine)
        result = partials[0] if partials else self._staging.out([target])[0]
        for position, partial in enumerate(partials):
            partial.ballot.copy_(ballot if position == 0 else torch.zeros_like(ballot))
        for dtype, out in result.memory.items():
            flats = [partial.memory[dtype] for partial in partials]
            self._context.fold_partials(flats, self._holdings, out)
        return self._staging.back(result, target)


@final
class PlainSummation:
    """One contribution per rank, summed in whatever order is fastest."""

    def __init__(
        self,
        context: DistributedContext,
        layout: Layout,
        device: torch.device,
        compression: Compression | None = None,
    ) -> None:
        self._context = context
        self._layout = layout
        self._compression = compression
        self._flat = flat_maker(context, layout, device)
        self._staging = Staging(context, layout, device)

    def start(self, block: Sequence[int], shards: int) -> None:
        if self._compression is not None:
            # A codec may have written a NaN of an earlier step between the gradients.
            self._flat.clear()

    def deposit(self, gradients: Sequence[Tensor | None], tail: Tensor) -> None:
        self._flat.store(gradients, tail)

    def finish(self, ballot: Tensor) -> Flat:
        self._flat.ballot.copy_(ballot)
        if self._context.world_size == 1:
            return self._flat
        (host,) = self._staging.out([self._flat])
        for dtype, memory in host.memory.items():
            if self._compression is None:
                self._context.all_reduce(memory, out=memory)
                continue
            # Losses and counts are not gradients: they travel as they are.
            edge = self._layout.tail_start if dtype == torch.float32 else memory.numel()
            gradients, rest = memory[:edge], memory[edge:]
            if edge:
                self._context.all_reduce(
                    gradients, out=gradients, compression=self._compression, name=str(dtype)
                )
            if len(rest):
                self._context.all_reduce(rest, out=rest)
        return self._staging.back(host, self._flat)
