"""Whom a rank waits for, as its other threads see it."""

from __future__ import annotations

import threading
import time

import torch

from paceline.comm.context import DistributedContext
from paceline.comm.transport.threads import run_ranks
from paceline.comm.waiting import waiting_for


def test_a_rank_in_a_collective_waits_for_whoever_is_late():
    seen: list[tuple[int, ...]] = []
    go = threading.Event()

    def one(context: DistributedContext) -> None:
        if context.rank == 1:
            assert go.wait(30)
            context.all_reduce(torch.ones(3))
            return
        done = threading.Event()

        def look() -> None:
            limit = time.monotonic() + 20
            while time.monotonic() < limit and not done.is_set():
                found = waiting_for(context)
                if found:
                    seen.append(found)
                    break
            go.set()

        watcher = threading.Thread(target=look)
        watcher.start()
        context.all_reduce(torch.ones(3))
        done.set()
        watcher.join()
        assert waiting_for(context) == ()

    run_ranks(2, one)
    assert seen == [(1,)]
