"""The canonical sum: one SHA-256, whichever rank holds what."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from tests.comm.ranks import SIZES, canonical_reference, outcomes, sha, wide_range
from torch import Tensor

from paceline.comm.context import DistributedContext
from paceline.comm.ops import ReduceOp
from paceline.core.errors import UsageError
from paceline.testing.thread_transport import run_ranks

Split = Callable[[int, int], list[list[int]]]


def contiguous(shards: int, ranks: int) -> list[list[int]]:
    edges = [shards * part // ranks for part in range(ranks + 1)]
    return [list(range(low, high)) for low, high in itertools.pairwise(edges)]


def interleaved(shards: int, ranks: int) -> list[list[int]]:
    return [list(range(rank, shards, ranks)) for rank in range(ranks)]


def with_an_idle_rank(shards: int, ranks: int) -> list[list[int]]:
    """The first rank has nothing, not even a tensor from which to see the dtype."""
    return [list(range(shards))] if ranks == 1 else [[], *contiguous(shards, ranks - 1)]


def scattered(shards: int, ranks: int) -> list[list[int]]:
    order = torch.randperm(shards, generator=torch.Generator().manual_seed(ranks)).tolist()
    return [sorted(order[low:high]) for low, high in _edges(shards, ranks)]


def _edges(shards: int, ranks: int) -> list[tuple[int, int]]:
    cuts = [0, *(min(shards, 1 + 2 * rank) for rank in range(ranks - 1)), shards]
    return list(itertools.pairwise(cuts))


SPLITS: list[Split] = [contiguous, interleaved, with_an_idle_rank, scattered]
# A float32 scalar, a few in the small slot, several chunks through staging with several partials each.
SHAPES: list[tuple[int, ...]] = [(), (5, 77), (80_001,), (0, 3)]


def summed(
    ctx: DistributedContext, split: list[list[int]], tensors: list[Tensor], op: ReduceOp = ReduceOp.SUM
) -> Tensor:
    held = {shard: tensors[shard] for shard in split[ctx.rank]}
    result: Tensor = ctx.canonical_sum(held, shards=len(tensors), op=op)
    return result


@pytest.mark.parametrize(
    ("shards", "dtype"),
    [(8, torch.float32), (12, torch.float32), (12, torch.float64), (8, torch.bfloat16)],
    ids=str,
)
def test_the_same_sha_for_any_number_of_ranks_and_any_split(shards, dtype):
    cases = {
        shape: [
            wide_range(shard, int(torch.Size(shape).numel())).to(dtype).view(shape) for shard in range(shards)
        ]
        for shape in SHAPES
    }
    expected = {shape: sha(canonical_reference(tensors)) for shape, tensors in cases.items()}
    for ranks in SIZES if dtype == torch.float32 else (1, 3, 8):

        def every(ctx: DistributedContext, ranks: int = ranks) -> dict[tuple[str, tuple[int, ...]], Tensor]:
            return {
                (split.__name__, shape): summed(ctx, split(shards, ranks), tensors)
                for split in SPLITS
                for shape, tensors in cases.items()
            }

        for of_rank in run_ranks(ranks, every):
            for (split, shape), total in of_rank.items():
                assert total.shape == shape
                assert total.dtype == dtype
                assert sha(total) == expected[shape], (ranks, split, shape)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_large_tensors_of_several_chunks(ranks):
    tensors = [wide_range(shard, 300_007) for shard in range(8)]
    expected = sha(canonical_reference(tensors))
    for split in (contiguous, interleaved):
        totals = run_ranks(ranks, summed, split(8, ranks), tensors)
        assert {sha(total) for total in totals} == {expected}


@pytest.mark.parametrize("ranks", SIZES)
def test_one_shard_per_rank_is_the_canonical_all_reduce(ranks):
    tensors = [wide_range(rank, 50_003) for rank in range(ranks)]

    def both(ctx: DistributedContext) -> tuple[Tensor, Tensor, Tensor]:
        mine = tensors[ctx.rank]
        return (
            ctx.canonical_sum({ctx.rank: mine}, shards=ranks),
            ctx.all_reduce(mine, "sum", "canonical"),
            ctx.all_reduce(mine[:99], "sum", "canonical"),
        )

    expected = canonical_reference(tensors)
    for total, reduced, short in run_ranks(ranks, both):
        assert torch.equal(total, expected)
        assert torch.equal(reduced, expected)
        assert torch.equal(short, expected[:99])


@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT])
def test_other_operations_over_shards(op):
    tensors = [wide_range(shard, 31, torch.float64) for shard in range(6)]
    reference = {
        ReduceOp.AVERAGE: lambda: canonical_reference(tensors) / 6,
        ReduceOp.MAX: lambda: torch.stack(tensors).amax(0),
        ReduceOp.MIN: lambda: torch.stack(tensors).amin(0),
    }
    for split in (contiguous, interleaved):
        totals = run_ranks(4, summed, split(6, 4), tensors, op)
        assert all(sha(total) == sha(totals[0]) for total in totals)
        if op in reference:
            assert torch.equal(totals[0], reference[op]())
        else:
            assert torch.allclose(totals[0], torch.stack(tensors).prod(0), rtol=1e-12)


def test_shards_in_any_memory_and_order_are_not_changed():
    tensors = [wide_range(shard, 12 * 9).view(12, 9).t() for shard in range(5)]
    before = [tensor.clone() for tensor in tensors]

    def one(ctx: DistributedContext) -> Tensor:
        held = {shard: tensors[shard] for shard in reversed(interleaved(5, 2)[ctx.rank])}
        result: Tensor = ctx.canonical_sum(held, shards=5)
        return result

    expected = canonical_reference(tensors)
    assert all(torch.equal(total, expected) for total in run_ranks(2, one))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_other_memory_is_returned_even_by_one_rank_with_one_shard():
    tensor = torch.ones(4)
    (total,) = run_ranks(1, lambda ctx: ctx.canonical_sum({0: tensor}, shards=1))
    total += 1
    assert torch.equal(tensor, torch.ones(4))


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ([[0, 1], [3]], ["no rank holds shard 2"]),
        ([[0, 1, 2], [2, 3]], ["shard 2 is held by ranks 0 and 1"]),
        ([[0, 1], [1]], ["no rank holds shards 2 and 3", "shard 1 is"]),
        ([[], []], ["no rank has any"]),
    ],
)
def test_shards_that_are_missing_or_held_twice_are_named_on_every_rank(held, words):
    def one(ctx: DistributedContext) -> Tensor:
        result: Tensor = ctx.canonical_sum({shard: torch.ones(3) for shard in held[ctx.rank]}, shards=4)
        return result

    for error in outcomes(2, one):
        assert isinstance(error, UsageError)
        assert all(word in str(error) for word in words)


def test_shards_of_different_kinds_are_refused_on_every_rank():
    def one(ctx: DistributedContext) -> Tensor:
        result: Tensor = ctx.canonical_sum({ctx.rank: torch.ones(3 + ctx.rank)}, shards=2)
        return result

    for error in outcomes(2, one):
        assert isinstance(error, UsageError)
        assert "rank 0 has float32[3]" in str(error)
        assert "rank 1 has float32[4]" in str(error)


@pytest.mark.parametrize(
    ("held", "shards"),
    [
        ({4: torch.ones(1)}, 4),
        ({-1: torch.ones(1)}, 4),
        ({"a": torch.ones(1)}, 4),
        ({0: [1.0]}, 4),
        ({0: torch.ones(1), 1: torch.ones(2)}, 4),
        ({0: torch.ones(1), 1: torch.ones(1, dtype=torch.float64)}, 4),
        ({0: torch.ones(1)}, 0),
        ({0: torch.ones(1)}, "four"),
        ({0: torch.eye(2).to_sparse()}, 4),
        ([torch.ones(1)], 1),
    ],
)
def test_bad_arguments_are_refused_before_anything_travels(held, shards):
    def one(ctx: DistributedContext) -> Tensor:
        if ctx.rank == 0:
            with pytest.raises(UsageError):
                ctx.canonical_sum(held, shards=shards)
        result: Tensor = ctx.canonical_sum({ctx.rank: torch.ones(2)}, shards=2)
        return result

    assert all(result.tolist() == [2.0, 2.0] for result in run_ranks(2, one))
