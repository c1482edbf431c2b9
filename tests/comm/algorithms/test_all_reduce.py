"""Every all-reduce algorithm against the same reduction in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.comm.ranks import (
    LARGE,
    SIZES,
    combined,
    on_hosts,
    same_bits,
    small_slot,
    two_hosts,
    whole_numbers,
    wide_range,
)
from torch import Tensor

from paceline.comm.context import DistributedContext
from paceline.comm.ops import ReduceOp
from paceline.testing.thread_transport import run_ranks

ALGORITHMS = ("direct", "ring", "tree", "hierarchical", "canonical")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def allowed(op: ReduceOp, dtype: torch.dtype) -> bool:
    if op is ReduceOp.AVERAGE:
        return dtype.is_floating_point or dtype.is_complex
    return not (dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX))


def group(ctx: DistributedContext, algorithm: str) -> DistributedContext:
    return on_hosts(ctx, two_hosts(ctx.world_size)) if algorithm == "hierarchical" else ctx


def expected(op: ReduceOp, dtype: torch.dtype, size: int, ranks: int) -> Tensor:
    return combined(op, [whole_numbers(rank, size, dtype) for rank in range(ranks)])


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_operation_on_every_dtype(algorithm, ranks):
    cases = [(op, dtype) for op in ReduceOp for dtype in DTYPES if allowed(op, dtype)]

    def every(ctx: DistributedContext) -> list[Tensor]:
        ctx = group(ctx, algorithm)
        return [ctx.all_reduce(whole_numbers(ctx.rank, 13, dtype), op, algorithm) for op, dtype in cases]

    results = run_ranks(ranks, every)
    for position, (op, dtype) in enumerate(cases):
        reference = expected(op, dtype, 13, ranks)
        for rank, of_rank in enumerate(results):
            assert of_rank[position].dtype == dtype
            assert torch.equal(of_rank[position], reference), (op, dtype, rank)


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_messages_of_every_length(algorithm, ranks):
    """None, fewer than ranks, odd, the longest of the short way and the first beyond it."""
    lengths = [0, 1, ranks, 1023, small_slot(ranks), small_slot(ranks) + 1]
    kinds = [(length, torch.float32) for length in lengths]
    kinds += [(length, torch.bfloat16) for length in (0, 1, 1023, 2 * small_slot(ranks) + 1)]

    def every(ctx: DistributedContext) -> list[Tensor]:
        ctx = group(ctx, algorithm)
        return [
            ctx.all_reduce(whole_numbers(ctx.rank, length, dtype), "sum", algorithm)
            for length, dtype in kinds
        ]

    results = run_ranks(ranks, every)
    for position, (length, dtype) in enumerate(kinds):
        reference = expected(ReduceOp.SUM, dtype, length, ranks)
        assert all(torch.equal(of_rank[position], reference) for of_rank in results), (length, dtype)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_message_of_several_chunks(algorithm, ranks):
    length = 900_001  # 3.4 MiB of float32: four chunks of the window, many times the ring buffer

    def one(ctx: DistributedContext) -> Tensor:
        result: Tensor = group(ctx, algorithm).all_reduce(
            whole_numbers(ctx.rank, length, torch.float32), "average", algorithm
        )
        return result

    reference = expected(ReduceOp.AVERAGE, torch.float32, length, ranks)
    assert all(torch.equal(result, reference) for result in run_ranks(ranks, one))


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_ranks_get_the_same_bits_near_the_true_sum(algorithm, ranks):
    lengths = (1, 1001, LARGE)

    def every(ctx: DistributedContext) -> list[Tensor]:
        ctx = group(ctx, algorithm)
        return [ctx.all_reduce(wide_range(ctx.rank, length), "sum", algorithm) for length in lengths]

    results = run_ranks(ranks, every)
    for position, length in enumerate(lengths):
        assert same_bits([of_rank[position] for of_rank in results])
        parts = [wide_range(rank, length).double() for rank in range(ranks)]
        magnitude = sum(part.abs() for part in parts)
        error = (results[0][position].double() - sum(parts)).abs()
        assert bool((error <= ranks * torch.finfo(torch.float32).eps * magnitude).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_sixteen_bit_floats_are_summed_in_fp32_and_rounded_once(dtype, ranks):
    """One addition in the narrow dtype would lose the ones; a second rounding would show in the average."""
    large = 256.0 if dtype == torch.bfloat16 else 2048.0
    exact = torch.tensor(large + ranks - 1)

    def every(ctx: DistributedContext) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
        results = {}
        for algorithm in ALGORITHMS:
            for length in (5, 2 * LARGE):
                data = torch.full((length,), large if ctx.rank == 0 else 1.0).to(dtype)
                here = group(ctx, algorithm)
                results[algorithm, length] = (
                    here.all_reduce(data, "sum", algorithm),
                    here.all_reduce(data, "average", algorithm),
                )
        return results

    for of_rank in run_ranks(ranks, every):
        for (algorithm, length), (total, mean) in of_rank.items():
            assert torch.equal(total, exact.to(dtype).expand(length)), algorithm
            assert torch.equal(mean, (exact / ranks).to(dtype).expand(length)), algorithm


def test_integers_wrap_as_in_torch():
    def every(ctx: DistributedContext) -> list[Tensor]:
        data = torch.tensor([200, 255, 1], dtype=torch.uint8)
        return [group(ctx, name).all_reduce(data, "sum", name) for name in ALGORITHMS]

    for of_rank in run_ranks(3, every):
        assert all(result.tolist() == [600 % 256, 765 % 256, 3] for result in of_rank)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_values_that_are_not_finite_reach_all_ranks(algorithm):
    def one(ctx: DistributedContext) -> Any:
        data = torch.tensor([float("inf"), float("nan"), 1.0, float("inf")])
        if ctx.rank == 1:
            data = torch.tensor([1.0, 1.0, 1.0, float("-inf")])
        return group(ctx, algorithm).all_reduce(data, "sum", algorithm).tolist()

    for result in run_ranks(3, one):
        assert result[0] == float("inf")
        assert result[1] != result[1]
        assert result[2] == 3.0
        assert result[3] != result[3]


HOSTS = [
    (4, [[0, 1], [2, 3]]),
    (4, [[0, 3], [1, 2]]),
    (5, [[4], [0, 1, 2, 3]]),
    (6, [[0, 1], [2, 3], [4, 5]]),
    (7, [[6, 5, 4], [3], [2, 1, 0]]),
    (4, [[0], [1], [2], [3]]),
    (4, [[0, 1, 2, 3]]),
    (3, [[0, 1], [], [2]]),
]


@pytest.mark.parametrize(("ranks", "hosts"), HOSTS)
def test_hierarchical_over_any_grouping(ranks, hosts):
    def every(ctx: DistributedContext) -> list[Tensor]:
        here = on_hosts(ctx, hosts)
        return [
            here.all_reduce(whole_numbers(ctx.rank, length, dtype), op, "hierarchical")
            for length in (3, 5000)
            for dtype in (torch.float32, torch.bfloat16)
            for op in (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MAX)
        ]

    references = [
        expected(op, dtype, length, ranks)
        for length in (3, 5000)
        for dtype in (torch.float32, torch.bfloat16)
        for op in (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MAX)
    ]
    for of_rank in run_ranks(ranks, every):
        assert all(torch.equal(a, b) for a, b in zip(of_rank, references, strict=True))


def test_ring_all_reduce_averages():
    def one(ctx: DistributedContext) -> Tensor:
        result: Tensor = ctx.ring_all_reduce(torch.full((7,), float(ctx.rank)))
        return result

    assert all(torch.equal(result, torch.full((7,), 1.5)) for result in run_ranks(4, one))
