"""A group for a view: ranks that know each other already, and a new context for those who remain.

    a segment of the supervisor    opened through /proc, no rendezvous, about a millisecond
    several hosts                  the ranks meet at the first one's endpoint, which outlives groups, and are
                                   wired as always: shared memory inside a host, mesh and Gloo between hosts

Who meets is decided elsewhere. While a group forms, a member may die: whoever learns of it sets `cancelled`,
and forming ends within milliseconds. Strangers and late ranks of earlier views do no harm: both ends of every
connection prove that they know the job's secret, and what is said counts for one generation only. Must not
know what a view is for.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from paceline.comm.context import DistributedContext
from paceline.comm.cost import Links, load_links
from paceline.comm.environment import Address
from paceline.comm.meeting import Meeting, StoreGoneError, connect
from paceline.comm.rendezvous import Hello, alone, met
from paceline.comm.store import StoreServer
from paceline.comm.transport.base import Transport
from paceline.comm.transport.shm.transport import ShmTransport
from paceline.comm.wiring import open_segment
from paceline.core.errors import GroupInterruptedError, RendezvousError, UsageError
from paceline.core.listening import ALL_ADDRESSES, Listening, from_here

FORMING_SECONDS = 30.0
_AGAIN_SECONDS = 0.01


@dataclass(frozen=True)
class ViewPeer:
    """One member of a view; `endpoint` is where its long-lived listener is."""

    pid: int
    host: str
    hostname: str
    endpoint: tuple[str, int]


def open_view(
    *,
    rank: int,
    world_size: int,
    segment: Sequence[int],
    members: Sequence[ViewPeer],
    listener: socket.socket | None,
    secret: bytes,
    generation: int,
    timeout: float,
    links: Links | None = None,
    cancelled: threading.Event | None = None,
    forming_seconds: float = FORMING_SECONDS,
    ports: str = "",
) -> DistributedContext:
    """This rank's context in the view of `generation`. `segment` is (pid, descriptor, inode, device), or
    empty; `listener` is this rank's own, kept open by the caller, and becomes non-blocking. Further listeners
    of this view are at the same address, on a port of the range `ports`."""
    if len(members) != world_size or not 0 <= rank < world_size:
        raise UsageError(
            f"a view of {len(members)} members for rank {rank} of {world_size}", remedy="pass every member"
        )
    if segment:
        transport: Transport = _in_segment(segment, rank, world_size)
        links = load_links() if links is None else links
    elif world_size == 1:
        transport = alone()
        links = load_links() if links is None else links
    else:
        hello = Hello(
            host=members[rank].host,
            hostname=members[rank].hostname,
            secret=hmac.new(secret, b"view %d" % generation, hashlib.sha256).digest(),
            links=links,
            listening=Listening(ports, _address_of(listener)),
        )
        forming = _Forming(rank, members, hello, generation, time.monotonic() + forming_seconds, cancelled)
        transport, links = forming.serve(listener) if rank == 0 else forming.visit()
    return DistributedContext.from_transport(transport, timeout=timeout, links=links)


def _address_of(listener: socket.socket | None) -> str:
    """Where this rank listens; empty where that is everywhere, or nowhere."""
    host = "" if listener is None else str(listener.getsockname()[0])
    return "" if host in ALL_ADDRESSES else host


def _in_segment(segment: Sequence[int], rank: int, world_size: int) -> ShmTransport:
    pid, descriptor, inode, device = segment
    try:
        fd = open_segment({"fd": descriptor, "inode": inode, "device": device}, pid)
    except OSError as error:
        raise RendezvousError(
            f"rank {rank} cannot open the group's shared memory, descriptor {descriptor} of process {pid}: "
            f"{error.strerror or error}",
            remedy="the process that made it has to live until all ranks are in, under the same user",
        ) from error
    try:
        return ShmTransport(fd, rank, world_size)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class _Forming:
    """One rank's part in forming a group over the network."""

    rank: int
    members: Sequence[ViewPeer]
    hello: Hello
    generation: int
    deadline: float
    cancelled: threading.Event | None

    def serve(self, listener: socket.socket | None) -> tuple[Transport, Links]:
        if listener is None:
            raise UsageError(
                "rank 0 of a view has no listener", remedy="pass the socket behind members[0].endpoint"
            )
        with ExitStack() as stack:
            server = StoreServer(listener.dup(), self.hello.secret)
            stack.callback(server.close)
            address = Address(*from_here(listener))
            client = connect(0, address, self.deadline, secret=self.hello.secret, look=self._look)
            meeting = self._meeting(stack.enter_context(closing(client)))
            return met(meeting, self.members[0].endpoint[0], self.hello, server.close)

    def visit(self) -> tuple[Transport, Links]:
        address = Address(*self.members[0].endpoint)
        while True:
            # Rank 0 may not have begun to serve: its listener takes the connection, the answer comes later.
            client = connect(self.rank, address, self.deadline, secret=self.hello.secret, look=self._look)
            with closing(client):
                try:
                    return met(self._meeting(client), address.host, self.hello)
                except StoreGoneError as error:
                    # The end of an earlier view's meeting, at which this rank came too early for this one.
                    if time.monotonic() >= self.deadline:
                        raise RendezvousError(
                            f"the meeting of view {self.generation} at {address} ended without rank "
                            f"{self.rank}: {error}"
                        ) from error
            self._look()
            time.sleep(_AGAIN_SECONDS)

    def _meeting(self, client: object) -> Meeting:
        where = f"view {self.generation}"
        size = len(self.members)
        prefix = f"{self.generation}/"
        return Meeting(
            client,  # type: ignore[arg-type]
            self.rank,
            size,
            self.deadline,
            where,
            prefix=prefix,
            cancel=self._look,
        )

    def _look(self) -> None:
        if self.cancelled is not None and self.cancelled.is_set():
            raise GroupInterruptedError(f"rank {self.rank} was told to give up on view {self.generation}")
