"""Connections between all ranks, each end proven to know the group's secret before anything it says is
believed.

Every pair of ranks has two: one for control and small messages, one for bulk data. Rank r connects to every
lower rank and accepts every higher one; the proof (core.handshake) covers which rank calls which, for what,
and how both ends can authenticate bulk data: what the caller offers, and what it was told of the other end
in the meeting. Where that is not what the other end said, the meeting was changed on the way and the group
does not form: no machine between the ranks chooses the kind. A stranger that connects and says nothing, or
nonsense, is dropped and delays no rank: limits, deadline and `look` go by the clock, however often strangers
connect (core.entrance). Knows sockets, not what they will carry.
"""

from __future__ import annotations

import enum
import functools
import logging
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.comm.calls import ranks_text
from paceline.comm.meeting import Patience
from paceline.comm.transport.dial import Look, dial, nothing_to_see, read_exactly
from paceline.core.entrance import Entrance, Proven
from paceline.core.errors import RendezvousError
from paceline.core.handshake import MESH, Connector, HandshakeError
from paceline.core.macs import Mac, agreed, describe, offered
from paceline.core.sealing import Session

_log = logging.getLogger("paceline.comm")

_CONTEXT = struct.Struct("<IIIII")  # from, to, stream, the kinds of MAC that each of the two offers
_LOOK_SECONDS = 0.02
_AGAIN_SECONDS = 0.02
# A host that vanished without closing its connections is noticed after about so long, without and with
# bytes on the way to it.
_SILENCE_SECONDS, _UNHEARD_SECONDS = 20, 60

Endpoint = tuple[str, int]


def source_address(host: str) -> str:
    """The address from which this machine reaches `host`; empty where no other machine could use it."""
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
    macs: Mapping[int, Mac] | None = None,
) -> dict[int, Connected]:
    """Proven connections to every other rank of `endpoints`; `look` is called now and then and may raise.
    `macs` says what every rank, this one too, offers to authenticate bulk data by; not given: the same."""
    macs = dict.fromkeys((*endpoints, rank), offered()) if macs is None else macs
    made: dict[tuple[int, Stream], Proven] = {}
    try:
        for peer in sorted(endpoints):
            if peer < rank:
                for stream in Stream:
                    claim = Claim(rank, peer, stream, macs[rank], macs[peer])
                    made[peer, stream] = connect(claim, endpoints[peer], secret, deadline, look)
        expected = {
            Claim(peer, rank, stream, macs[peer], macs[rank])
            for peer in endpoints
            if peer > rank
            for stream in Stream
        }
        _accept(rank, listener, expected, secret, deadline, look, made)
        for proven in made.values():
            _tune(proven.sock)
    except BaseException:
        for proven in made.values():
            proven.sock.close()
        raise
    kinds = sorted({describe(agreed(macs[rank], macs[peer])) for peer in endpoints})
    _log.debug("rank %d: data between ranks is authenticated by %s", rank, " and ".join(kinds))
    return {peer: Connected(made[peer, Stream.CONTROL], made[peer, Stream.BULK]) for peer in endpoints}


@dataclass(frozen=True)
class Claim:
    """What a caller says of a connection, covered by both proofs. `called_offers` is what the caller was told
    of the other end in the meeting, which may not be protected."""

    caller: int
    called: int
    stream: int
    caller_offers: Mac
    called_offers: Mac

    def packed(self) -> bytes:
        return _CONTEXT.pack(self.caller, self.called, self.stream, self.caller_offers, self.called_offers)

    @classmethod
    def from_packed(cls, context: bytes) -> Claim:
        caller, called, stream, caller_offers, called_offers = _CONTEXT.unpack(context)
        return cls(caller, called, stream, Mac(caller_offers), Mac(called_offers))

    @property
    def place(self) -> tuple[int, int, int]:
        """Which connection of the group it is."""
        return self.caller, self.called, self.stream

    def session(self, session: Session) -> Session:
        """The keys, with chunks tagged by the kind that both ends offer."""
        return session.by(agreed(self.caller_offers, self.called_offers))


def connect(claim: Claim, endpoint: Endpoint, secret: bytes, deadline: float, look: Look) -> Proven:
    """One proven connection to a lower rank. Calls again where it is closed before both ends have proved
    themselves: strangers may have taken all places there for a moment."""
    rank, peer = claim.caller, claim.called
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
        read = functools.partial(read_exactly, sock, deadline=deadline, look=look)
        try:
            connector = Connector(MESH, secret, claim.packed())
            return Proven(sock, claim.session(connector.run(read, sock.sendall)))
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
    expected: set[Claim],
    secret: bytes,
    deadline: float,
    look: Look,
    made: dict[tuple[int, Stream], Proven],
) -> None:
    missing = {claim.place: claim for claim in expected}
    refused: list[RendezvousError] = []

    def wanted(context: bytes) -> bool:
        claim = Claim.from_packed(context)
        due = missing.get(claim.place)
        if due is not None and due != claim:
            refused.append(_changed_on_the_way(due, claim))
        return due == claim

    def let_in(context: bytes, proven: Proven) -> None:
        claim = Claim.from_packed(context)
        del missing[claim.place]
        made[claim.caller, Stream(claim.stream)] = Proven(proven.sock, claim.session(proven.session))

    def waits() -> str:
        return f"rank {rank} waits for {ranks_text({claim.caller for claim in missing.values()})} to connect"

    patience = Patience(deadline)
    with selectors.DefaultSelector() as selector:
        entrance = Entrance(listener, MESH, secret, selector, let_in, expected=wanted)
        try:
            looked = time.monotonic()
            while missing:
                ready = selector.select(_LOOK_SECONDS)
                now = time.monotonic()
                for key, mask in ready:
                    key.data(mask, now)
                entrance.tick(now)
                if refused:
                    raise refused[0]
                if now - looked >= _LOOK_SECONDS and missing:
                    looked = now
                    look()
                    patience.check(waits)
        finally:
            entrance.close()


def _changed_on_the_way(due: Claim, claim: Claim) -> RendezvousError:
    """A member, proven, that was told something else than this rank said, or the other way round."""
    return RendezvousError(
        f"ranks {claim.caller} and {claim.called} do not agree on how data between them is authenticated: "
        f"rank {claim.caller} offers {claim.caller_offers!r} and rank {claim.called} was told "
        f"{due.caller_offers!r}; rank {claim.called} offers {due.called_offers!r} and rank {claim.caller} "
        f"was told {claim.called_offers!r}",
        remedy="what the ranks said when they met was changed on its way: check what is between them and the "
        "rendezvous, or protect it with a secret (PACELINE_SECRET_FILE)",
    )


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
