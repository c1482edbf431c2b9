"""The process group of a view: connect members that already know each other's endpoints.

    a segment of the supervisor    opened through /proc, no rendezvous, about a millisecond
    several hosts                  the ranks meet at the first one's endpoint, which outlives groups, and are
                                   connected as always: shared memory inside a host, a mesh between hosts

The supervisor decides who is in a view. A member may die while the group forms: the caller that learns of it
sets `cancelled`, and forming ends within milliseconds. Strangers and late ranks of earlier views do no harm:
both ends of every connection prove that they know the job's secret, and a message counts for one generation
only.
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

from paceline.comm.cost import LinkCosts
from paceline.comm.rendezvous.environment import Address
from paceline.comm.rendezvous.key_value_store import StoreClient, StoreServer
from paceline.comm.rendezvous.round import RendezvousRound, StoreGoneError, connect
from paceline.comm.rendezvous.topology import open_segment
from paceline.comm.rendezvous.transport_setup import RankIntroduction, connect_ranks, single_rank
from paceline.comm.transport.base import Transport
from paceline.comm.transport.shm.transport import ShmTransport
from paceline.core.errors import GroupInterruptedError, RendezvousError, UsageError
from paceline.core.listen_address import ALL_ADDRESSES, ListenAddress, local_address
from paceline.core.wording import counted

FORMING_SECONDS = 30.0
_AGAIN_SECONDS = 0.01


@dataclass(frozen=True)
class ViewPeer:
    """One member of a view; `endpoint` is where its long-lived listener is, `slot` the rank of a supervised
    job that it has in every view."""

    slot: int
    pid: int
    host: str
    hostname: str
    endpoint: tuple[str, int]


@dataclass(frozen=True)
class ViewGroup:
    """The process group of one view before it is connected. `rank` is this member's view index; `segment` is
    (pid, descriptor, inode, device) of the supervisor's shared memory, or empty."""

    generation: int
    rank: int
    members: Sequence[ViewPeer]
    secret: bytes
    segment: Sequence[int] = ()

    @property
    def slots(self) -> list[int]:
        """The labels of the ranks: errors name a worker by its slot, whatever its view index is."""
        return [member.slot for member in self.members]


def open_view(
    view: ViewGroup,
    listener: socket.socket | None,
    *,
    links: LinkCosts | None = None,
    cancelled: threading.Event | None = None,
    forming_seconds: float = FORMING_SECONDS,
    ports: str = "",
) -> tuple[Transport, LinkCosts | None]:
    """Connect this member to the others of its view; return its transport and the links that all ranks choose
    by. `listener` is the member's own, kept open by the caller, and becomes non-blocking. Further listeners
    of this view are at the same address, on a port of the range `ports`."""
    rank, members = view.rank, view.members
    if not 0 <= rank < len(members):
        size = counted(len(members), "member")
        raise UsageError(f"view index {rank} in a view of {size}", remedy="pass every member")
    if view.segment:
        return _in_segment(view), links
    if len(members) == 1:
        return single_rank(view.slots), links
    own = "" if listener is None else str(listener.getsockname()[0])
    hello = RankIntroduction(
        host=members[rank].host,
        hostname=members[rank].hostname,
        secret=hmac.new(view.secret, b"view %d" % view.generation, hashlib.sha256).digest(),
        links=links,
        # Empty where the member listens everywhere, or nowhere.
        listening=ListenAddress(ports, "" if own in ALL_ADDRESSES else own),
    )
    forming = _Forming(view, hello, time.monotonic() + forming_seconds, cancelled)
    return forming.serve(listener) if rank == 0 else forming.join()


def _in_segment(view: ViewGroup) -> ShmTransport:
    pid, descriptor, inode, device = view.segment
    try:
        fd = open_segment({"fd": descriptor, "inode": inode, "device": device}, pid)
    except OSError as error:
        raise RendezvousError(
            f"rank {view.slots[view.rank]} cannot open the group's shared memory, descriptor {descriptor} of "
            f"process {pid}: {error.strerror or error}",
            remedy="the process that made it has to live until all ranks are in, under the same user",
        ) from error
    try:
        return ShmTransport(fd, view.rank, len(view.members), labels=view.slots)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class _Forming:
    """One rank's part in forming a group over the network."""

    view: ViewGroup
    hello: RankIntroduction
    deadline: float
    cancelled: threading.Event | None

    def serve(self, listener: socket.socket | None) -> tuple[Transport, LinkCosts]:
        if listener is None:
            raise UsageError(
                "the first rank of a view has no listener",
                remedy="pass the socket behind members[0].endpoint",
            )
        with ExitStack() as stack:
            server = StoreServer(listener.dup(), self.hello.secret)
            stack.callback(server.close)
            rendezvous = self._round(stack.enter_context(closing(self._client(local_address(listener)))))
            return connect_ranks(rendezvous, self.view.members[0].endpoint[0], self.hello, server.close)

    def join(self) -> tuple[Transport, LinkCosts]:
        """Join the round that the first rank serves. Try again after the end of an earlier view's round."""
        endpoint = self.view.members[0].endpoint
        while True:
            # The first rank may not have begun to serve: its listener takes the connection, the answer comes
            # later.
            with closing(self._client(endpoint)) as client:
                try:
                    return connect_ranks(self._round(client), endpoint[0], self.hello)
                except StoreGoneError as error:
                    # The end of an earlier view's round, to which this rank came too early for this one.
                    if time.monotonic() >= self.deadline:
                        raise RendezvousError(
                            f"the rendezvous of view {self.view.generation} at {Address(*endpoint)} ended "
                            f"without rank {self._rank}: {error}"
                        ) from error
            self._check_cancelled()
            time.sleep(_AGAIN_SECONDS)

    @property
    def _rank(self) -> int:
        return self.view.slots[self.view.rank]

    def _client(self, endpoint: tuple[str, int]) -> StoreClient:
        return connect(
            self._rank,
            Address(*endpoint),
            self.deadline,
            secret=self.hello.secret,
            look=self._check_cancelled,
            first=self.view.slots[0],
        )

    def _round(self, client: StoreClient) -> RendezvousRound:
        return RendezvousRound(
            client,
            self.view.rank,
            len(self.view.members),
            self.deadline,
            f"view {self.view.generation}",
            prefix=f"{self.view.generation}/",
            cancel=self._check_cancelled,
            labels=self.view.slots,
        )

    def _check_cancelled(self) -> None:
        if self.cancelled is not None and self.cancelled.is_set():
            raise GroupInterruptedError(
                f"rank {self._rank} was interrupted while it formed view {self.view.generation}"
            )
