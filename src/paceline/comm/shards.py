"""Sums of shards that are spread over the ranks in any way: who holds what, and whether it adds up.

The arithmetic is in algorithms/canonical.py. Everything that can be wrong with one rank's shards is found
before anything travels; what is wrong with all ranks' shards together is found by all of them alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.comm.algorithms import canonical
from paceline.comm.algorithms.seals import Sealing
from paceline.comm.algorithms.work import Recipe
from paceline.comm.calls import Call
from paceline.comm.collectives import transfer
from paceline.comm.fold import Node, covering_nodes
from paceline.comm.ops import ReduceOp, check_op, dtype_name
from paceline.comm.parcel import Parcel, pack, unpack
from paceline.comm.payload import check_dense, describe, to_flat_cpu
from paceline.comm.transport.base import Transport
from paceline.core.errors import UsageError


@dataclass(frozen=True)
class Held:
    """This rank's shards, flat, and the shape that they had."""

    flats: dict[int, Tensor]
    shape: list[int]


def open_shards(tensors: Mapping[int, Tensor], shards: int, op: ReduceOp) -> Held:
    """This rank's shards, after checking that they can be combined."""
    if not isinstance(tensors, Mapping):
        raise UsageError(
            f"canonical_sum of a {type(tensors).__name__}", remedy="pass {shard_index: tensor, ...}"
        )
    if not isinstance(shards, int) or shards < 1:
        raise UsageError(
            f"canonical_sum: shards={shards!r}",
            remedy="shards is the number of shards over all ranks, at least 1",
        )
    flats: dict[int, Tensor] = {}
    shapes: set[str] = set()
    for index, tensor in tensors.items():
        what = f"canonical_sum: shard {index!r}"
        if not isinstance(index, int) or not 0 <= index < shards:
            raise UsageError(
                f"{what} is not one of {shards}",
                remedy=f"shard indices are whole numbers from 0 to {shards - 1}",
            )
        if not isinstance(tensor, Tensor):
            raise UsageError(f"{what} is a {type(tensor).__name__}", remedy="pass {shard_index: tensor, ...}")
        check_dense(tensor, what)
        check_op(op, tensor.dtype)
        shapes.add(describe(tensor))
        flats[index] = to_flat_cpu(tensor)
    if len(shapes) > 1:
        raise UsageError(
            f"canonical_sum: shards differ: {', '.join(sorted(shapes))}",
            remedy="all shards have one shape and dtype",
        )
    return Held(flats, list(next(iter(tensors.values())).shape) if flats else [])


def canonical_sum(
    transport: Transport,
    call: Call,
    op: ReduceOp,
    held: Held,
    shards: int,
    deadline: float,
) -> Tensor:
    """Sums shards that are spread over the ranks in any way; every rank gets the result."""
    holdings, about = _holdings(transport, call, held.shape, held.flats, deadline)
    _check_cover(holdings, shards)
    total = torch.empty(about.numel, dtype=about.dtype, device="cpu")
    canonical.sum_shards(transport, call, held.flats, holdings, shards, op, total, deadline)
    return total.view(about.shape)


@dataclass(frozen=True)
class Holdings:
    """Which shards each rank holds, by rank; together every shard once."""

    shards: int
    blocks: tuple[tuple[int, ...], ...]

    @cached_property
    def nodes(self) -> tuple[tuple[Node, ...], ...]:
        """The whole subtrees of the canonical tree that each rank can fold by itself."""
        return tuple(tuple(covering_nodes(block, self.shards)) for block in self.blocks)

    @cached_property
    def text(self) -> str:
        return f"shards={self.shards}, by rank {[list(block) for block in self.blocks]}"

    @cached_property
    def recipe(self) -> Recipe:
        """How the partials become the sum; raises what is wrong with the holdings."""
        _check_cover(dict(enumerate(self.blocks)), self.shards)
        return canonical.recipe_for(self.nodes, self.shards, ReduceOp.SUM)


def fold_partials(
    transport: Transport,
    call: Call,
    partials: Sequence[Tensor],
    holdings: Holdings,
    out: Tensor,
    deadline: float,
    sealing: Sealing | None = None,
) -> None:
    """Sums what the ranks have folded already; `out` and the partials are flat, of one dtype and size."""
    expected = len(holdings.nodes[transport.rank])
    if len(partials) != expected or any(
        partial.shape != out.shape or partial.dtype != out.dtype for partial in partials
    ):
        raise UsageError(
            f"fold_partials: {len(partials)} partials "
            f"{[describe(partial) for partial in partials]} where {expected} of {describe(out)} are due",
            remedy="fold this rank's shards into one tensor per node of holdings.nodes[rank]",
        )
    canonical.combine(transport, call, holdings.recipe, partials, out, deadline, sealing)


@dataclass(frozen=True)
class _About:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())


def _holdings(
    transport: Transport, call: Call, shape: list[int], flats: Mapping[int, Tensor], deadline: float
) -> tuple[dict[int, list[int]], _About]:
    """Who holds which shards, and of what they are: a rank without any learns it from the others."""
    dtype = dtype_name(next(iter(flats.values())).dtype) if flats else ""
    mine = pack([sorted(flats), dtype, shape if flats else []], "canonical_sum")
    peers = [peer for peer in range(transport.world_size) if peer != transport.rank]
    parcels: dict[int, Parcel] = transfer(transport, call, dict.fromkeys(peers, mine), peers, deadline)
    parcels[transport.rank] = mine
    told = {rank: unpack(parcel.head, parcel.body) for rank, parcel in sorted(parcels.items())}
    kinds = {(name, tuple(size)): rank for rank, (_, name, size) in told.items() if name}
    if len(kinds) != 1:
        listing = (
            "; ".join(f"rank {rank} has {name}{list(size)}" for (name, size), rank in kinds.items())
            or "nobody has any"
        )
        raise UsageError(
            f"canonical_sum: the ranks' shards do not fit together: {listing}",
            remedy="all shards have one shape and dtype",
        )
    name, size = next(iter(kinds))
    return {rank: list(held) for rank, (held, _, _) in told.items()}, _About(getattr(torch, name), size)


def _check_cover(holdings: Mapping[int, Sequence[int]], shards: int) -> None:
    owners: dict[int, list[int]] = {}
    for rank, held in holdings.items():
        for shard in held:
            owners.setdefault(shard, []).append(rank)
    missing = [shard for shard in range(shards) if shard not in owners]
    double = {shard: ranks for shard, ranks in owners.items() if len(ranks) > 1}
    if missing or double:
        parts = [f"nobody holds {missing}"] if missing else []
        parts += [f"shard {shard} is held by ranks {ranks}" for shard, ranks in double.items()]
        raise UsageError(
            f"canonical_sum over {shards} shards: {'; '.join(parts)}",
            remedy="each shard is held by exactly one rank",
        )
