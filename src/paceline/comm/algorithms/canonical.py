"""Canonical all-reduce: the same bits for any number of ranks and any split of the shards among them.

Idea: the sum is defined by the shards alone, as one fixed balanced binary tree over the shard index
(fold.py). A rank folds the largest whole subtrees of the shards it holds; those partials travel. Each rank
owns a slice of the tensor, gets everybody's partials of that slice, folds them along the tree and shares the
result.
What travels: with one partial per rank the ring's optimum, 2(N-1)/N of the message per rank; a rank that
holds p partials sends its slices p times.
What it costs: 2 rounds of latency, as `direct`; the fold reads what `direct` reads. 16-bit floats travel as
fp32 partials.
What it asks: a window where there is one, else messages between any two ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

from paceline.comm.algorithms.hops import cut
from paceline.comm.algorithms.job import Job
from paceline.comm.algorithms.seals import Messages, MessageSeals, Sealing
from paceline.comm.algorithms.window import reduce_in_window
from paceline.comm.algorithms.work import Recipe, mark_untouched
from paceline.comm.calls import Call
from paceline.comm.cost import Links, Situation
from paceline.comm.fold import Node, covering_nodes, fold_over, fold_shards, tree_fold
from paceline.comm.ops import ReduceOp, accumulator_dtype, finish, kernel_of
from paceline.comm.transport.base import Transport
from paceline.core.errors import PacelineError


def run(job: Job) -> None:
    """Every rank's contribution is one shard."""
    size = job.transport.world_size
    flat = job.flat.to(accumulator_dtype(job.flat.dtype))
    combine(job.transport, job.call, recipe(size, job.op), [flat], job.out, job.deadline)


def sum_shards(
    transport: Transport,
    call: Call,
    shards_held: Mapping[int, Tensor],
    holdings: Mapping[int, Sequence[int]],
    shards: int,
    op: ReduceOp,
    out: Tensor,
    deadline: float,
) -> None:
    """Sums shards that are spread over the ranks as `holdings` says; this rank holds `shards_held`."""
    nodes = tuple(tuple(covering_nodes(holdings[rank], shards)) for rank in range(transport.world_size))
    partials = fold_shards(shards_held, nodes[transport.rank], kernel_of(op), shards)
    combine(transport, call, recipe_for(nodes, shards, op), partials, out, deadline)


@cache
def recipe(size: int, op: ReduceOp) -> Recipe:
    """One shard per rank, folded along the tree."""
    return recipe_for(tuple((Node(rank, 0),) for rank in range(size)), size, op)


@lru_cache(maxsize=256)
def recipe_for(nodes: tuple[tuple[Node, ...], ...], shards: int, op: ReduceOp) -> Recipe:
    """How the partials that the ranks hold (`nodes` by rank) become the sum; the same splits come again
    and again."""
    sources = tuple((rank, position) for rank, held in enumerate(nodes) for position in range(len(held)))
    return Recipe(
        tree_fold([nodes[rank][position] for rank, position in sources], shards), sources, op, shards
    )


def combine(
    transport: Transport,
    call: Call,
    recipe: Recipe,
    partials: Sequence[Tensor],
    out: Tensor,
    deadline: float,
    sealing: Sealing | None = None,
) -> None:
    """Everybody's partials, as the recipe says, into `out` on every rank; the partials are only read."""
    if transport.window is not None:
        reduce_in_window(transport, transport.window, call, recipe, partials, out, deadline, sealing)
    else:
        _by_messages(transport, call, recipe, partials, out, deadline, sealing)


def _by_messages(
    transport: Transport,
    call: Call,
    recipe: Recipe,
    partials: Sequence[Tensor],
    out: Tensor,
    deadline: float,
    sealing: Sealing | None,
) -> None:
    rank, size = transport.rank, transport.world_size
    slices = cut(out.numel(), size)
    start, stop = slices[rank]
    wide = accumulator_dtype(out.dtype)
    peers = [peer for peer in range(size) if peer != rank]
    sends = [(peer, partial[slice(*slices[peer])]) for peer in peers for partial in partials]
    inputs = [
        partials[position][start:stop]
        if source == rank
        else torch.empty(stop - start, dtype=wide, device="cpu")
        for source, position in recipe.sources
    ]
    arriving = [
        (source, tensor) for (source, _), tensor in zip(recipe.sources, inputs, strict=True) if source != rank
    ]
    own = [partial[start:stop] for partial in partials]
    seals = None if sealing is None else MessageSeals(sealing, sends, own)
    try:
        _exchange(transport, seals, call, sends, arriving, deadline)
    except PacelineError as error:
        if seals is None or seals.intact():
            mark_untouched(error)
        raise
    fold_over(
        recipe.fold,
        kernel_of(recipe.op),
        inputs,
        out[start:stop],
        wide,
        lambda total: finish(recipe.op, total, recipe.contributions),
    )
    # Who finds a result damaged on its way fails alone: the others' results are right, and they know it.
    results = [(peer, out[start:stop]) for peer in peers]
    seals = None if sealing is None else MessageSeals(Sealing(), results)
    arriving = [(peer, out[slice(*slices[peer])]) for peer in peers]
    _exchange(transport, seals, call, results, arriving, deadline)


def _exchange(
    transport: Transport,
    seals: MessageSeals | None,
    call: Call,
    sends: Messages,
    receives: Messages,
    deadline: float,
) -> None:
    if seals is None:
        transport.exchange(call, sends, receives, deadline)
    else:
        seals.exchange(transport, call, receives, deadline)


def cost(situation: Situation, links: Links) -> float:
    """Never chosen by itself: asking for the same bits is the caller's decision."""
    return float("inf")
