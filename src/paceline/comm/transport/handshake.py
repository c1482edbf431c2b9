"""Connections between all ranks, each end proven to know the group's secret before anything it says is
believed.

Every pair of ranks has two: one for control and small messages, one for bulk data. Rank r connects to every
lower rank and accepts every higher one; the proof (core.handshake) covers which rank calls which, and for
what. A stranger who connects and says nothing, or nonsense, is dropped and delays nobody: limits, deadline
and `look` go by the clock, however often somebody knocks. Knows sockets, not what they will carry.
"""

from __future__ import annotations

import enum
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.comm.calls import ranks_text
from paceline.comm.meeting import Patience
from paceline.comm.transport.dial import Look, dial, nothing_to_see, read_exactly
from paceline.comm.transport.entrance import Entrance, Proven
from paceline.core.errors import RendezvousError
from paceline.core.handshake import Connector, HandshakeError, Protocol

_CONTEXT = struct.Struct("<III")  # from, to, stream
_PROTOCOL = Protocol(b"PLmesh2\0", _CONTEXT.size)
_LOOK_SECONDS = 0.02
_AGAIN_SECONDS = 0.02
# A host that vanished without closing its connections is noticed after about so long, without and with
# bytes on the way to it.
_SILENCE_SECONDS, _UNHEARD_SECONDS = 20, 60

Endpoint = tuple[str, int]


def source_address(host: str) -> str:
    """The address from which this machine reaches `host`; empty where nobody else could use it."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            source = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if source.startswith("127.") or source == "::1" else source


class Stream(enum.IntEnum):
    CONTROL = 0
    BULK = 1


@dataclass(frozen=True)
class Connected:
    """The two proven connections to one peer."""

    control: Proven
    bulk: Proven

    def close(self) -> None:
        self.control.sock.close()
        self.bulk.sock.close()


def connect_all(
    rank: int,
    listener: socket.socket,
    endpoints: Mapping[int, Endpoint],
    secret: bytes,
    deadline: float,
    look: Look = nothing_to_see,
) -> dict[int, Connected]:
    """Proven connections to every other rank of `endpoints`; `look` is called now and then and may raise."""
    made: dict[tuple[int, Stream], Proven] = {}
    try:
        for peer in sorted(endpoints):
            if peer < rank:
                for stream in Stream:
                    made[peer, stream] = connect(rank, peer, stream, endpoints[peer], secret, deadline, look)
        expected = {(peer, stream) for peer in endpoints if peer > rank for stream in Stream}
        _accept(rank, listener, expected, secret, deadline, look, made)
        for proven in made.values():
            _tune(proven.sock)
    except BaseException:
        for proven in made.values():
            proven.sock.close()
        raise
    return {peer: Connected(made[peer, Stream.CONTROL], made[peer, Stream.BULK]) for peer in endpoints}


def connect(
    rank: int, peer: int, stream: Stream, endpoint: Endpoint, secret: bytes, deadline: float, look: Look
) -> Proven:
    """One proven connection to a lower rank. Calls again where it is closed before both ends have proved
    themselves: strangers may have taken all places there for a moment."""
    where = f"{endpoint[0]}:{endpoint[1]}"
    deadline = max(deadline, time.monotonic() + 0.1)
    while True:
        try:
            sock = dial(*endpoint, deadline, look)
        except OSError as error:
            raise RendezvousError(
                f"rank {rank} cannot reach rank {peer} at {where}: {error.strerror or error}",
                remedy="check that the hosts can connect to each other on any port, and that the rank still "
                "runs",
            ) from error
        connector = Connector(_PROTOCOL, secret, _CONTEXT.pack(rank, peer, stream))
        try:
            while not connector.done:
                answer = connector.feed(read_exactly(sock, connector.wanted, deadline, look))
                if answer:
                    sock.sendall(answer)
            return Proven(sock, connector.session())
        except HandshakeError as error:
            sock.close()
            raise RendezvousError(
                f"what answers at {where} is not rank {peer} of this group: {error.message}"
            ) from error
        except (OSError, EOFError) as error:
            sock.close()
            if time.monotonic() + _AGAIN_SECONDS >= deadline:
                raise RendezvousError(
                    f"rank {peer} at {where} did not take the connection of rank {rank} in time: {error}",
                    remedy="check that both ranks were started with the same secret and that rank "
                    f"{peer} is not overrun by connections",
                ) from error
        except BaseException:
            sock.close()
            raise
        look()
        time.sleep(_AGAIN_SECONDS)


def _accept(
    rank: int,
    listener: socket.socket,
    expected: set[tuple[int, Stream]],
    secret: bytes,
    deadline: float,
    look: Look,
    made: dict[tuple[int, Stream], Proven],
) -> None:
    def claimed(context: bytes) -> tuple[int, int]:
        peer, to, stream = _CONTEXT.unpack(context)
        return (peer, stream) if to == rank else (-1, -1)

    def let_in(context: bytes, proven: Proven) -> None:
        peer, stream = claimed(context)
        made[peer, Stream(stream)] = proven

    def wanted(context: bytes) -> bool:
        return claimed(context) in expected - made.keys()

    def missing() -> str:
        return f"rank {rank} waits for {ranks_text({peer for peer, _ in expected - made.keys()})} to connect"

    patience = Patience(deadline)
    with selectors.DefaultSelector() as selector:
        entrance = Entrance(listener, _PROTOCOL, secret, selector, let_in, wanted)
        try:
            looked = time.monotonic()
            while expected - made.keys():
                for key, mask in selector.select(_LOOK_SECONDS):
                    key.data(mask)
                now = time.monotonic()
                entrance.tick(now)
                if now - looked >= _LOOK_SECONDS and expected - made.keys():
                    looked = now
                    look()
                    patience.check(missing)
        finally:
            entrance.close()


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _SILENCE_SECONDS // 2),
        ("TCP_KEEPINTVL", 3),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", _UNHEARD_SECONDS * 1000),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
