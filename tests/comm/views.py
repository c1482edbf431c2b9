"""Members of a supervised job as threads, each with its listener, and views of any of them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline.comm.context import DistributedContext
from paceline.comm.rendezvous.view_group import ViewGroup, ViewPeer, open_view

SECRET = b"of this job" * 3


def peers(listeners: Sequence[socket.socket], hosts: Sequence[str], slots: Sequence[int]) -> list[ViewPeer]:
    return [
        ViewPeer(slot, os.getpid(), host, host, ("127.0.0.1", listener.getsockname()[1]))
        for listener, host, slot in zip(listeners, hosts, slots, strict=True)
    ]


def view_context(
    view: ViewGroup, listener: socket.socket | None = None, **settings: Any
) -> DistributedContext:
    """Open a view and make the member's context over its transport, as a worker does."""
    transport, links = open_view(view, listener, **settings)
    return DistributedContext.from_transport(transport, timeout=20.0, links=links)


class Job:
    """Members as threads, each with its listener; views of any of them."""

    def __init__(self, members: int) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(members)]
        self.pool = ThreadPoolExecutor(members)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(wait=True)
        for listener in self.listeners:
            listener.close()

    def open(
        self,
        rank: int,
        members: Sequence[int],
        hosts: Sequence[str],
        generation: int,
        cancelled: threading.Event | None = None,
        secret: bytes = SECRET,
        forming_seconds: float = 20.0,
    ) -> DistributedContext:
        listeners = [self.listeners[member] for member in members]
        return view_context(
            ViewGroup(generation, rank, peers(listeners, hosts, members), secret),
            listeners[rank],
            cancelled=cancelled,
            forming_seconds=forming_seconds,
        )

    def view(
        self, members: Sequence[int], hosts: Sequence[str], generation: int, fn: Callable[..., Any]
    ) -> list[Any]:
        def one(rank: int) -> Any:
            with self.open(rank, members, hosts, generation) as ctx:
                return fn(ctx)

        return [future.result(30) for future in [self.pool.submit(one, rank) for rank in range(len(members))]]
