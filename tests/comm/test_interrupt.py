"""interrupt(): whatever a rank waits for ends at once, the peers are told, nothing is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.comm.ranks import LARGE, raised
from tests.comm.transport.ranks import run_contexts, values

from paceline.comm.context import DistributedContext
from paceline.core.errors import GroupInterruptedError, PeerLostError
from paceline.testing import leaks

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


def until_it_waits(ctx: DistributedContext) -> None:
    """A wait that has lasted for a moment shows a status."""
    transport: Any = ctx.transport
    mesh = getattr(transport, "mesh", None) or getattr(transport, "_mesh", None)
    deadline = time.monotonic() + 20
    while not (transport._board.peer(ctx.rank).status if mesh is None else mesh._mine):
        assert time.monotonic() < deadline
        time.sleep(0.001)


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
    # A mesh takes what is sent without anybody's help: only over shared memory a send has to wait.
    [(transport, name) for transport in TRANSPORTS for name in WAITS if name != "send" or transport == "shm"],
)
def test_every_wait_ends_at_once_and_the_peers_know_why(transport: str, name: str) -> None:
    found = values(run_contexts(3, interrupted_while, name, **TRANSPORTS[transport]))
    took, left = found[0]
    print(transport, name, "%.2f ms" % (1000 * took))
    assert left == []
    assert took < 0.2  # a few milliseconds on a quiet machine
