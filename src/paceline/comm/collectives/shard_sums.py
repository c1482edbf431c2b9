"""Sums of shards that are spread over the ranks in any way: which rank holds which shards, and whether the
shards are complete.

The arithmetic is in algorithms/canonical.py. Everything that can be wrong with one rank's shards is found
before anything travels; what is wrong with all ranks' shards together is found by all of them alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline.comm.algorithms import canonical
from paceline.comm.algorithms.shm.checksums import ChecksumRequest
from paceline.comm.algorithms.shm.task import ReductionTask
from paceline.comm.call_status import CollectiveCall, PlannedCall
from paceline.comm.collectives.data_movement import transfer
from paceline.comm.collectives.message_encoding import encode_message
from paceline.comm.collectives.reduction_input import check_dense, describe, to_flat
from paceline.comm.ops import ReduceOp, check_op, dtype_name, kernel_of
from paceline.comm.reduction_order import Node, Recipe, covering_nodes, fold_shards
from paceline.comm.transport.base import Transport, labels_of, peers_of
from paceline.core.errors import UsageError
from paceline.core.wording import counted, listed, ranks


@dataclass(frozen=True)
class HeldShards:
    """This rank's shards, flat, and the shape that they had."""

    flats: dict[int, Tensor]
    shape: list[int]


def check_shards(tensors: Mapping[int, Tensor], shards: int, op: ReduceOp) -> HeldShards:
    """Return this rank's shards, after checking that they can be combined."""
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
        flats[index] = to_flat(tensor)
    if len(shapes) > 1:
        raise UsageError(
            f"canonical_sum: shards differ: {', '.join(sorted(shapes))}",
            remedy="all shards have one shape and dtype",
        )
    return HeldShards(flats, list(next(iter(tensors.values())).shape) if flats else [])


def plan_canonical_sum(
    transport: Transport, tensors: Mapping[int, Tensor], shards: int, op: ReduceOp
) -> PlannedCall[Tensor]:
    """Plan the sum of shards that are spread over the ranks in any way; every rank gets the result."""
    held = check_shards(tensors, shards, op)

    def work(call: CollectiveCall, deadline: float) -> Tensor:
        ownership, dtype, shape = _exchange_ownership(transport, call, held, shards, deadline)
        ownership.check(transport)
        recipe = canonical.recipe_for(ownership.nodes, shards, op)
        partials = fold_shards(held.flats, ownership.nodes[transport.rank], kernel_of(op), shards)
        total = torch.empty(shape.numel(), dtype=dtype, device="cpu")
        canonical.combine(ReductionTask(transport, call, recipe, partials, total, deadline))
        return total.view(shape)

    text = f"canonical_sum({op.name}, shards={shards})"
    return PlannedCall("canonical_sum", text, work, "canonical")


@dataclass(frozen=True)
class ShardOwnership:
    """Shards that each rank holds, by its index in the group; `check` refuses those that are not every shard
    once."""

    shards: int
    blocks: tuple[tuple[int, ...], ...]

    @cached_property
    def nodes(self) -> tuple[tuple[Node, ...], ...]:
        """The whole subtrees of the canonical tree that each rank can fold by itself."""
        return tuple(tuple(covering_nodes(block, self.shards)) for block in self.blocks)

    @cached_property
    def _texts(self) -> WeakKeyDictionary[Transport, str]:
        return WeakKeyDictionary()

    def text_in(self, transport: Transport) -> str:
        """Return which rank holds which shards, for the text of a call; ranks by their labels."""
        # Made once for a group: every step needs it, and to find the labels costs more than all else here.
        text = self._texts.get(transport)
        if text is None:
            labels = labels_of(transport)
            if len(labels) != len(self.blocks):
                held = counted(len(self.blocks), "rank")
                raise UsageError(
                    f"fold_partials: the shards are divided among {held}, and the group has {len(labels)}",
                    remedy="give one block of shards for each rank, an empty one too",
                )
            by_rank = dict(zip(labels, map(list, self.blocks), strict=True))
            text = self._texts[transport] = f"shards={self.shards}, by rank {by_rank}"
        return text

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe from the partials to the sum, where `check` finds nothing wrong."""
        return canonical.recipe_for(self.nodes, self.shards, ReduceOp.SUM)

    @cached_property
    def _wrong(self) -> tuple[list[int], dict[int, list[int]]]:
        """The shards that no rank holds, and those that several hold, with the indexes of these."""
        owners: dict[int, list[int]] = {}
        for index, block in enumerate(self.blocks):
            for shard in block:
                owners.setdefault(shard, []).append(index)
        missing = [shard for shard in range(self.shards) if shard not in owners]
        return missing, {shard: indexes for shard, indexes in owners.items() if len(indexes) > 1}

    def check(self, transport: Transport) -> None:
        """Raise UsageError where not every shard is held once; ranks by their labels."""
        missing, double = self._wrong
        if not missing and not double:
            return
        labels = labels_of(transport)
        noun = "shard" if len(missing) == 1 else "shards"
        parts = [f"no rank holds {noun} {listed(missing)}"] if missing else []
        for shard, indexes in double.items():
            holders = ranks((labels[index] for index in indexes), all_named=True)
            parts.append(f"shard {shard} is held by {holders}")
        raise UsageError(
            f"canonical_sum over {counted(self.shards, 'shard')}: {'; '.join(parts)}",
            remedy="each shard is held by exactly one rank",
        )


def plan_fold_partials(
    transport: Transport,
    partials: Sequence[Tensor],
    ownership: ShardOwnership,
    out: Tensor,
    checksum: ChecksumRequest | None,
) -> PlannedCall[None]:
    """Plan the sum of partials that the ranks have folded; all are flat, of out's dtype and size."""

    def work(call: CollectiveCall, deadline: float) -> None:
        expected = len(ownership.nodes[transport.rank])
        if len(partials) != expected or any(
            partial.shape != out.shape or partial.dtype != out.dtype for partial in partials
        ):
            raise UsageError(
                f"fold_partials: {counted(len(partials), 'partial')} "
                f"{[describe(partial) for partial in partials]} where "
                f"{counted(expected, 'partial', 'is', 'are')} due, of {describe(out)}",
                remedy="fold this rank's shards into one tensor per node of ownership.nodes[rank]",
            )
        ownership.check(transport)
        recipe = ownership.recipe
        canonical.combine(ReductionTask(transport, call, recipe, partials, out, deadline, checksum))

    checked = "" if checksum is None else ", checksum"
    text = f"fold_partials({ownership.text_in(transport)}, {out.dtype}[{out.numel()}]{checked})"
    return PlannedCall("fold_partials", text, work, "canonical")


def _exchange_ownership(
    transport: Transport, call: CollectiveCall, held: HeldShards, shards: int, deadline: float
) -> tuple[ShardOwnership, torch.dtype, torch.Size]:
    """Exchange shard ownership, dtype and shape; ranks without a shard learn these from the others."""
    dtype = dtype_name(next(iter(held.flats.values())).dtype) if held.flats else ""
    mine = encode_message([list(held.flats), dtype, held.shape], "canonical_sum")
    peers = peers_of(transport)
    messages = transfer(transport, call, dict.fromkeys(peers, mine), peers, deadline)
    messages[transport.rank] = mine
    announced = [messages[rank].decoded() for rank in range(transport.world_size)]
    kinds = {(name, tuple(size)): rank for rank, (_, name, size) in enumerate(announced) if name}
    if len(kinds) != 1:
        labels = labels_of(transport)
        listing = "; ".join(
            f"rank {labels[rank]} has {name}{list(size)}" for (name, size), rank in kinds.items()
        )
        raise UsageError(
            f"canonical_sum: the ranks' shards do not fit together: {listing or 'no rank has any'}",
            remedy="all shards have one shape and dtype",
        )
    name, size = next(iter(kinds))
    ownership = ShardOwnership(shards, tuple(tuple(owned) for owned, _, _ in announced))
    return ownership, getattr(torch, name), torch.Size(size)
