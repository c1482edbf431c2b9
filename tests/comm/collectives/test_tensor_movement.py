"""Collectives on tensors of known sizes: slots, reads out of peers' memory, and messages give the same."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm.call_status import CollectiveCall, signature_of
from paceline.comm.collectives import tensor_movement
from paceline.comm.context import DistributedContext
from paceline.comm.ops import ReduceOp
from paceline.comm.transport.base import Transport
from paceline.core.errors import DisagreementError
from paceline.testing.thread_transport import run_ranks

SIZES = (0, 5, 1_500_003)
"""Elements of which nothing, a slot and no slot is needed for a rank's bytes."""


def as_they_are(transport: Transport) -> None:
    """Leave the transport as it is: slots and reads."""


def not_reachable(transport: Transport) -> None:
    assert transport.window is not None
    transport.window.reachable = False


def no_window(transport: Transport) -> None:
    transport.window = None


def run(restrict: Callable[[Transport], None], size: int, fn: Callable[..., Any]) -> list[Any]:
    def one(ctx: DistributedContext) -> Any:
        restrict(ctx.transport)
        numbers = itertools.count()

        def call(text: str) -> CollectiveCall:
            return CollectiveCall(next(numbers), text, signature_of(text))

        return fn(ctx.transport, call, time.monotonic() + 30)

    return run_ranks(size, one)


def data(rank: int, count: int) -> Tensor:
    return (torch.arange(count) * 7 + rank).to(torch.uint8)


@pytest.mark.parametrize("restrict", [as_they_are, not_reachable, no_window])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_way_moves_the_same(restrict, size):
    def moves(transport: Transport, call: Callable[[str], CollectiveCall], deadline: float) -> None:
        rank = transport.rank
        for count in SIZES:
            mine = data(rank, count)
            outs = [torch.zeros_like(mine) for _ in range(size)]
            tensor_movement.all_gather(transport, call("all_gather"), mine, outs, deadline)
            assert all(torch.equal(out, data(peer, count)) for peer, out in enumerate(outs))
            root = size - 1
            sent = mine.clone()
            tensor_movement.broadcast(transport, call("broadcast"), sent, root, deadline)
            assert torch.equal(sent, data(root, count))
            gathered = [torch.zeros_like(mine) for _ in range(size)] if rank == root else []
            tensor_movement.gather(transport, call("gather"), mine, gathered, root, deadline)
            assert all(torch.equal(out, data(peer, count)) for peer, out in enumerate(gathered))
            part = torch.zeros_like(mine)
            parts = [data(peer + 3, count) for peer in range(size)] if rank == root else []
            tensor_movement.scatter(transport, call("scatter"), parts, part, root, deadline)
            assert torch.equal(part, data(rank + 3, count))
            whole = torch.cat([data(rank + peer, count) for peer in range(size)])
            crossed = torch.zeros_like(whole)
            cut, joined = whole.chunk(size), crossed.chunk(size)
            tensor_movement.all_to_all_parts(transport, call("all_to_all"), cut, joined, deadline)
            assert torch.equal(crossed, whole)

    run(restrict, size, moves)


@pytest.mark.parametrize("count", SIZES)
def test_a_rank_may_gather_what_lies_in_the_place_of_another_rank(count):
    """Rank 1's data lies where rank 0's goes, and rank 0 reads it last."""
    filled = threading.Event()

    def gathers(transport: Transport, call: Callable[[str], CollectiveCall], deadline: float) -> None:
        window: Any = transport.window
        window.reachable = True  # however the trial of its speed would end
        read = window.read

        def in_turn(*args: Any) -> None:
            assert transport.rank == 1 or filled.wait(10)
            read(*args)
            filled.set()

        window.read = in_turn
        outs = [data(transport.rank, count), torch.zeros(count, dtype=torch.uint8)]
        tensor_movement.all_gather(transport, call("all_gather"), outs[0], outs, deadline)
        window.read = read
        assert all(torch.equal(out, data(peer, count)) for peer, out in enumerate(outs))

    run(as_they_are, 2, gathers)


@pytest.mark.parametrize("restrict", [as_they_are, not_reachable, no_window])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_rank_gets_its_slice_of_the_sum_also_in_place(restrict, dtype):
    def reduces(transport: Transport, call: Callable[[str], CollectiveCall], deadline: float) -> None:
        rank, size = transport.rank, transport.world_size
        for count in (3, 400_001):
            inputs = [((torch.arange(count * size) + peer) % 5).to(dtype) for peer in range(size)]
            part = slice(rank * count, (rank + 1) * count)
            expected = sum(given[part].double() for given in inputs).to(dtype)  # type: ignore[union-attr]
            out = torch.zeros(count, dtype=dtype)
            for target, given in ((out, inputs[rank]), (inputs[rank][part], inputs[rank])):
                tensor_movement.reduce_scatter(transport, call("sum"), ReduceOp.SUM, given, target, deadline)
                assert torch.equal(target, expected)

    run(restrict, 3, reduces)


@pytest.mark.parametrize("count", [5, 1_500_003])
def test_ranks_in_different_calls_find_out(count):
    def differ(transport: Transport, call: Callable[[str], CollectiveCall], deadline: float) -> str:
        mine = data(transport.rank, count)
        try:
            if transport.rank:
                tensor_movement.broadcast(transport, call("broadcast"), mine, 0, deadline)
            else:
                outs = [torch.zeros_like(mine) for _ in range(2)]
                tensor_movement.all_gather(transport, call("all_gather"), mine, outs, deadline)
        except DisagreementError as error:
            transport.close(error)  # as the queue of calls does
            return str(error)
        return "nothing"

    for told in run(as_they_are, 2, differ):
        assert "all_gather" in told
        assert "broadcast" in told
