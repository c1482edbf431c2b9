"""Ranks as threads of this process, over one private shared segment: for tests that need many ranks and no
processes.

Everything but the processes is real: the same rings, windows and waits, the same errors. One interpreter
runs all ranks, so nothing is learned about speed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from paceline.comm.context import DistributedContext
from paceline.comm.transport.shm.transport import ShmTransport
from paceline.core import log
from paceline.core.errors import CommTimeoutError, PeerError
from paceline.core.shm_segment_layout import create_segment
from paceline.core.wording import ranks

T = TypeVar("T")

_LAST_SECONDS = 5.0


def run_ranks(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    timeout: float = 60.0,
    labels: Sequence[int] | None = None,
) -> list[T]:
    """Call `fn(context, *args)` on `world_size` ranks, each a thread, and return their results by rank.

    The first failure is raised here; one that a rank raised by itself comes before those that follow from it.
    `labels` are the numbers by which errors name the ranks, such as the slots of a supervised view.
    """
    segment = create_segment(world_size)
    try:
        transports = [
            ShmTransport(segment, rank, world_size, threads=True, labels=labels) for rank in range(world_size)
        ]
    finally:
        os.close(segment)
    results: dict[int, T] = {}
    failures: list[BaseException] = []  # in the order in which they happened

    def run(transport: ShmTransport) -> None:
        context = DistributedContext.from_transport(transport, timeout=timeout)
        try:
            with log.at(rank=transport.rank):
                results[transport.rank] = fn(context, *args)
        except BaseException as error:
            # Noted before the peers get it, so that no failure that follows from this one comes before it.
            failures.append(error)
            context.close(error)
        else:
            context.close()

    threads = [
        threading.Thread(target=run, args=(transport,), name=f"rank-{transport.rank}", daemon=True)
        for transport in transports
    ]
    for thread in threads:
        thread.start()
    _join(threads, timeout)
    late = tuple(rank for rank, thread in enumerate(threads) if thread.is_alive())
    if late:
        error = CommTimeoutError(f"{ranks(late, 'was', 'were')} not done after {timeout} s", waiting_for=late)
        for rank in late:
            transports[rank].close(error)
        _join(threads, _LAST_SECONDS)
        raise error
    if failures:
        raise min(failures, key=lambda error: isinstance(error, PeerError | CommTimeoutError))
    return [results[rank] for rank in range(world_size)]


def _join(threads: list[threading.Thread], seconds: float) -> None:
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.0))
