"""Connections between all ranks, each end proven to know the group's secret before anything it says is
believed.

    connector -> acceptor   magic, from, to, nonce
    acceptor -> connector   nonce, HMAC("accept", both of these)
    connector -> acceptor   HMAC("connect", both of these)

Rank r connects to every lower rank and accepts every higher one. A stranger who connects and says nothing,
or nonsense, is dropped and delays nobody. Knows sockets, not what they will carry.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.comm.calls import ranks_text
from paceline.comm.meeting import Patience
from paceline.comm.transport.dial import Look, dial, nothing_to_see, read_exactly
from paceline.core.errors import RendezvousError

_MAGIC = b"PLmesh1\0"
_GREETING = struct.Struct("<8sII16s")
_NONCE_BYTES, _MAC_BYTES = 16, 32
_STRANGER_SECONDS = 5.0
_LOOK_SECONDS = 0.02
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


def connect_all(
    rank: int,
    listener: socket.socket,
    endpoints: Mapping[int, Endpoint],
    secret: bytes,
    deadline: float,
    look: Look = nothing_to_see,
) -> dict[int, socket.socket]:
    """A proven connection to every other rank of `endpoints`; `look` is called now and then and may raise."""
    connected: dict[int, socket.socket] = {}
    try:
        for peer in sorted(endpoints):
            if peer < rank:
                connected[peer] = _connect(rank, peer, endpoints[peer], secret, deadline, look)
        _accept(
            rank, listener, {peer for peer in endpoints if peer > rank}, secret, deadline, look, connected
        )
    except BaseException:
        for sock in connected.values():
            sock.close()
        raise
    for sock in connected.values():
        _tune(sock)
    return connected


def _connect(
    rank: int, peer: int, endpoint: Endpoint, secret: bytes, deadline: float, look: Look
) -> socket.socket:
    where = f"{endpoint[0]}:{endpoint[1]}"
    deadline = max(deadline, time.monotonic() + 0.1)
    try:
        sock = dial(*endpoint, deadline, look)
    except OSError as error:
        raise RendezvousError(
            f"rank {rank} cannot reach rank {peer} at {where}: {error.strerror or error}",
            remedy="check that the hosts can connect to each other on any port, and that the rank still runs",
        ) from error
    try:
        greeting = _GREETING.pack(_MAGIC, rank, peer, os.urandom(_NONCE_BYTES))
        sock.sendall(greeting)
        answer = read_exactly(sock, _NONCE_BYTES + _MAC_BYTES, deadline, look)
        nonce, mac = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(mac, _mac(secret, b"accept", greeting, nonce)):
            raise RendezvousError(
                f"what answers at {where} does not know the secret of this group: it is not rank {peer}"
            )
        sock.sendall(_mac(secret, b"connect", greeting, nonce))
    except (OSError, EOFError) as error:
        sock.close()
        raise RendezvousError(
            f"rank {peer} at {where} went away while rank {rank} connected to it: {error}"
        ) from error
    except BaseException:
        sock.close()
        raise
    return sock


@dataclass
class _Caller:
    """Somebody who connected and has not proven who it is."""

    since: float
    heard: bytearray = field(default_factory=bytearray)
    greeting: bytes = b""
    nonce: bytes = b""


def _accept(
    rank: int,
    listener: socket.socket,
    expected: set[int],
    secret: bytes,
    deadline: float,
    look: Look,
    connected: dict[int, socket.socket],
) -> None:
    patience = Patience(deadline)
    callers: dict[socket.socket, _Caller] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while missing := expected - connected.keys():
                ready = [key.fileobj for key, _ in selector.select(_LOOK_SECONDS)]
                for sock in ready:
                    if sock is listener:
                        _welcome(listener, selector, callers)
                        continue
                    assert isinstance(sock, socket.socket)
                    peer = _hear(sock, callers[sock], rank, missing, secret)
                    if peer is not None:
                        selector.unregister(sock)
                        del callers[sock]
                        if peer >= 0:
                            connected[peer] = sock
                            missing.discard(peer)
                        else:
                            sock.close()
                now = time.monotonic()
                for sock in [
                    sock for sock, caller in callers.items() if now - caller.since > _STRANGER_SECONDS
                ]:
                    selector.unregister(sock)
                    del callers[sock]
                    sock.close()
                if not ready:
                    look()
                    patience.check(
                        lambda: f"rank {rank} waits for {ranks_text(expected - connected.keys())} to connect"
                    )
        finally:
            for sock in callers:
                sock.close()


def _welcome(
    listener: socket.socket, selector: selectors.BaseSelector, callers: dict[socket.socket, _Caller]
) -> None:
    try:
        sock, _ = listener.accept()
    except OSError:
        return  # the caller is gone again
    sock.setblocking(False)
    callers[sock] = _Caller(time.monotonic())
    selector.register(sock, selectors.EVENT_READ)


def _hear(sock: socket.socket, caller: _Caller, rank: int, missing: set[int], secret: bytes) -> int | None:
    """The proven rank of a caller, -1 if it is nobody of ours, None as long as it has not said enough."""
    wanted = _MAC_BYTES if caller.greeting else _GREETING.size
    try:
        data = sock.recv(wanted - len(caller.heard))
    except BlockingIOError:
        return None
    except OSError:
        return -1
    if not data:
        return -1
    caller.heard += data
    if len(caller.heard) < wanted:
        return None
    said, caller.heard = bytes(caller.heard), bytearray()
    if caller.greeting:
        peer = _GREETING.unpack(caller.greeting)[1]
        proven = hmac.compare_digest(said, _mac(secret, b"connect", caller.greeting, caller.nonce))
        return int(peer) if proven and peer in missing else -1
    magic, peer, to, _ = _GREETING.unpack(said)
    if magic != _MAGIC or to != rank or peer not in missing:
        return -1
    caller.greeting, caller.nonce = said, os.urandom(_NONCE_BYTES)
    try:
        sock.sendall(caller.nonce + _mac(secret, b"accept", said, caller.nonce))
    except OSError:
        return -1
    return None


def _mac(secret: bytes, role: bytes, greeting: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, role + greeting + nonce, hashlib.sha256).digest()


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
