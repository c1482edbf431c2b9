"""Folding while computing is the canonical tree of comm/fold.py, for every block and every deal."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from tests.comm.ranks import canonical_reference, wide_range
from torch import Tensor, nn

from paceline.comm.context import DistributedContext
from paceline.comm.fold import covering_nodes, fold_shards
from paceline.comm.ops import ReduceOp, kernel_of
from paceline.comm.shards import Holdings
from paceline.comm.transport.threads import run_ranks
from paceline.core.errors import UsageError
from paceline.data.plan import deal
from paceline.train.gradients import Flat, Layout
from paceline.train.shard_fold import ShardFold

MOST = 17


def contribution(shard: int) -> Tensor:
    return wide_range(shard, 5)


def make_flat() -> Flat:
    layout = Layout({"weight": nn.Parameter(torch.zeros(5))}, tail=2, ballot=1)
    return Flat(layout, lambda size, dtype, device: torch.empty(size, dtype=dtype), torch.device("cpu"))


def test_every_block_folds_into_the_nodes_of_the_canonical_tree() -> None:
    fold = ShardFold(make_flat)
    for shards in range(1, MOST + 1):
        held = {shard: contribution(shard) for shard in range(shards)}
        for first, stop in combinations(range(shards + 1), 2):
            block = range(first, stop)
            fold.start(shards)
            for shard in block:
                fold.deposit(shard, [held[shard]], torch.full((2,), float(shard)))
            nodes = covering_nodes(block, shards)
            expected = fold_shards(held, nodes, kernel_of(ReduceOp.SUM), shards)
            assert len(fold.partials) == len(nodes)
            for partial, right in zip(fold.partials, expected, strict=True):
                assert torch.equal(partial.views[0], right)
            assert sum(float(partial.tail[0]) for partial in fold.partials) == sum(block)


@given(st.integers(1, MOST).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(n)))), st.data())
def test_any_shards_in_any_order_fold_into_the_same_bits(
    case: tuple[int, list[int]], data: st.DataObject
) -> None:
    """Also when the memory changes in between, as it does when the group does."""
    shards, order = case
    mine = order[: data.draw(st.integers(1, shards))]
    moves = data.draw(st.sets(st.sampled_from(mine)))
    held = {shard: contribution(shard) for shard in mine}
    fold = ShardFold(make_flat)
    fold.start(shards)
    for shard in mine:
        fold.deposit(shard, [held[shard]], torch.full((2,), float(shard)))
        if shard in moves:
            fold.move()
    nodes = covering_nodes(sorted(mine), shards)
    expected = fold_shards(held, nodes, kernel_of(ReduceOp.SUM), shards)
    assert len(fold.partials) == len(nodes)
    for partial, right in zip(fold.partials, expected, strict=True):
        assert torch.equal(partial.views[0], right)


def test_whole_blocks_need_logarithmic_memory() -> None:
    made: list[Flat] = []

    def make() -> Flat:
        made.append(make_flat())
        return made[-1]

    fold = ShardFold(make)
    for _ in range(3):
        fold.start(64)
        for shard in range(64):
            fold.deposit(shard, [contribution(shard)], torch.zeros(2))
    # One partial waits per level; the leaf is added where its sibling is.
    assert len(made) == 6
    assert torch.equal(
        fold.partials[0].views[0], canonical_reference([contribution(shard) for shard in range(64)])
    )


def test_an_abandoned_step_leaves_nothing() -> None:
    fold = ShardFold(make_flat)
    fold.start(4)
    fold.deposit(0, [contribution(9)], torch.ones(2))
    fold.start(2)
    fold.deposit(0, [contribution(0)], torch.zeros(2))
    fold.deposit(1, [None], torch.zeros(2))
    (total,) = fold.partials
    assert torch.equal(total.views[0], contribution(0) + 0.0)
    assert not total.tail.any()


def cuts(shards: int, workers: int) -> list[list[range]]:
    """Every way to give each worker a contiguous block, some of them empty."""
    edges = [
        [0, *middle, shards]
        for middle in combinations(sorted(list(range(shards + 1)) * (workers - 1)), workers - 1)
    ]
    unique = {tuple(edge) for edge in edges}
    return [[range(a, b) for a, b in pairwise(edge)] for edge in sorted(unique)]


@pytest.mark.parametrize(("shards", "workers"), [(1, 2), (5, 2), (7, 3), (6, 4)])
def test_fold_partials_has_the_bits_of_canonical_sum(shards: int, workers: int) -> None:
    """For every contiguous deal; `out` is a partial of the rank, or other memory where it has none."""
    held = {shard: wide_range(shard, 301) for shard in range(shards)}
    expected = canonical_reference([held[shard] for shard in range(shards)])
    deals = cuts(shards, workers)

    def one(context: DistributedContext) -> int:
        for blocks in deals:
            mine = blocks[context.rank]
            holdings = Holdings(shards, tuple(tuple(block) for block in blocks))
            nodes = holdings.nodes[context.rank]
            partials = []
            for partial in fold_shards(
                {s: held[s].clone() for s in mine}, nodes, kernel_of(ReduceOp.SUM), shards
            ):
                partials.append(context.empty(301).copy_(partial))
            out = partials[0] if partials else context.empty(301)
            assert torch.equal(context.fold_partials(partials, holdings, out), expected)
            summed = context.canonical_sum({shard: held[shard] for shard in mine}, shards)
            assert torch.equal(summed, expected)
        return len(deals)

    assert run_ranks(workers, one) == [len(deals)] * workers


def test_fold_partials_in_place_again_and_again() -> None:
    """The result lies in memory that peers have just read: no rank may overwrite it too early."""
    shards, workers, size = 6, 3, 70_001
    holdings = Holdings(shards, tuple(tuple(block) for block in deal(shards, workers)))

    def one(context: DistributedContext) -> None:
        (node,) = holdings.nodes[context.rank]
        memory = context.empty(size)
        for turn in range(20):
            memory.fill_(float(turn + node.first))
            context.fold_partials([memory], holdings, memory)
            assert torch.equal(memory, torch.full((size,), 3.0 * turn + 0 + 2 + 4))

    run_ranks(workers, one)


def test_fold_partials_refuses_what_does_not_fit() -> None:
    def one(context: DistributedContext) -> None:
        holdings = Holdings(2, ((0,), (1,)))
        with pytest.raises(UsageError, match=r"2 partials .* where 1"):
            context.fold_partials([torch.zeros(3), torch.zeros(3)], holdings, torch.zeros(3))

    run_ranks(2, one)


def test_fold_partials_refuses_shards_that_nobody_holds() -> None:
    def one(context: DistributedContext) -> None:
        holdings = Holdings(3, ((0,), (1,)))
        with pytest.raises(UsageError, match=r"nobody holds \[2\]"):
            context.fold_partials([torch.zeros(3)], holdings, torch.zeros(3))

    run_ranks(2, one)
