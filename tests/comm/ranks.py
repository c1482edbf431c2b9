"""Ranks for the tests of this folder: threads for most of them, processes where only those will do."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from tests.waiting import wait_for
from torch import Tensor

from paceline.comm.context import DistributedContext
from paceline.comm.ops import ReduceOp, accumulator_dtype
from paceline.comm.transport.base import ReportsWaits
from paceline.core.errors import PacelineError, UsageError
from paceline.core.shm_segment_layout import SegmentLayout
from paceline.frontends.spawn import spawn
from paceline.testing.thread_transport import run_ranks

E = TypeVar("E", bound=Exception)

SIZES = (1, 2, 3, 4, 5, 7, 8)
LARGE = 300_001
"""Float32 elements that fit no small slot of any group: such tensors take another way through the window."""


def processes(fn: Callable[..., Any], *args: Any, workers: int = 2) -> list[Any]:
    return spawn(fn, *args, workers=workers, threads=1, timeout=60)


def outcomes(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Any]:
    """What each rank returned, or the Paceline error it raised; all ranks begin at the same moment."""
    together = threading.Barrier(world_size)

    def guarded(ctx: DistributedContext) -> Any:
        together.wait(timeout)
        try:
            return fn(ctx, *args)
        except PacelineError as error:
            ctx.close(error)  # as a rank does that ends with it
            return error.with_traceback(None)  # which would keep the rank's memory alive

    return run_ranks(world_size, guarded, timeout=timeout)


def raised(kind: type[E], call: Callable[..., Any], *args: Any) -> E:
    """The error of a call, without its traceback, which would keep the rank's memory for long."""
    try:
        call(*args)
    except kind as error:
        return error.with_traceback(None)
    raise AssertionError(f"there was no {kind.__name__}")


def refused_then_works(call: Callable[[DistributedContext], Any], match: str | None = None) -> None:
    """The mistake is made on rank 0 only and found there; afterwards the group is as good as new."""

    def one(ctx: DistributedContext) -> Any:
        if ctx.rank == 0:
            error = raised(UsageError, call, ctx)
            assert error.remedy
            assert match is None or re.search(match, str(error))
        return ctx.all_reduce([1.0]), ctx.all_gather(ctx.rank)

    assert run_ranks(2, one, timeout=20) == [([2.0], [0, 1])] * 2


def on_hosts(ctx: DistributedContext, hosts: Sequence[Sequence[int]]) -> DistributedContext:
    """The same ranks as if they were spread over these hosts."""
    return DistributedContext.from_transport(ctx.transport, timeout=30.0, hosts=hosts)


def two_hosts(world_size: int) -> list[list[int]]:
    """Ranks dealt out in turn, so that hosts are neither of one size nor in rank order."""
    return [list(range(host, world_size, 2)) for host in range(min(2, world_size))]


def whole_numbers(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values of which sums and products of eight are exact in every accumulator, whatever the order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.rand(size, generator=generator) < 0.7
    if dtype == torch.uint8:
        return torch.randint(0, 4, (size,), generator=generator).to(dtype)
    values = torch.randint(-4, 5, (size,), generator=generator)
    if dtype.is_complex:
        return torch.complex(values.float(), values.roll(1).float()).to(dtype)
    return values.to(dtype)


def wide_range(index: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random values over many orders of magnitude: every change in the order of additions shows."""
    generator = torch.Generator().manual_seed(7919 * seed + index)
    exponents = torch.randint(-40, 41, (size,), generator=generator, dtype=torch.int32)
    return torch.ldexp(torch.randn(size, generator=generator), exponents).to(dtype)


def combined(op: ReduceOp, parts: Sequence[Tensor]) -> Tensor:
    """The reduction of whole numbers, computed here and now: wide, in order, rounded once."""
    kernels: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
        ReduceOp.SUM: torch.add,
        ReduceOp.AVERAGE: torch.add,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.PRODUCT: torch.mul,
    }
    wide = accumulator_dtype(parts[0].dtype)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = kernels[op](total, part.to(wide))
    if op is ReduceOp.AVERAGE:
        total = total / len(parts)
    return total.to(parts[0].dtype)


def canonical_reference(shards: Sequence[Tensor]) -> Tensor:
    """The canonical sum by its definition: halves of the next power of two, missing halves left out."""

    def total(first: int, width: int) -> Tensor | None:
        if first >= len(shards):
            return None
        if width == 1:
            return shards[first].to(accumulator_dtype(shards[first].dtype))
        left, right = total(first, width // 2), total(first + width // 2, width // 2)
        assert left is not None
        return left if right is None else left + right

    width = 1
    while width < len(shards):
        width *= 2
    result = total(0, width)
    assert result is not None
    return result.to(shards[0].dtype)


def small_slot(world_size: int) -> int:
    """The longest float32 tensor that takes the short way through the window."""
    return SegmentLayout(world_size, 0).small_bytes // 4


def sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def same_bits(tensors: Sequence[Tensor]) -> bool:
    return len({(tensor.dtype, tensor.shape, sha(tensor)) for tensor in tensors}) == 1


def until_it_waits(ctx: DistributedContext) -> None:
    """A wait that has lasted for a moment posts a status."""
    transport = ctx.transport
    assert isinstance(transport, ReportsWaits)
    wait_for(lambda: transport.posted_status() is not None)
