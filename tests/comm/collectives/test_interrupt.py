"""interrupt(): whatever a rank waits for ends at once, the peers are told, nothing is left behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.comm.ranks import LARGE, raised, until_it_waits
from tests.comm.transport.ranks import run_contexts, values

from paceline.comm.context import DistributedContext
from paceline.core.errors import GroupInterruptedError, PacelineError, PeerError, PeerLostError
from paceline.testing import leaks
from paceline.testing.thread_transport import run_ranks

TRANSPORTS: dict[str, dict[str, Any]] = {
    "shm": {"backend": "shm"},
    "gloo": {"backend": "gloo"},
    "hybrid": {"hosts": 2},
}
WAITS: dict[str, Callable[[DistributedContext], Any]] = {
    "small": lambda ctx: ctx.all_reduce([1.0]),
    "large": lambda ctx: ctx.all_reduce(torch.ones(LARGE)),
    "ring": lambda ctx: ctx.all_reduce(torch.ones(LARGE), algorithm="ring"),
    "barrier": lambda ctx: ctx.barrier(),
    "all_gather": lambda ctx: ctx.all_gather(torch.ones(LARGE)),
    "receive": lambda ctx: ctx.receive((ctx.rank + 1) % ctx.world_size),
    "receive_any": lambda ctx: ctx.receive(),
    "send": lambda ctx: ctx.send(torch.ones(400_000), (ctx.rank + 1) % ctx.world_size),
    "asynchronous": lambda ctx: ctx.all_reduce(torch.ones(LARGE), async_op=True).wait(),
    "message_later": lambda ctx: ctx.receive((ctx.rank + 1) % ctx.world_size, async_op=True).wait(),
}


def interrupted_while(ctx: DistributedContext, name: str) -> tuple[float, list[str]]:
    """How long rank 0's wait lasted after its interruption, or whom the others missed."""
    ctx.all_reduce(torch.ones(LARGE), algorithm="ring")
    if ctx.rank:
        lost = raised(PeerLostError, ctx.barrier if name == "send" else lambda: ctx.receive(0))
        assert lost.ranks == (0,)
        assert "a test" in lost.message
        return 0.0, []
    before = leaks.snapshot()
    told: list[float] = []

    def interrupt() -> None:
        until_it_waits(ctx)
        told.append(time.monotonic())
        ctx.interrupt("a test")

    thread = threading.Thread(target=interrupt)
    thread.start()
    error = raised(GroupInterruptedError, WAITS[name], ctx)
    took = time.monotonic() - told[0]
    thread.join()
    assert "a test" in error.message
    for later in (ctx.barrier, lambda: ctx.all_reduce(torch.ones(2)), lambda: ctx.receive(1)):
        raised(GroupInterruptedError, later)
    ctx.close()
    return took, [one for one in leaks.since(before) if "thread" in one]


@pytest.mark.parametrize(
    ("transport", "name"),
    # A mesh takes what is sent without the receiver's help: only over shared memory a send has to wait.
    [(transport, name) for transport in TRANSPORTS for name in WAITS if name != "send" or transport == "shm"],
)
def test_every_wait_ends_at_once_and_the_peers_know_why(transport: str, name: str) -> None:
    found = values(run_contexts(3, interrupted_while, name, **TRANSPORTS[transport]))
    took, left = found[0]
    assert left == []
    assert took < 2.0  # a few milliseconds on a quiet machine; without the interrupt it waits for minutes


def before_the_first_call(ctx: DistributedContext) -> list[str]:
    """Everything that could be called; twice interrupted, closed twice."""
    before = leaks.snapshot()
    if ctx.rank == 0:
        ctx.interrupt("once")
        ctx.interrupt("twice")
        for call in (ctx.barrier, lambda: ctx.send(1, 1), lambda: ctx.empty(3), ctx.check_open):
            assert "once" in str(raised(GroupInterruptedError, call))
        later = raised(GroupInterruptedError, lambda: ctx.all_reduce(torch.ones(3), async_op=True))
        assert "once" in str(later)
        ctx.close()
        ctx.close()
        ctx.interrupt("after the end")
    else:
        assert raised(PeerLostError, ctx.barrier).ranks == (0,)
        ctx.close()
    return [one for one in leaks.since(before) if "thread" in one]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_before_the_first_call_and_more_than_once(transport: str) -> None:
    assert values(run_contexts(3, before_the_first_call, **TRANSPORTS[transport])) == [[]] * 3


def while_it_closes(ctx: DistributedContext) -> list[str]:
    """Two threads, one moment."""
    before = leaks.snapshot()
    ctx.all_reduce(torch.ones(LARGE), algorithm="ring")
    ctx.barrier()
    together = threading.Barrier(2)

    def interrupt() -> None:
        together.wait(10)
        ctx.interrupt("a test")

    thread = threading.Thread(target=interrupt)
    thread.start()
    together.wait(10)
    ctx.close()
    thread.join()
    raised(PacelineError, ctx.barrier)
    return [one for one in leaks.since(before) if "thread" in one]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_during_close(transport: str) -> None:
    for _ in range(3):
        assert values(run_contexts(3, while_it_closes, **TRANSPORTS[transport])) == [[]] * 3


def test_ranks_that_are_threads() -> None:
    def one(ctx: DistributedContext) -> str:
        if ctx.rank == 0:
            ctx.interrupt("a test")
        error = raised(PeerError, ctx.barrier)
        ctx.close(error)
        return type(error).__name__

    assert run_ranks(2, one) == ["GroupInterruptedError", "PeerLostError"]


def test_what_is_done_stays_done() -> None:
    """A call that had everything it needed returns its result; only the next one raises."""

    def one(ctx: DistributedContext) -> tuple[float, str]:
        result = float(ctx.all_reduce(torch.ones(3))[0])
        ctx.interrupt("a test")
        return result, type(raised(PacelineError, ctx.barrier)).__name__

    assert run_ranks(3, one) == [(3.0, "GroupInterruptedError")] * 3


def interrupted_at_any_moment(ctx: DistributedContext, delays: list[float]) -> tuple[str, list[str]]:
    """Reductions without an end; the interruption comes whenever it comes."""
    before = leaks.snapshot()
    mine, small = ctx.empty(LARGE).fill_(0), torch.zeros(10)
    ctx.barrier()
    timer = threading.Timer(delays[ctx.rank], ctx.interrupt, ("a test",))
    timer.start()

    def work() -> None:
        while True:
            ctx.all_reduce(mine, out=mine)
            ctx.all_reduce(small, out=small)
            ctx.all_gather(ctx.rank)

    error = raised(PeerError, work)
    timer.join()
    after = type(raised(GroupInterruptedError, ctx.barrier)).__name__
    ctx.close()
    assert isinstance(error, GroupInterruptedError | PeerLostError)
    return after, [one for one in leaks.since(before, patience=30.0) if "thread" in one]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_at_any_moment(transport: str) -> None:
    generator = random.Random(4)
    for _ in range(4):
        delays = [0.02 + generator.random() * 0.05 for _ in range(3)]
        found = values(run_contexts(3, interrupted_at_any_moment, delays, **TRANSPORTS[transport]))
        assert found == [("GroupInterruptedError", [])] * 3
