"""torch.distributed as a transport: what it counts, overlapping rounds, the backend's own all-reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.comm.transport.ranks import run_contexts, values

from paceline.comm.algorithms import ring
from paceline.comm.context import DistributedContext
from paceline.comm.ops import ReduceOp
from paceline.comm.transport.tcp.bulk_transfer import overhead
from paceline.core.errors import UsageError


def ring_counts(ctx: DistributedContext, sizes: list[int]) -> list[tuple[int, ...]]:
    found = []
    for size in sizes:
        before = ctx.transport.traffic.snapshot()
        ctx.all_reduce(torch.ones(size), algorithm="ring")
        found.append(
            tuple(new - old for new, old in zip(ctx.transport.traffic.snapshot(), before, strict=True))
        )
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ring_sends_the_optimum_to_the_byte(ranks: int) -> None:
    small, middle, large = 12 * 100, 12 * 8_000, 12 * 100_000
    for counts in values(run_contexts(ranks, ring_counts, [small, middle, large], backend="gloo")):
        for size, (messages, sent, received, headers, between, rounds) in zip(
            (small, middle, large), counts, strict=True
        ):
            segment = size * 4 // ranks
            assert sent == received == 2 * (ranks - 1) * segment
            assert rounds == 2 * (ranks - 1)
            assert between == 0
            parts = max(1, min(ring.PARTS, segment // ring.PART_BYTES))
            assert messages == rounds * parts
            # A header and a body have a tag of 16 bytes each. Over 64 KB the receiver says that it takes the
            # message, and that it has it; the message has a header of its own and a tag for each chunk.
            part = segment // parts
            assert headers == messages * (64 if part <= 64 * 1024 else 3 * 48 + overhead(part))


def overlap_or_not(ctx: DistributedContext) -> list[bool]:
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        for size in (600_001, 1_000_000):
            generator = torch.Generator().manual_seed(ctx.rank)
            data = (torch.randn(size, generator=generator) * 100).to(dtype)
            for op in ("sum", "average") if dtype.is_floating_point else ("sum",):
                overlapped = ctx.all_reduce(data, op, "ring")
                parts, ring.PARTS = ring.PARTS, 1
                found.append(torch.equal(overlapped, ctx.all_reduce(data, op, "ring")))
                ring.PARTS = parts
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_overlapping_rounds_change_no_bit(ranks: int) -> None:
    for same in values(run_contexts(ranks, overlap_or_not, backend="gloo")):
        assert all(same)


def native_results(ctx: DistributedContext) -> list[Any]:
    found: list[Any] = []
    for op in ReduceOp:
        found.append(ctx.all_reduce(torch.tensor([2.0, float(ctx.rank + 1)]), op, "native").tolist())
    found.append(ctx.all_reduce(torch.tensor([1 + 2j]), "sum", "native").tolist())
    found.append(ctx.all_reduce(torch.tensor([3], dtype=torch.int64), "sum", "native").tolist())
    return found


def test_the_backends_own_all_reduce() -> None:
    expected = [[4.0, 3.0], [2.0, 1.5], [2.0, 1.0], [2.0, 2.0], [4.0, 2.0], [2 + 4j], [6]]
    assert values(run_contexts(2, native_results, backend="gloo")) == [expected] * 2


def native_refusals(ctx: DistributedContext) -> list[str]:
    found = []
    for data, op in ((torch.tensor([True]), "sum"), (torch.tensor([1j]), "product")):
        try:
            ctx.all_reduce(data, op, "native")
        except UsageError as error:
            found.append(error.message)
    return found


def test_what_the_backend_cannot_do_is_refused() -> None:
    for first, *_ in values(run_contexts(2, native_refusals, backend="gloo")):
        assert "does not know bool" in first


def test_native_needs_a_backend() -> None:
    def main(ctx: DistributedContext) -> str:
        try:
            ctx.all_reduce(torch.ones(3), algorithm="native")
        except UsageError as error:
            return error.message
        return ""

    assert all("native" in text for text in values(run_contexts(2, main, backend="shm")))


def asynchronous(ctx: DistributedContext) -> list[float]:
    handles = [ctx.all_reduce(torch.full((200_000,), float(turn)), async_op=True) for turn in range(5)]
    total = ctx.all_reduce(torch.ones(3))
    assert total[0] == ctx.world_size
    return [handle.wait(20)[-1].item() for handle in handles]


@pytest.mark.parametrize("hosts", [1, 2])
def test_asynchronous_calls(hosts: int) -> None:
    for found in values(run_contexts(3, asynchronous, backend="auto" if hosts > 1 else "gloo", hosts=hosts)):
        assert found == [0.0, 3.0, 6.0, 9.0, 12.0]
