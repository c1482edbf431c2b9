"""The order of additions: one tree, whichever rank holds which part of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.comm.ranks import canonical_reference, wide_range
from torch import Tensor

from paceline.comm.ops import ReduceOp
from paceline.comm.reduction_order import (
    BLOCK_BYTES,
    Node,
    Recipe,
    ReductionOrder,
    covering_nodes,
    cut,
    fold_over,
    fold_shards,
    left_fold,
    run_blocks,
    tree_fold,
)
from paceline.core.errors import InternalError


def splits(shards: int, ranks: int = 0) -> Iterator[list[list[int]]]:
    """Every way to spread the shards over ranks, up to the numbering of the ranks."""
    if shards == 0:
        yield [[] for _ in range(ranks)]
        return
    for split in splits(shards - 1, ranks):
        for rank in range(len(split)):
            yield [[*held, shards - 1] if place == rank else held for place, held in enumerate(split)]
        yield [*split, [shards - 1]]


def folded(tensors: list[Tensor], split: list[list[int]]) -> tuple[Tensor, ReductionOrder]:
    """What ranks with these shards would compute, one after the other in this process."""
    shards = len(tensors)
    nodes: list[Node] = []
    partials: list[Tensor] = []
    for held in split:
        mine = covering_nodes(held, shards)
        nodes += mine
        partials += fold_shards({shard: tensors[shard] for shard in held}, mine, torch.add, shards)
    fold = tree_fold(nodes, shards)
    out = torch.empty_like(partials[0])
    run_blocks(fold, torch.add, partials, out)
    return out, fold


def leaves(node: Node, shards: int) -> list[int]:
    return [s for s in range(node.index << node.level, (node.index + 1) << node.level) if s < shards]


def whole(first: int, width: int, held: set[int], shards: int) -> list[list[int]]:
    """The maximal whole subtrees by definition, each as the shards below it."""
    below = [shard for shard in range(first, first + width) if shard < shards]
    if not below:
        return []
    if held >= set(below):
        return [below]
    if width == 1:
        return []
    half = width // 2
    return whole(first, half, held, shards) + whole(first + half, half, held, shards)


def next_power(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


@pytest.mark.parametrize("shards", range(1, 9))
def test_every_set_of_held_shards_is_covered_by_its_maximal_subtrees(shards):
    for mask in range(1 << shards):
        held = {shard for shard in range(shards) if mask >> shard & 1}
        nodes = covering_nodes(held, shards)
        assert [leaves(node, shards) for node in nodes] == whole(0, next_power(shards), held, shards)
        # Of several nodes with the same shards it is the lowest: below it, to the right, there is a shard.
        assert all(
            node.level == 0 or leaves(Node(2 * node.index + 1, node.level - 1), shards) for node in nodes
        )


def test_shards_that_do_not_exist_are_held_by_nobody():
    assert covering_nodes([-1, 1, 4, 9], 4) == covering_nodes([1], 4) == [Node(1, 0)]


@pytest.mark.parametrize("shards", range(1, 9))
def test_every_split_gives_the_bits_of_the_definition(shards):
    tensors = [wide_range(shard, 3) for shard in range(shards)]
    expected = canonical_reference(tensors)
    for split in splits(shards):
        assert torch.equal(folded(tensors, split)[0], expected), split


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=70), st.integers(0, 1000))
def test_any_split_of_many_shards_gives_the_bits_of_the_definition(owners, seed):
    shards = len(owners)
    tensors = [wide_range(shard, 2, seed=seed) for shard in range(shards)]
    split = [[shard for shard, owner in enumerate(owners) if owner == rank] for rank in range(7)]
    out, fold = folded(tensors, split)
    assert torch.equal(out, canonical_reference(tensors))
    assert fold.temporaries <= math.log2(next_power(shards)) + 1


def test_the_data_shows_a_wrong_order():
    """Otherwise the tests above would prove nothing."""
    tensors = [wide_range(shard, 64) for shard in range(5)]
    assert not torch.equal(canonical_reference(tensors), canonical_reference(tensors[::-1]))
    assert not torch.equal(canonical_reference(tensors), sum(tensors[1:], tensors[0]))


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8, 12, 100, 1000, 1024])
def test_temporaries_grow_with_the_logarithm(shards):
    fold = tree_fold([Node(shard, 0) for shard in range(shards)], shards)
    assert len(fold.steps) == shards - 1
    assert fold.temporaries <= max((shards - 1).bit_length() - 1, 0)


def test_the_order_in_which_nodes_are_listed_does_not_matter():
    tensors = [wide_range(shard, 8) for shard in range(6)]
    order = [4, 0, 5, 3, 1, 2]
    fold = tree_fold([Node(shard, 0) for shard in order], 6)
    out = torch.empty(8)
    run_blocks(fold, torch.add, [tensors[shard] for shard in order], out)
    assert torch.equal(out, canonical_reference(tensors))


@pytest.mark.parametrize(
    "nodes",
    [
        [Node(0, 0), Node(3, 0)],
        [Node(0, 0), Node(0, 0)],
        [Node(1, 0), Node(1, 1)],
        # Neighbours of one level that are not siblings.
        [Node(1, 0), Node(2, 0)],
        # A shard twice: the last node is a sibling of the first, and not of the one before it.
        [Node(0, 1), Node(2, 0), Node(1, 1)],
    ],
)
def test_nodes_that_are_not_a_cover_are_refused(nodes):
    with pytest.raises(InternalError, match="do not cover 4 shards"):
        tree_fold(nodes, 4)


def test_a_left_fold_goes_from_left_to_right_without_memory_of_its_own():
    tensors = [wide_range(rank, 100) for rank in range(5)]
    fold = left_fold(5)
    out = torch.empty(100)
    run_blocks(fold, torch.add, tensors, out)
    expected = tensors[0].clone()
    for tensor in tensors[1:]:
        expected += tensor
    assert torch.equal(out, expected)
    assert fold.temporaries == 0
    run_blocks(fold, torch.add, tensors, tensors[0])
    assert torch.equal(tensors[0], expected)


def recipe_of(order: ReductionOrder, op: ReduceOp) -> Recipe:
    return Recipe(order, tuple((rank, 0) for rank in range(order.inputs)), op, order.inputs)


def test_a_recipe_knows_how_many_partials_a_rank_has_at_most():
    recipe = Recipe(left_fold(4), ((0, 0), (0, 1), (1, 0), (0, 2)), ReduceOp.SUM, 4)
    assert recipe.most_partials == 3
    assert recipe_of(left_fold(4), ReduceOp.SUM).most_partials == 1


@given(st.integers(0, 300), st.integers(1, 9), st.sampled_from([1, 2, 16]))
def test_elements_are_cut_into_even_parts_that_begin_at_aligned_places(size, parts, align):
    segments = cut(size, parts, align)
    assert len(segments) == parts
    assert [place for first, last in segments for place in range(first, last)] == list(range(size))
    units = [-(-(last - first) // align) for first, last in segments]
    assert max(units) - min(units) <= 1
    assert all(first % align == 0 or first == size for first, _ in segments)


def test_elements_may_be_cut_anywhere_where_no_alignment_is_asked_for():
    assert cut(7, 3) == [(0, 2), (2, 4), (4, 7)]


@pytest.mark.parametrize("place", [0, 1, 2, 4])
@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES // 4, BLOCK_BYTES // 4 * 2 + 5])
def test_a_fold_over_one_of_its_inputs_has_the_bits_of_a_fold_beside_them(place: int, size: int) -> None:
    tensors = [wide_range(rank, size) for rank in range(5)]
    fold = tree_fold([Node(shard, 0) for shard in range(5)], 5)
    expected = torch.empty(size)
    run_blocks(fold, torch.add, tensors, expected)
    expected.div_(5)
    fold_over(recipe_of(fold, ReduceOp.AVERAGE), tensors, tensors[place])
    assert torch.equal(tensors[place].view(torch.int32), expected.view(torch.int32))


def test_a_fold_in_a_wider_dtype_is_rounded_once() -> None:
    tensors = [wide_range(rank, 1000).to(torch.bfloat16) for rank in range(4)]
    fold = tree_fold([Node(shard, 0) for shard in range(4)], 4)
    expected = torch.empty(1000)
    run_blocks(fold, torch.add, tensors, expected)
    out = torch.empty(1000, dtype=torch.bfloat16)
    fold_over(recipe_of(fold, ReduceOp.SUM), tensors, out)
    assert torch.equal(out, expected.to(torch.bfloat16))


@pytest.mark.parametrize("make", [left_fold, lambda n: tree_fold([Node(shard, 0) for shard in range(n)], n)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_sixteen_bits_are_widened_before_the_first_addition(make, dtype, count):
    # 256 + 1 is 256 again in bfloat16, and 2048 + 1 is 2048 in float16.
    large = 256.0 if dtype == torch.bfloat16 else 2048.0
    inputs = [torch.tensor([large if index == 0 else 1.0], dtype=dtype) for index in range(count)]
    out = torch.empty(1)
    run_blocks(make(count), torch.add, inputs, out)
    assert out.item() == large + count - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_single_shard_of_sixteen_bits_is_widened_as_a_sum_of_several_is(dtype):
    tensors = {shard: torch.tensor([256.0], dtype=dtype) for shard in (0, 1, 3)}
    partials = fold_shards(tensors, covering_nodes(tensors, 4), torch.add, 4)
    assert [(partial.dtype, partial.item()) for partial in partials] == [
        (torch.float32, 512.0),
        (torch.float32, 256.0),
    ]


def test_a_sum_on_the_right_of_a_part_of_sixteen_bits_is_not_overwritten_by_it():
    """The sum of shards 6 and 7 waits in a temporary, and the one with 4 and 5 is written there."""
    fold = tree_fold([Node(0, 1), Node(1, 1), Node(2, 1), Node(6, 0), Node(7, 0)], 8)
    inputs = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 2.0, 4.0, 8.0)]
    out = torch.empty(1)
    run_blocks(fold, torch.add, inputs, out)
    assert out.item() == 271.0


def test_a_part_of_sixteen_bits_is_added_to_a_sum_that_ends_as_the_result():
    fold = tree_fold([Node(0, 1), Node(2, 0), Node(3, 0)], 4)
    inputs = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 2.0)]
    out = torch.empty(1)
    run_blocks(fold, torch.add, inputs, out)
    assert (fold.temporaries, out.item()) == (0, 259.0)


def test_long_tensors_are_folded_in_blocks_with_the_same_bits():
    tensors = [wide_range(rank, 200_001) for rank in range(3)]
    out = torch.empty(200_001)
    run_blocks(tree_fold([Node(rank, 0) for rank in range(3)], 3), torch.add, tensors, out)
    assert torch.equal(out, (tensors[0] + tensors[1]) + tensors[2])


def test_a_long_fold_needs_no_more_than_a_block_for_each_temporary():
    out = torch.empty(200_001)
    seen: set[int] = set()

    def add(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
        seen.add(out.untyped_storage().nbytes())
        return torch.add(left, right, out=out)

    fold = tree_fold([Node(rank, 0) for rank in range(4)], 4)
    run_blocks(fold, add, [wide_range(rank, 200_001) for rank in range(4)], out)
    assert seen == {out.untyped_storage().nbytes(), BLOCK_BYTES}


def test_a_shard_that_is_a_whole_part_of_the_tree_is_not_copied():
    tensors = {0: wide_range(0, 10), 2: wide_range(2, 10)}
    partials = fold_shards(tensors, covering_nodes(tensors, 4), torch.add, 4)
    assert [partial.data_ptr() for partial in partials] == [tensors[0].data_ptr(), tensors[2].data_ptr()]


def test_inputs_are_left_as_they_are():
    tensors = {shard: wide_range(shard, 10) for shard in range(7)}
    before = {shard: tensor.clone() for shard, tensor in tensors.items()}
    nodes = covering_nodes(tensors, 7)
    assert len(nodes) == 1
    fold_shards(tensors, nodes, torch.add, 7)
    assert all(torch.equal(tensors[shard], before[shard]) for shard in tensors)


def shuffled_tree(count: int) -> ReductionOrder:
    """The rank that holds the first shard need not be the first to hold one."""
    shards = list(range(count))
    Random(count).shuffle(shards)
    return tree_fold([Node(shard, 0) for shard in shards], count)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize(
    "make", [left_fold, lambda n: tree_fold([Node(shard, 0) for shard in range(n)], n), shuffled_tree]
)
def test_a_fold_in_place_gives_the_same_bits_in_its_home(make, count):
    inputs = [wide_range(index, 50) for index in range(count)]
    fold = make(count)
    expected = torch.empty(50)
    run_blocks(fold, torch.add, inputs, expected)
    for left, right in fold.in_place:
        torch.add(inputs[left], inputs[right], out=inputs[left])
    assert torch.equal(inputs[fold.home], expected)


def test_the_home_of_a_fold_is_the_first_node_whichever_pair_is_added_first():
    nodes = [Node(0, 1), Node(2, 0), Node(3, 0)]
    fold = tree_fold(nodes, 4)
    assert fold.in_place[0] == (1, 2)
    assert fold.home == 0
    inputs = [wide_range(index, 20) for index in range(3)]
    expected = inputs[0] + (inputs[1] + inputs[2])
    for left, right in fold.in_place:
        torch.add(inputs[left], inputs[right], out=inputs[left])
    assert torch.equal(inputs[fold.home], expected)
