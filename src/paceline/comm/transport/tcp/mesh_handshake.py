"""Connections between all ranks, each end proven to know the group's secret before anything it says is
believed.

Every pair of ranks has two: one for control and small messages, one for bulk data. Rank r connects to every
lower rank and accepts every higher one; the proof (core.handshake) covers which rank calls which, for what,
and how both ends can authenticate bulk data: what the caller offers, and what the other end offered
in the rendezvous. Where that is not what the other end said, the rendezvous was changed on the way and the
group does not form: no machine between the ranks chooses the kind. A stranger that connects and sends
nothing, or nonsense, is dropped and delays no rank: limits, deadline and `look` go by the clock, however
often strangers connect (core.authenticated_listener).
"""

from __future__ import annotations

import enum
import functools
import logging
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.comm.transport.tcp.dial import Deadline, Look, dial, no_check, read_exactly
from paceline.core.authenticated_listener import AuthenticatedListener, AuthenticatedSocket
from paceline.core.errors import RendezvousError
from paceline.core.handshake import MESH, Connector, HandshakeError
from paceline.core.mac_algorithms import Mac, agreed, describe, offered
from paceline.core.session_auth import SessionKeys
from paceline.core.wording import ranks

_log = logging.getLogger("paceline.comm")

_CONTEXT = struct.Struct("<IIIII")  # from, to, stream, the kinds of MAC that each of the two offers
_LOOK_SECONDS = 0.02
_AGAIN_SECONDS = 0.02
# A host that vanished without closing its connections is noticed after about so long, without and with
# bytes on the way to it.
_SILENCE_SECONDS, _UNACKED_SECONDS = 20, 60

Endpoint = tuple[str, int]


def source_address(host: str) -> str:
    """Return the address from which this machine reaches `host`; empty where no other machine can use it."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            source = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if source.startswith("127.") or source == "::1" else source


class MeshStream(enum.IntEnum):
    CONTROL = 0
    BULK = 1


@dataclass(frozen=True)
class PeerConnections:
    """The two proven connections to one peer."""

    control: AuthenticatedSocket
    bulk: AuthenticatedSocket

    def close(self) -> None:
        self.control.sock.close()
        self.bulk.sock.close()


def connect_all(
    rank: int,
    listener: socket.socket,
    endpoints: Mapping[int, Endpoint],
    secret: bytes,
    deadline: float,
    look: Look = no_check,
    macs: Mapping[int, Mac] | None = None,
    labels: Sequence[int] | None = None,
) -> dict[int, PeerConnections]:
    """Connect to every other rank of `endpoints`; `look` is called now and then and may raise.
    `macs` has what every rank, this one too, offers to authenticate bulk data by; None: the same for all."""
    macs = dict.fromkeys((*endpoints, rank), offered()) if macs is None else macs
    labels = range(max(rank, *endpoints) + 1) if labels is None else labels
    made: dict[tuple[int, MeshStream], AuthenticatedSocket] = {}
    try:
        for peer in sorted(endpoints):
            if peer < rank:
                for stream in MeshStream:
                    claim = ConnectionClaim(rank, peer, stream, macs[rank], macs[peer])
                    made[peer, stream] = connect(claim, endpoints[peer], secret, deadline, look, labels)
        expected = {
            ConnectionClaim(peer, rank, stream, macs[peer], macs[rank])
            for peer in endpoints
            if peer > rank
            for stream in MeshStream
        }
        _accept(listener, expected, secret, deadline, look, made, labels)
        for proven in made.values():
            _tune(proven.sock)
    except BaseException:
        for proven in made.values():
            proven.sock.close()
        raise
    kinds = sorted({describe(agreed(macs[rank], macs[peer])) for peer in endpoints})
    _log.debug("rank %d: data between ranks is authenticated by %s", labels[rank], " and ".join(kinds))
    return {
        peer: PeerConnections(made[peer, MeshStream.CONTROL], made[peer, MeshStream.BULK])
        for peer in endpoints
    }


@dataclass(frozen=True)
class ConnectionClaim:
    """Claim of a caller about a connection, covered by both proofs. `called_offers` is what the caller read
    of the other end in the rendezvous, which may not be protected."""

    caller: int
    called: int
    stream: int
    caller_offers: Mac
    called_offers: Mac

    def packed(self) -> bytes:
        return _CONTEXT.pack(self.caller, self.called, self.stream, self.caller_offers, self.called_offers)

    @classmethod
    def from_packed(cls, context: bytes) -> ConnectionClaim:
        caller, called, stream, caller_offers, called_offers = _CONTEXT.unpack(context)
        return cls(caller, called, stream, Mac(caller_offers), Mac(called_offers))

    @property
    def key(self) -> tuple[int, int, int]:
        """The identity of the connection in its group: caller, called rank and stream."""
        return self.caller, self.called, self.stream

    def session(self, session: SessionKeys) -> SessionKeys:
        """Return the keys, with chunks tagged by the kind that both ends offer."""
        return session.by(agreed(self.caller_offers, self.called_offers))


def connect(
    claim: ConnectionClaim,
    endpoint: Endpoint,
    secret: bytes,
    deadline: float,
    look: Look,
    labels: Sequence[int],
) -> AuthenticatedSocket:
    """Make one proven connection to a lower rank. Calls again where it is closed before both ends have proved
    themselves: strangers may have taken all pending connections of that rank for a moment."""
    rank, peer = labels[claim.caller], labels[claim.called]
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
            return AuthenticatedSocket(sock, claim.session(connector.run(read, sock.sendall)))
        except BaseException as error:
            sock.close()
            if isinstance(error, HandshakeError):
                raise RendezvousError(
                    f"what answers at {where} is not rank {peer} of this group: {error.message}"
                ) from error
            if not isinstance(error, OSError | EOFError):
                raise
            if time.monotonic() + _AGAIN_SECONDS >= deadline:
                raise RendezvousError(
                    f"rank {peer} at {where} did not take the connection of rank {rank} in time: {error}",
                    remedy="check that both ranks were started with the same secret and that rank "
                    f"{peer} is not overrun by connections",
                ) from error
        look()
        time.sleep(_AGAIN_SECONDS)


def _accept(
    listener: socket.socket,
    expected: set[ConnectionClaim],
    secret: bytes,
    deadline: float,
    look: Look,
    made: dict[tuple[int, MeshStream], AuthenticatedSocket],
    labels: Sequence[int],
) -> None:
    missing = {claim.key: claim for claim in expected}
    refused: list[RendezvousError] = []

    def wanted(context: bytes) -> bool:
        claim = ConnectionClaim.from_packed(context)
        due = missing.get(claim.key)
        if due is not None and due != claim:
            refused.append(_changed_on_the_way(due, claim, labels))
        return due == claim

    def let_in(context: bytes, proven: AuthenticatedSocket) -> None:
        claim = ConnectionClaim.from_packed(context)
        del missing[claim.key]
        made[claim.caller, MeshStream(claim.stream)] = AuthenticatedSocket(
            proven.sock, claim.session(proven.session)
        )

    def waits() -> str:
        callers = ranks({labels[claim.caller] for claim in missing.values()}, all_named=True)
        called = {labels[claim.called] for claim in expected}
        return f"{ranks(called, 'waits', 'wait', all_named=True)} for {callers} to connect"

    limit = Deadline(deadline)
    with selectors.DefaultSelector() as selector:
        unproven = AuthenticatedListener(listener, MESH, secret, selector, let_in, expected=wanted)
        try:
            looked = time.monotonic()
            while missing:
                ready = selector.select(_LOOK_SECONDS)
                now = time.monotonic()
                for key, mask in ready:
                    key.data(mask, now)
                unproven.tick(now)
                if refused:
                    raise refused[0]
                if now - looked >= _LOOK_SECONDS and missing:
                    looked = now
                    look()
                    limit.check(waits)
        finally:
            unproven.close()


def _changed_on_the_way(
    due: ConnectionClaim, claim: ConnectionClaim, labels: Sequence[int]
) -> RendezvousError:
    """Describe a proven member that was given another offer than this rank made, or the reverse."""
    caller, called = labels[claim.caller], labels[claim.called]
    return RendezvousError(
        f"ranks {caller} and {called} do not agree on how data between them is authenticated: "
        f"rank {caller} offers {claim.caller_offers!r} and rank {called} was told {due.caller_offers!r}; "
        f"rank {called} offers {due.called_offers!r} and rank {caller} was told {claim.called_offers!r}",
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
        ("TCP_USER_TIMEOUT", _UNACKED_SECONDS * 1000),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
