"""Partial sums while computing are the canonical tree of comm/reduction_order.py, for every assignment."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations

import pytest
import torch
from hypothesis import given, strategies as st
from tests.comm.ranks import canonical_reference, wide_range
from torch import Tensor, nn

from paceline.comm.collectives.shard_sums import ShardOwnership
from paceline.comm.context import DistributedContext
from paceline.comm.ops import ReduceOp, kernel_of
from paceline.comm.reduction_order import covering_nodes, fold_shards
from paceline.core.errors import UsageError
from paceline.data.batch_plan import assign
from paceline.testing.thread_transport import run_ranks
from paceline.train.step.gradient_memory import FlatGradients, GradientLayout
from paceline.train.step.partial_sums import PartialSums

MOST = 17


def contribution(shard: int) -> Tensor:
    return wide_range(shard, 5)


def make_flat() -> FlatGradients:
    layout = GradientLayout({"weight": nn.Parameter(torch.zeros(5))}, scalars=2, counters=1)
    return FlatGradients(
        layout, lambda size, dtype, device: torch.empty(size, dtype=dtype), torch.device("cpu")
    )


def test_every_block_folds_into_the_nodes_of_the_canonical_tree() -> None:
    sums = PartialSums(make_flat)
    for shards in range(1, MOST + 1):
        held = {shard: contribution(shard) for shard in range(shards)}
        for first, stop in combinations(range(shards + 1), 2):
            block = range(first, stop)
            sums.start(shards)
            for shard in block:
                sums.add_shard(shard, [held[shard]], torch.full((2,), float(shard)))
            nodes = covering_nodes(block, shards)
            expected = fold_shards(held, nodes, kernel_of(ReduceOp.SUM), shards)
            assert len(sums.partials) == len(nodes)
            for partial, right in zip(sums.partials, expected, strict=True):
                assert torch.equal(partial.views[0], right)
            assert sum(float(partial.scalars[0]) for partial in sums.partials) == sum(block)


@given(st.integers(1, MOST).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(n)))), st.data())
def test_any_shards_in_any_order_fold_into_the_same_bits(
    case: tuple[int, list[int]], data: st.DataObject
) -> None:
    """Also when the memory changes in between, as it does when the group does."""
    shards, order = case
    mine = order[: data.draw(st.integers(1, shards))]
    moves = data.draw(st.sets(st.sampled_from(mine)))
    held = {shard: contribution(shard) for shard in mine}
    sums = PartialSums(make_flat)
    sums.start(shards)
    for shard in mine:
        sums.add_shard(shard, [held[shard]], torch.full((2,), float(shard)))
        if shard in moves:
            old = sums.partials
            sums.move()
            for partial in old:
                partial.views[0].fill_(torch.nan)
    nodes = covering_nodes(sorted(mine), shards)
    expected = fold_shards(held, nodes, kernel_of(ReduceOp.SUM), shards)
    assert len(sums.partials) == len(nodes)
    for partial, right in zip(sums.partials, expected, strict=True):
        assert torch.equal(partial.views[0], right)


@given(st.integers(1, MOST).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(n)))), st.data())
def test_of_shards_that_are_kept_apart_those_that_count_fold_into_the_same_bits(
    case: tuple[int, list[int]], data: st.DataObject
) -> None:
    """Each is held by itself until it is known which count, also over a change of the memory."""
    shards, order = case
    computed = order[: data.draw(st.integers(1, shards))]
    counted = sorted(data.draw(st.sets(st.sampled_from(computed), min_size=1)))
    sums = PartialSums(make_flat)
    sums.start(shards, apart=True)
    for shard in computed:
        sums.add_shard(shard, [contribution(shard)], torch.full((2,), float(shard)))
    sums.move()
    sums.count_only(counted)
    nodes = covering_nodes(counted, shards)
    held = {shard: contribution(shard) for shard in counted}
    expected = fold_shards(held, nodes, kernel_of(ReduceOp.SUM), shards)
    assert len(sums.partials) == len(nodes)
    for partial, right in zip(sums.partials, expected, strict=True):
        assert torch.equal(partial.views[0], right)
    assert sum(float(partial.scalars[0]) for partial in sums.partials) == sum(counted)


def test_after_it_is_known_which_count_further_shards_are_summed_at_once() -> None:
    sums = PartialSums(make_flat)
    sums.start(4, apart=True)
    for shard in (0, 1, 3):
        sums.add_shard(shard, [contribution(shard)], torch.zeros(2))
    sums.count_only([0, 1])
    for shard in (2, 3):
        sums.add_shard(shard, [contribution(shard)], torch.zeros(2))
    (total,) = sums.partials
    assert torch.equal(total.views[0], canonical_reference([contribution(shard) for shard in range(4)]))


@pytest.mark.parametrize("order", [*permutations(range(4))])
def test_the_left_one_is_the_first_operand_whichever_comes_first(order: tuple[int, ...]) -> None:
    """A sum of two NaNs has the payload of one of them."""
    nans = [torch.full((5,), 0x7FC00000 + shard, dtype=torch.int32).view(torch.float32) for shard in range(4)]
    expected = (nans[0] + nans[1]) + (nans[2] + nans[3])
    sums = PartialSums(make_flat)
    sums.start(4)
    for shard in order:
        sums.add_shard(shard, [nans[shard]], torch.zeros(2))
    assert torch.equal(sums.partials[0].views[0].view(torch.int32), expected.view(torch.int32))


def test_whole_blocks_need_logarithmic_memory() -> None:
    made: list[FlatGradients] = []

    def make() -> FlatGradients:
        made.append(make_flat())
        return made[-1]

    sums = PartialSums(make)
    for _ in range(3):
        sums.start(64)
        for shard in range(64):
            sums.add_shard(shard, [contribution(shard)], torch.zeros(2))
    # One partial waits per level; the leaf is added where its sibling is.
    assert len(made) == 6
    assert torch.equal(
        sums.partials[0].views[0], canonical_reference([contribution(shard) for shard in range(64)])
    )


def test_an_abandoned_step_leaves_nothing() -> None:
    sums = PartialSums(make_flat)
    sums.start(4)
    sums.add_shard(0, [contribution(9)], torch.ones(2))
    sums.start(2)
    sums.add_shard(0, [contribution(0)], torch.zeros(2))
    sums.add_shard(1, [None], torch.zeros(2))
    (total,) = sums.partials
    assert torch.equal(total.views[0], contribution(0) + 0.0)
    assert not total.scalars.any()


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
            ownership = ShardOwnership(shards, tuple(tuple(block) for block in blocks))
            nodes = ownership.nodes[context.rank]
            partials = []
            for partial in fold_shards(
                {s: held[s].clone() for s in mine}, nodes, kernel_of(ReduceOp.SUM), shards
            ):
                partials.append(context.empty(301).copy_(partial))
            out = partials[0] if partials else context.empty(301)
            assert torch.equal(context.fold_partials(partials, ownership, out), expected)
            summed = context.canonical_sum({shard: held[shard] for shard in mine}, shards)
            assert torch.equal(summed, expected)
        return len(deals)

    assert run_ranks(workers, one) == [len(deals)] * workers


def test_fold_partials_in_place_again_and_again() -> None:
    """The result lies in memory that peers have just read: no rank may overwrite it too early."""
    shards, workers, size = 6, 3, 70_001
    ownership = ShardOwnership(shards, tuple(tuple(block) for block in assign(shards, workers)))

    def one(context: DistributedContext) -> None:
        (node,) = ownership.nodes[context.rank]
        memory = context.empty(size)
        for turn in range(20):
            memory.fill_(float(turn + node.first))
            context.fold_partials([memory], ownership, memory)
            assert torch.equal(memory, torch.full((size,), 3.0 * turn + 0 + 2 + 4))

    run_ranks(workers, one)


def test_fold_partials_refuses_what_does_not_fit() -> None:
    def one(context: DistributedContext) -> None:
        ownership = ShardOwnership(2, ((0,), (1,)))
        with pytest.raises(UsageError, match=r"2 partials .* where 1"):
            context.fold_partials([torch.zeros(3), torch.zeros(3)], ownership, torch.zeros(3))

    run_ranks(2, one)


def test_fold_partials_refuses_shards_that_no_rank_holds() -> None:
    def one(context: DistributedContext) -> None:
        ownership = ShardOwnership(3, ((0,), (1,)))
        with pytest.raises(UsageError, match="no rank holds shard 2"):
            context.fold_partials([torch.zeros(3)], ownership, torch.zeros(3))

    run_ranks(2, one)
