"""ctx.empty: memory that peers reach, given back when no tensor uses it any more."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tests.comm.ranks import LARGE, processes, raised
from torch import Tensor

from paceline.comm.context import DistributedContext
from paceline.core.errors import ResourceError, UsageError
from paceline.testing.thread_transport import run_ranks

PAGE = 4096


def arena_of(ctx: DistributedContext) -> Any:
    return ctx.transport._arena  # type: ignore[attr-defined]


def inside(ctx: DistributedContext, tensor: Tensor) -> bool:
    assert ctx.transport.window is not None
    return ctx.transport.window.offset_of(tensor) is not None


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (0, 5), (1000, 7)])
def test_any_shape_and_dtype(shape, dtype):
    def one(ctx: DistributedContext) -> None:
        for tensor in (
            ctx.empty(*shape, dtype=dtype),
            ctx.empty(shape, dtype=dtype),
            ctx.empty(list(shape), dtype=dtype),
        ):
            assert tensor.shape == shape
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
            tensor.fill_(1)
            assert bool((tensor == 1).all())
            if tensor.numel():
                assert inside(ctx, tensor)
                assert tensor.data_ptr() % PAGE == 0

    run_ranks(1, one)


def test_the_default_dtype_and_torch_size():
    def one(ctx: DistributedContext) -> None:
        assert ctx.empty(3).dtype == torch.get_default_dtype()
        assert ctx.empty(torch.Size([2, 2])).shape == (2, 2)

    run_ranks(1, one)


def test_memory_is_used_again_after_the_last_view_is_gone():
    def one(ctx: DistributedContext) -> None:
        free = arena_of(ctx).free_ranges
        first = ctx.empty(100_000)
        address = first.data_ptr()
        view = first[10:20].view(2, 5).t()
        view.fill_(3)
        del first
        second = ctx.empty(100_000)
        assert second.data_ptr() != address  # the view still holds the first
        second.fill_(7)
        assert view.flatten().tolist() == [3.0] * 10
        del view
        third = ctx.empty(100_000)
        assert third.data_ptr() == address
        assert not third.any()  # its pages were given back, so new ones are zero
        del second, third
        assert arena_of(ctx).free_ranges == free

    run_ranks(1, one)


def test_other_ways_to_keep_a_tensor_keep_its_memory():
    def one(ctx: DistributedContext) -> None:
        kept: dict[str, Any] = {
            "parameter": torch.nn.Parameter(ctx.empty(2000)),
            "array": ctx.empty(2000).numpy(),
            "detached": ctx.empty(2000).detach(),
            "bytes": ctx.empty(2000).view(torch.uint8),
            "storage": ctx.empty(2000).untyped_storage(),
        }
        gc.collect()
        fresh = ctx.empty(2000)
        addresses = {
            kept["parameter"].data_ptr(),
            kept["array"].ctypes.data,
            kept["detached"].data_ptr(),
            kept["bytes"].data_ptr(),
            kept["storage"].data_ptr(),
        }
        assert len(addresses) == 5
        assert fresh.data_ptr() not in addresses

    run_ranks(1, one)


def test_freed_ranges_grow_together():
    def one(ctx: DistributedContext) -> None:
        arena = arena_of(ctx)
        free = arena.free_ranges
        blocks: list[Any] = [ctx.empty(PAGE // 4 * (size + 1)) for size in range(9)]
        for index in (1, 3, 5, 7, 0, 2, 8, 4, 6):
            blocks[index] = None
        assert arena.free_ranges == free

    run_ranks(1, one)


def test_a_thousand_gradients_do_not_use_more_than_one():
    def one(ctx: DistributedContext) -> set[int]:
        addresses = set()
        for _ in range(1000):
            gradient = ctx.empty(50_000)
            addresses.add(gradient.data_ptr())
            gradient[:10].fill_(1)
            del gradient
        return addresses

    assert len(run_ranks(1, one)[0]) == 1


def test_large_allocations_cost_nothing_until_they_are_written():
    def one(ctx: DistributedContext) -> None:
        huge = ctx.empty(8 << 30, dtype=torch.uint8)
        huge[0] = huge[-1] = 5
        assert huge.numel() == 8 << 30
        assert int(huge[-1]) == 5
        del huge
        assert not ctx.empty(100).any()

    run_ranks(1, one)


@pytest.mark.parametrize("size", [1 << 45, 1 << 61, 1 << 70])
def test_more_than_there_is(size):
    def one(ctx: DistributedContext) -> None:
        free = arena_of(ctx).free_ranges
        error = raised(ResourceError, ctx.empty, size)
        assert "shared memory" in str(error)
        assert error.remedy
        assert arena_of(ctx).free_ranges == free
        ctx.empty(10)

    run_ranks(1, one)


@pytest.mark.parametrize(
    "shape", [(-1,), (2, -3), (2.5,), ("3",), (None,), ((2, "a"),), ((2, 2), 3)], ids=str
)
def test_bad_shapes_are_refused(shape):
    def one(ctx: DistributedContext) -> None:
        assert "empty" in str(raised(UsageError, ctx.empty, *shape))

    run_ranks(1, one)


def test_tensors_outlive_their_context():
    tensors = run_ranks(2, lambda ctx: ctx.empty(1000).fill_(float(ctx.rank + 1)))
    gc.collect()
    assert [float(tensor.sum()) for tensor in tensors] == [1000.0, 2000.0]
    assert float((tensors[0] + tensors[1]).sum()) == 3000.0


def _reduce_shared(ctx: Any) -> Any:
    """Gradients that live in shared memory, as between processes."""
    free = arena_of(ctx).free_ranges
    gradients = [ctx.empty(size) for size in (10, LARGE, 1_000)]
    for turn in range(3):
        for gradient in gradients:
            gradient.fill_(float(ctx.rank + turn))
        for gradient in gradients:
            ctx.all_reduce(gradient, "average", out=gradient)
        if any(
            float(gradient.max()) != 0.5 + turn or float(gradient.min()) != 0.5 + turn
            for gradient in gradients
        ):
            return "wrong"
    del gradients, gradient
    return len(free) == 1 and arena_of(ctx).free_ranges == free


def test_between_processes():
    assert processes(_reduce_shared, workers=2) == [True, True]
