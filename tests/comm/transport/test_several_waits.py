"""A rank whose threads wait for several things at once: each wait is judged, and the peers read one that is
open."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.comm.transport.ranks import run_contexts
from tests.waiting import wait_for

from paceline.comm.call_status import Status
from paceline.comm.context import DistributedContext
from paceline.comm.transport.base import ANY_SOURCE, ReportsWaits
from paceline.comm.transport.wait_watch import OpenWaits
from paceline.core.errors import DisagreementError, PeerLostError
from paceline.testing.thread_transport import run_ranks

BARRIER = Status("barrier()", "a.py:1", (1,), 5, 111)
FIRST = Status("receive(source_rank=1, tag=1)", "b.py:2", (1,))
SECOND = Status("receive(source_rank=1, tag=2)", "b.py:3", (1,))
_WIDTH = 40


def test_peers_read_the_collective_and_else_the_newest_message() -> None:
    waits = OpenWaits()
    assert waits.put("first", FIRST) == FIRST
    assert waits.put("barrier", BARRIER) == BARRIER
    assert waits.put("second", SECOND) == BARRIER
    assert waits.put("barrier", None) == SECOND
    assert waits.put("second", None) == FIRST
    assert waits.put("first", None) is None


def test_a_wait_that_failed_does_not_come_back() -> None:
    waits = OpenWaits()
    waits.put("first", FIRST)
    waits.drop("first")
    assert waits.put("second", SECOND) == SECOND
    assert waits.put("second", None) is None


def test_a_wait_is_judged_by_what_it_waits_for_itself() -> None:
    """Rank 1 leaves while rank 0 waits for it, and in another thread for rank 2, which is what peers read."""
    both_wait, noticed = threading.Event(), threading.Event()

    def one(ctx: DistributedContext) -> object:
        if ctx.rank == 1:
            return both_wait.wait(10)
        if ctx.rank == 2:
            assert noticed.wait(20)
            ctx.send("late", 0)
            return True
        first = ctx.receive(1, async_op=True)
        wait_for(lambda: ctx.waiting_for() == (1,))
        second = ctx.receive(2, async_op=True)
        wait_for(lambda: ctx.waiting_for() == (2,))
        both_wait.set()
        with pytest.raises(DisagreementError, match="rank 1 finished without taking part"):
            first.wait(10)
        noticed.set()
        return second.wait(10)

    assert run_ranks(3, one) == ["late", True, True]


class Board:
    """What the peers of rank 0 read of it, in memory of all processes of a test."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _WIDTH)
        self._ended = threading.Event()

    @contextmanager
    def kept_by(self, ctx: DistributedContext) -> Iterator[None]:
        transport = ctx.transport
        assert isinstance(transport, ReportsWaits)

        def keep() -> None:
            while not self._ended.wait(0.001):
                status = transport.posted_status()
                self._memory[:] = (status.text if status else "").encode()[:_WIDTH].ljust(_WIDTH)

        keeping = threading.Thread(target=keep)
        keeping.start()
        try:
            yield
        finally:
            self._ended.set()
            keeping.join()

    def shows(self, text: str) -> None:
        """Return when the peers read that rank 0 waits in a call whose text begins like this."""
        wait_for(lambda: self._memory[:].startswith(text.encode()), f"rank 0 is not seen in {text}")

    def close(self) -> None:
        self._memory.close()


def _loss(wait: Callable[[], object]) -> tuple[int, ...]:
    try:
        wait()
    except PeerLostError as error:
        return error.ranks
    return ()


def _receive_after_a_collective(ctx: DistributedContext, board: Board) -> tuple[int, ...]:
    """The collective has waited and is over: the receive is still judged."""
    if ctx.rank == 0:
        receive = ctx.receive(1, tag=1, async_op=True)
        board.shows("receive")
        ctx.barrier()
        return _loss(lambda: receive.wait(20))
    board.shows("barrier")
    ctx.barrier()
    board.shows("receive")
    os.kill(os.getpid(), signal.SIGKILL)
    return ()


def _collective_after_a_receive(ctx: DistributedContext, board: Board) -> tuple[int, ...]:
    """The receive has waited and is over: the collective is still judged."""
    if ctx.rank == 0:
        receive = ctx.receive(1, tag=1, async_op=True)
        board.shows("receive")

        def answer() -> None:
            receive.wait(20)
            ctx.send(None, 1, tag=2)

        answering = threading.Thread(target=answer)
        answering.start()
        lost = _loss(ctx.barrier)
        answering.join()
        return lost
    board.shows("barrier")
    ctx.send(None, 0, tag=1)
    ctx.receive(0, tag=2)
    board.shows("barrier")
    os.kill(os.getpid(), signal.SIGKILL)
    return ()


def _receive_after_another(ctx: DistributedContext, board: Board) -> tuple[int, ...]:
    if ctx.rank == 0:
        receive = ctx.receive(1, tag=1, async_op=True)
        board.shows("receive(source_rank=1")
        ctx.receive(ANY_SOURCE, tag=2, async_op=True)
        return _loss(lambda: receive.wait(20))
    board.shows("receive(source_rank=any")
    ctx.send(None, 0, tag=2)
    board.shows("receive(source_rank=1")
    os.kill(os.getpid(), signal.SIGKILL)
    return ()


def _run(
    ctx: DistributedContext,
    waits: Callable[[DistributedContext, Board], tuple[int, ...]],
    board: Board,
) -> tuple[int, ...]:
    if ctx.rank:
        return waits(ctx, board)
    with board.kept_by(ctx):
        return waits(ctx, board)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize(
    "waits", [_receive_after_a_collective, _collective_after_a_receive, _receive_after_another]
)
def test_the_wait_that_is_left_notices_a_lost_rank(
    waits: Callable[[DistributedContext, Board], tuple[int, ...]], backend: str
) -> None:
    board = Board()
    began = time.monotonic()
    survivor, killed = run_contexts(2, _run, waits, board, backend=backend)
    board.close()
    assert killed.signal == signal.SIGKILL
    assert survivor.error is None, survivor.error
    assert survivor.value == (1,)
    assert time.monotonic() - began < 10  # none waits for a timeout, which would be 20 s
