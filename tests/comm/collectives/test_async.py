"""Handles: collectives under way, in the order in which they were called."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from tests.comm.ranks import outcomes, raised
from torch import Tensor

from paceline.comm.collectives.call_queue import Handle
from paceline.comm.context import DistributedContext
from paceline.comm.transport import wait_watch
from paceline.core.errors import CommTimeoutError, DisagreementError, PacelineError, UsageError
from paceline.testing.thread_transport import run_ranks


def test_every_collective_has_an_asynchronous_form():
    def one(ctx: DistributedContext) -> list[Any]:
        handles = [
            ctx.all_reduce(torch.full((3,), float(ctx.rank)), async_op=True),
            ctx.ring_all_reduce(torch.ones(3), async_op=True),
            ctx.canonical_sum({ctx.rank: torch.ones(2)}, shards=3, async_op=True),
            ctx.broadcast("word" if ctx.rank == 0 else None, async_op=True),
            ctx.scatter([10, 11, 12] if ctx.rank == 1 else None, root_rank=1, async_op=True),
            ctx.gather(ctx.rank, root_rank=2, async_op=True),
            ctx.all_gather(ctx.rank, async_op=True),
            ctx.all_to_all([ctx.rank] * 3, async_op=True),
            ctx.reduce(1.0, async_op=True),
            ctx.reduce_scatter([1.0, 2.0, 3.0], async_op=True),
            ctx.barrier(async_op=True),
        ]
        assert all(isinstance(handle, Handle) for handle in handles)
        results = [handle.wait(20) for handle in reversed(handles)][::-1]
        assert all(handle.done() for handle in handles)
        return [result.tolist() if isinstance(result, Tensor) else result for result in results]

    for rank, results in enumerate(run_ranks(3, one)):
        assert results[:5] == [[3.0] * 3, [1.0] * 3, [3.0] * 2, "word", 10 + rank]
        assert results[5] == ([0, 1, 2] if rank == 2 else None)
        assert results[6:8] == [[0, 1, 2]] * 2
        assert results[8] == (3.0 if rank == 0 else None)
        assert results[9:] == [3.0 * (rank + 1), None]


def test_a_synchronous_call_queues_behind_what_is_under_way():
    may_join = threading.Event()

    def one(ctx: DistributedContext) -> list[Any]:
        data = torch.full((4,), 1.0)
        if ctx.rank == 1:
            assert may_join.wait(10)
        first = ctx.all_reduce(data, async_op=True)
        second = ctx.all_gather(ctx.rank, async_op=True)
        if ctx.rank == 0:
            assert not first.done()
            may_join.set()
        third = ctx.all_reduce([2.0])  # the short way of small tensors must not overtake either
        fourth = ctx.all_reduce(data)
        assert first.done()
        assert second.done()
        return [first.wait().tolist(), second.wait(), third, fourth.tolist()]

    for results in run_ranks(2, one):
        assert results == [[2.0] * 4, [0, 1], [4.0], [2.0] * 4]


def test_many_in_flight_keep_their_order():
    def one(ctx: DistributedContext) -> list[float]:
        handles = []
        for turn in range(30):
            data = torch.full((turn % 7 + 1,), float(turn))
            algorithm = ("direct", "ring", "tree", "canonical")[turn % 4]
            handles.append(ctx.all_reduce(data, "sum", algorithm, async_op=True))
        return [float(handle.wait(20)[0]) for handle in handles]

    assert run_ranks(3, one) == [[3.0 * turn for turn in range(30)]] * 3


def test_a_wait_that_times_out_can_be_repeated():
    may_join = threading.Event()

    def one(ctx: DistributedContext) -> list[float]:
        if ctx.rank == 1:
            assert may_join.wait(10)
        handle = ctx.all_reduce([1.0], async_op=True)
        if ctx.rank == 0:
            for _ in range(2):
                error = raised(CommTimeoutError, handle.wait, 0.01)
                assert "still under way" in str(error)
                assert "all_reduce" in str(error)
            may_join.set()
        result: list[float] = handle.wait(20)
        return result

    assert run_ranks(2, one) == [[2.0], [2.0]]


def test_a_result_that_comes_at_the_very_end_of_the_wait_is_taken():
    class JustInTime(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().result()
            self.set_result(5)
            raise TimeoutError

    assert Handle(JustInTime(), "barrier()").wait(0.1) == 5


def test_an_error_surfaces_in_wait_and_again_in_the_next_call():
    submitted = threading.Event()

    def one(ctx: DistributedContext) -> PacelineError:
        # The group breaks when the second rank comes: the first has submitted both calls before.
        if ctx.rank == 1:
            assert submitted.wait(20)
        handle = ctx.all_reduce(torch.ones(2 + ctx.rank), async_op=True)
        if ctx.rank == 0:
            later = ctx.all_gather(1, async_op=True).wait
            submitted.set()
        else:
            later = ctx.barrier
        first = raised(DisagreementError, handle.wait, 20)
        for again in (
            later,
            ctx.barrier,
            lambda: ctx.all_reduce([1.0]),
            lambda: ctx.send(1, 1 - ctx.rank),
        ):
            error = raised(DisagreementError, again)
            assert error.calls == first.calls
            assert any("already broken" in note for note in error.__notes__)
        return first

    for error in run_ranks(2, one):
        assert isinstance(error, DisagreementError)
        assert "float32[2]" in error.calls[0]
        assert "float32[3]" in error.calls[1]
        assert "test_async.py:" in error.calls[0]
        assert "test_async.py:" in error.calls[1]


def test_bad_arguments_raise_at_once_and_not_in_wait():
    def one(ctx: DistributedContext) -> Any:
        for mistake in (
            lambda: ctx.all_reduce("text", async_op=True),
            lambda: ctx.broadcast(1, root_rank=7, async_op=True),
            lambda: ctx.all_reduce(torch.ones(1), "sum", "bogus", async_op=True),
        ):
            raised(UsageError, mistake)
        return ctx.all_reduce([1.0], async_op=True).wait(20)

    assert run_ranks(2, one) == [[2.0], [2.0]]


def test_close_waits_for_what_is_under_way():
    def one(ctx: DistributedContext) -> Any:
        handle = ctx.all_reduce(torch.ones(100_000), async_op=True)
        ctx.close()
        assert handle.done()
        assert "closed" in str(raised(UsageError, ctx.barrier))
        ctx.close()
        return float(handle.wait()[0])

    assert run_ranks(2, one) == [2.0, 2.0]


def test_a_rank_that_works_while_its_collective_waits_is_not_in_a_circle(monkeypatch):
    """Rank 0 has a collective under way and computes, rank 1 first wants a message of rank 0: no deadlock."""
    monkeypatch.setattr(wait_watch, "STABLE_SECONDS", 0.05)
    looked = threading.Event()

    def one(ctx: DistributedContext) -> Any:
        if ctx.rank == 0:
            handle = ctx.all_reduce([1.0], async_op=True)
            assert looked.wait(10)  # what it computes takes longer than it takes rank 1 to look around
            ctx.send("now", 1)
            return handle.wait(10)
        board: Any = ctx.transport._board  # type: ignore[attr-defined]
        real, looks = board.peers, 0

        def counted() -> Any:
            nonlocal looks
            looks += 1
            if looks == 12:
                looked.set()
            return real()

        board.peers = counted
        try:
            assert ctx.receive(0) == "now"
        finally:
            looked.set()
        return ctx.all_reduce([1.0])

    assert outcomes(2, one) == [[2.0], [2.0]]


@pytest.mark.parametrize("wait_for", ["receive", "collective"])
def test_the_line_of_an_asynchronous_call_is_the_caller_s(wait_for):
    def one(ctx: DistributedContext) -> Any:
        if ctx.rank == 1:
            return None
        handle: Any = ctx.receive(1, async_op=True) if wait_for == "receive" else ctx.barrier(async_op=True)
        return handle.wait(10)

    error = outcomes(2, one)[0]
    assert isinstance(error, DisagreementError)
    assert "test_async.py:" in error.calls[0]
