"""CUDA tensors through a group of processes that share one GPU."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.compression import quantize_gradients
from paceline.comm.context import DistributedContext
from paceline.frontends.spawn import spawn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def reduce_everything(ctx: DistributedContext) -> list[tuple[str, bool]]:
    outcomes = []
    for algorithm in ("auto", "direct", "ring", "tree", "canonical"):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for numel in (0, 5, 300_001):
                data = (torch.arange(numel, device="cuda") % 7 + ctx.rank).to(dtype)
                total = ctx.all_reduce(data, algorithm=algorithm)
                size = ctx.world_size
                expected = ((torch.arange(numel, device="cuda") % 7) * size + size * (size - 1) // 2).to(
                    dtype
                )
                good = total.is_cuda and torch.equal(total, expected)
                outcomes.append((f"{algorithm} {dtype} {numel}", good))
    return outcomes


def test_all_reduce_of_cuda_tensors() -> None:
    for outcomes in spawn(reduce_everything, workers=3):
        assert [what for what, good in outcomes if not good] == []


def in_place(ctx: DistributedContext) -> tuple[bool, bool, bool]:
    data = torch.full((1000, 3), float(ctx.rank), device="cuda")
    same = ctx.all_reduce(data, out=data) is data
    strided = torch.full((10, 4), 1.0, device="cuda").t()
    total = ctx.all_reduce([strided, data])
    return same, bool((data == 1).all()), bool((total[0] == 2).all() and total[1].shape == data.shape)


def test_in_place_and_lists() -> None:
    assert spawn(in_place, workers=2) == [(True, True, True)] * 2


def move(ctx: DistributedContext) -> tuple[str, float]:
    # Messages arrive on the CPU: the receiver may have another GPU, or none.
    weights = ctx.broadcast(torch.full((4,), 3.0, device="cuda") if ctx.is_master else None, root_rank=0)
    compressed = ctx.all_reduce(
        torch.ones(1000, device="cuda"), compression=quantize_gradients(8), algorithm="ring"
    )
    return (weights.device.type if not ctx.is_master else "cpu"), float(compressed.sum())


def test_broadcast_and_compression() -> None:
    assert spawn(move, workers=2) == [("cpu", 2000.0)] * 2
