"""Compression under every algorithm: equal bits, small errors that do not pile up, a state that continues."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.comm.ranks import on_hosts, refused_then_works, same_bits, two_hosts
from torch import Tensor

from paceline.comm.compression import (
    Compression,
    PowerSGD,
    cast_gradients,
    quantize_gradients,
    sparsify_gradients,
)
from paceline.comm.context import DistributedContext
from paceline.testing.thread_transport import run_ranks

ALGORITHMS = ("direct", "ring", "tree", "hierarchical")
MAKE: dict[str, Callable[[], Compression]] = {
    "fp16": lambda: cast_gradients("fp16"),
    "bf16": lambda: cast_gradients("bf16"),
    "int8": lambda: quantize_gradients(8),
    "int4": lambda: quantize_gradients(4),
    "topk": lambda: sparsify_gradients(0.75),
}
# The largest error of one call, in units of the largest value of the sum; top-k may leave out anything.
TOLERANCE = {"fp16": 0.002, "bf16": 0.015, "int8": 0.02, "int4": 0.4, "topk": 1.0}


def group(ctx: DistributedContext, algorithm: str) -> DistributedContext:
    return on_hosts(ctx, two_hosts(ctx.world_size)) if algorithm == "hierarchical" else ctx


def gradient(rank: int, size: int = 501) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_ranks_get_the_same_bits_close_to_the_sum(algorithm, ranks):
    def every(ctx: DistributedContext) -> dict[str, Tensor]:
        here = group(ctx, algorithm)
        results = {}
        for name, make in MAKE.items():
            mine = gradient(ctx.rank)
            results[name] = here.all_reduce(mine, "sum", algorithm, compression=make())
            assert torch.equal(mine, gradient(ctx.rank))
        return results

    results = run_ranks(ranks, every)
    truth = sum(gradient(rank) for rank in range(ranks))
    assert isinstance(truth, Tensor)
    for name in MAKE:
        assert same_bits([of_rank[name] for of_rank in results]), name
        error = (results[0][name] - truth).abs().max()
        assert error <= TOLERANCE[name] * truth.abs().max() * max(1, ranks / 2), name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_floats_and_averages(algorithm, dtype):
    def one(ctx: DistributedContext) -> Tensor:
        result: Tensor = group(ctx, algorithm).all_reduce(
            gradient(ctx.rank).to(dtype), "average", algorithm, compression=quantize_gradients(8)
        )
        return result

    results = run_ranks(3, one)
    assert same_bits(results)
    assert results[0].dtype == dtype
    truth = torch.stack([gradient(rank) for rank in range(3)]).mean(0)
    assert (results[0].float() - truth).abs().max() < 0.05


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fewer_elements_than_ranks(algorithm, length):
    def every(ctx: DistributedContext) -> list[Tensor]:
        here = group(ctx, algorithm)
        data = torch.full((length,), 2.0)
        return [here.all_reduce(data, "sum", algorithm, compression=make()) for make in MAKE.values()]

    for of_rank in run_ranks(5, every):
        assert all(torch.allclose(result, torch.full((length,), 10.0), rtol=0.2) for result in of_rank)


@pytest.mark.parametrize("name", ["int4", "topk"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_error_feedback_makes_the_running_mean_converge(algorithm, name):
    steps = 24

    def one(ctx: DistributedContext) -> tuple[float, float]:
        here, compression = group(ctx, algorithm), MAKE[name]()
        truth = torch.stack([gradient(rank, 64) for rank in range(4)]).sum(0)
        total = torch.zeros(64)
        errors = []
        for step in range(1, steps + 1):
            total += here.all_reduce(gradient(ctx.rank, 64), "sum", algorithm, compression=compression)
            errors.append(float((total / step - truth).abs().max()))
        return errors[0], errors[-1]

    for first, last in run_ranks(4, one):
        assert last < first / 6


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_saved_state_continues_with_the_same_bits(algorithm):
    def one(ctx: DistributedContext) -> tuple[list[Tensor], list[Tensor]]:
        here = group(ctx, algorithm)

        def steps(compression: Compression, count: int, start: int) -> list[Tensor]:
            return [
                here.all_reduce(
                    gradient(10 * step + ctx.rank), "sum", algorithm, compression=compression, name="w"
                )
                for step in range(start, start + count)
            ]

        kept = quantize_gradients(4)
        steps(kept, 3, 0)
        state = kept.state_dict()
        fresh = quantize_gradients(4)
        fresh.load_state_dict(state)
        return steps(kept, 3, 3), steps(fresh, 3, 3)

    for kept, restored in run_ranks(4, one):
        assert all(torch.equal(a, b) for a, b in zip(kept, restored, strict=True))


def test_names_keep_residuals_apart_and_in_place_works():
    def one(ctx: DistributedContext) -> list[str]:
        compression = quantize_gradients(8)
        for name, length in (("a", 10), ("b", 20)):
            data = torch.ones(length)
            ctx.all_reduce(data, out=data, compression=compression, name=name)
            assert torch.allclose(data, torch.full((length,), 2.0), rtol=0.02)
        return sorted(compression.state_dict())

    assert run_ranks(2, one) == [["codec", "residual.a", "residual.b"]] * 2


def test_lists_of_tensors_are_compressed_as_one():
    def one(ctx: DistributedContext) -> list[Tensor]:
        parts = [torch.full((2, 3), 1.0), torch.full((4,), 2.0)]
        result: list[Tensor] = ctx.all_reduce(parts, "average", compression=cast_gradients("fp16"))
        return result

    for first, second in run_ranks(2, one):
        assert torch.equal(first, torch.ones(2, 3))
        assert torch.equal(second, torch.full((4,), 2.0))


def test_auto_with_compression_chooses_messages():
    def one(ctx: DistributedContext) -> list[str]:
        ctx.enable_profiling()
        ctx.all_reduce(torch.ones(1000), compression=quantize_gradients(8))
        return list(ctx.get_communication_stats()["operations"]["all_reduce"])

    assert all(names[0] in ALGORITHMS for names in run_ranks(2, one))


def test_canonical_cannot_be_compressed():
    refused_then_works(
        lambda ctx: ctx.all_reduce(torch.ones(9), "sum", "canonical", compression=quantize_gradients(8)),
        "canonical",
    )


def test_native_needs_torch_distributed():
    refused_then_works(lambda ctx: ctx.all_reduce(torch.ones(9), "sum", "native"), "native")


@pytest.mark.parametrize(
    ("data", "op"),
    [
        (torch.ones(3, dtype=torch.int32), "sum"),
        (torch.ones(3), "max"),
        (torch.ones(3, dtype=torch.complex64), "sum"),
    ],
)
def test_only_sums_of_floats_are_compressed(data, op):
    refused_then_works(
        lambda ctx: ctx.all_reduce(data, op, "ring", compression=quantize_gradients(8)), "compression works"
    )


def test_a_residual_of_another_size_is_refused_before_anything_travels():
    def residual_of_another_size(ctx: DistributedContext) -> None:
        compression = quantize_gradients(8)
        compression.load_state_dict({**compression.state_dict(), "residual.w": torch.zeros(5)})
        ctx.all_reduce(torch.ones(9), "sum", "ring", compression=compression, name="w")

    refused_then_works(residual_of_another_size, "residual")


@pytest.mark.parametrize("value", ["int8", 8, object()])
def test_compression_of_an_unknown_kind_is_refused(value):
    refused_then_works(lambda ctx: ctx.all_reduce(torch.ones(3), compression=value), "compression")


class TestPowerSGD:
    @staticmethod
    def gradients(rank: int) -> list[Tensor]:
        """Rank-one matrices that sum to rank two, and a vector, which travels as it is."""
        generator = torch.Generator().manual_seed(rank)
        left = torch.randn(20, 1, generator=generator)
        return [left @ torch.randn(1, 30, generator=generator), torch.randn(7, generator=generator)]

    @pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS, "canonical"])
    @pytest.mark.parametrize("op", ["sum", "average"])
    def test_low_rank_gradients_are_combined(self, algorithm, op):
        def one(ctx: DistributedContext) -> list[Tensor]:
            here, compression = group(ctx, algorithm), PowerSGD(rank=2, min_compression=1.0)
            result: list[Tensor] = []
            for _ in range(4):
                result = here.all_reduce(self.gradients(ctx.rank), op, algorithm, compression=compression)
            return result

        results = run_ranks(2, one)
        matrices, vectors = zip(*(self.gradients(rank) for rank in range(2)), strict=True)
        scale = 1.0 if op == "sum" else 0.5
        for matrix, vector in results:
            assert torch.allclose(matrix, (matrices[0] + matrices[1]) * scale, atol=1e-3)
            assert torch.allclose(vector, (vectors[0] + vectors[1]) * scale, atol=1e-5)
        assert same_bits([matrix for matrix, _ in results])

    def test_the_kind_and_out_are_as_for_any_all_reduce(self):
        def one(ctx: DistributedContext) -> None:
            compression = PowerSGD(rank=1, min_compression=1.0)
            matrix = torch.ones(8, 8)
            single = ctx.all_reduce(matrix, compression=compression)
            assert isinstance(single, Tensor)
            assert torch.allclose(single, torch.full((8, 8), 2.0), atol=1e-4)
            assert torch.equal(matrix, torch.ones(8, 8))
            assert ctx.all_reduce(matrix, out=matrix, compression=compression) is matrix
            assert torch.allclose(matrix, torch.full((8, 8), 2.0), atol=1e-4)

        run_ranks(2, one)

    def test_every_name_has_a_state_of_its_own(self):
        def one(ctx: DistributedContext) -> None:
            compression = PowerSGD(rank=1, min_compression=1.0)
            for name, size in (("first", 8), ("second", 12)):
                result = ctx.all_reduce(torch.ones(size, size), compression=compression, name=name)
                assert torch.allclose(result, torch.full((size, size), 2.0), atol=1e-4)

        run_ranks(2, one)

    def test_there_is_no_asynchronous_form(self):
        refused_then_works(
            lambda ctx: ctx.all_reduce(torch.ones(8, 8), compression=PowerSGD(), async_op=True),
            "asynchronous",
        )

    @pytest.mark.parametrize("data", [3.0, "text", [1.0, 2.0], torch.ones(3, 3, dtype=torch.int64)])
    def test_what_it_cannot_compress_is_refused(self, data):
        refused_then_works(lambda ctx: ctx.all_reduce(data, compression=PowerSGD()))

    def test_other_operations_are_refused(self):
        refused_then_works(
            lambda ctx: ctx.all_reduce(torch.ones(3, 3), "max", compression=PowerSGD()), "sums only"
        )
