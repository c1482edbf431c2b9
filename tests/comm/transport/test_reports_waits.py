"""Whom a rank waits for, as its other threads see it: also over a transport that is not Paceline's."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from paceline.comm.call_status import CollectiveCall, Status
from paceline.comm.context import DistributedContext
from paceline.comm.transport.base import Messages, ReceivedMessage, ReportsWaits, Window
from paceline.comm.transport.shm.transport import ShmTransport
from paceline.core.shm_segment_layout import create_segment
from paceline.testing.thread_transport import run_ranks


def first_rank_waits(context: DistributedContext) -> tuple[int, ...]:
    """Rank 0 enters a collective before all others; returns whom it was seen to wait for."""
    if context.rank != 0:
        context.receive(0, tag=7, timeout=30)
        context.all_reduce(torch.ones(3))
        return ()
    seen: list[tuple[int, ...]] = []

    def look() -> None:
        limit = time.monotonic() + 20
        while not seen and time.monotonic() < limit:
            if found := context.waiting_for():
                seen.append(found)
        for peer in range(1, context.world_size):
            context.send(None, peer, tag=7)

    watcher = threading.Thread(target=look)
    watcher.start()
    context.all_reduce(torch.ones(3))
    watcher.join()
    assert context.waiting_for() == ()
    return seen[0] if seen else ()


def test_a_rank_in_a_collective_waits_for_the_late_ones() -> None:
    assert run_ranks(2, first_rank_waits)[0] == (1,)
    assert run_ranks(3, first_rank_waits)[0] == (1, 2)


def test_waits_are_reported_by_slot() -> None:
    assert run_ranks(3, first_rank_waits, labels=(0, 2, 3))[0] == (2, 3)


class Silent:
    """A transport of a user's, over one that exists: only what base.Transport asks for."""

    window: Window | None = None

    def __init__(self, inner: ShmTransport) -> None:
        self.inner = inner
        self.name, self.rank, self.world_size = "mine", inner.rank, inner.world_size
        self.topology, self.traffic = inner.topology, inner.traffic

    def exchange(self, call: CollectiveCall, sends: Messages, receives: Messages, deadline: float) -> None:
        self.inner.exchange(call, sends, receives, deadline)

    def post(self, dest: int, tag: int, body: Sequence[memoryview], deadline: float) -> None:
        self.inner.post(dest, tag, body, deadline)

    def take(self, source: int, tag: int | None, deadline: float, *, own_deadline: bool) -> ReceivedMessage:
        return self.inner.take(source, tag, deadline, own_deadline=own_deadline)

    def empty(self, nbytes: int) -> torch.Tensor:
        return self.inner.empty(nbytes)

    def close(self, error: BaseException | None = None) -> None:
        self.inner.close(error)


class Reporting(Silent):
    """The same, and it declares that it reports waits."""

    def posted_status(self) -> Status | None:
        return self.inner.posted_status()


def over(kind: type[Silent], world_size: int) -> list[Any]:
    segment = create_segment(world_size)
    inner = [ShmTransport(segment, rank, world_size, threads=True) for rank in range(world_size)]
    os.close(segment)
    results: list[Any] = [None] * world_size

    def one(rank: int) -> None:
        with DistributedContext.from_transport(kind(inner[rank]), timeout=30) as context:
            if issubclass(kind, Reporting):
                results[rank] = first_rank_waits(context)
            else:
                context.barrier()
                results[rank] = context.waiting_for()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_a_transport_that_declares_it_reports_waits() -> None:
    assert issubclass(Reporting, ReportsWaits)
    # Without a window barriers and small reductions are messages: rank 0 waits for the peers of one round.
    assert over(Reporting, 2)[0] == (1,)


def test_a_transport_that_does_not_is_still_a_transport() -> None:
    assert not issubclass(Silent, ReportsWaits)
    assert over(Silent, 2) == [(), ()]
