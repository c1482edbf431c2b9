"""Accept connections from any host and admit only those that prove the secret; unauthenticated peers cost
next to nothing.

An unauthenticated peer may send an answer's fixed number of bytes (see `handshake`) in 3 seconds, TLS
included. There are at most 128 pending connections at a time: the next one takes the place of the oldest from
the host that has the most, so a flood from one host does not push out a member that connects from another.
When no descriptor is left, accepting pauses instead of spinning. An exception about one connection drops that
connection and no other. A member that was pushed out, or that the 3 seconds caught while its machine was
busy, connects again: every connecting end does.

The owner runs the selector: it calls `key.data(mask, now)` of what is ready, and `tick(now)` when it is
`due`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from paceline.core import limit_errors
from paceline.core.errors import PacelineError
from paceline.core.handshake import Acceptor, KeyedDifferentlyError, VersionError, WireProtocol
from paceline.core.session_auth import SessionKeys
from paceline.core.tls import TlsEnd

_log = logging.getLogger(__name__)

MAX_UNAUTHENTICATED: Final = 128
HANDSHAKE_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 0.1
_ACCEPTS_PER_TURN: Final = 64
_REPORT_SECONDS: Final = 60.0
_MAX_REPORTED: Final = 64
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class AuthenticatedSocket:
    """A connection whose other end has proved the secret, with the keys of its session. Does not block."""

    sock: socket.socket
    session: SessionKeys
    host: str = ""


@dataclass(eq=False)
class _UnprovenPeer:
    """A connection that has not authenticated yet. `acceptor` is None until the TLS handshake is complete;
    without TLS it is made when the connection is accepted."""

    sock: socket.socket
    host: str
    until: float
    acceptor: Acceptor | None = None


def _log_warning(error: PacelineError) -> None:
    _log.warning("%s", error.message)


@final
class AuthenticatedListener:
    """A listening socket and all connections that have not proved anything yet. `expected(context)` decides
    whether a connector that has proved itself is admitted, `on_authenticated(context, proven)` takes it over.
    `refused` counts the others; `on_problem` gets mistakes that a person can mend (another version, a secret
    on one end only, no descriptor left), those of a host once."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: WireProtocol,
        secret: bytes,
        selector: selectors.BaseSelector,
        on_authenticated: Callable[[bytes, AuthenticatedSocket], None],
        *,
        expected: Callable[[bytes], bool] = lambda context: True,
        tls: TlsEnd | None = None,
        on_problem: Callable[[PacelineError], None] = _log_warning,
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._secret = secret
        self._selector = selector
        self._on_authenticated = on_authenticated
        self._expected = expected
        self._tls = tls
        self._on_problem = on_problem
        self._pending: dict[socket.socket, _UnprovenPeer] = {}  # in the order in which they came
        self._hosts: Counter[str] = Counter()
        self._paused_until = 0.0
        self._reported_hosts: set[str] = set()
        self._quiet_until = 0.0
        self.refused = 0
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def address(self) -> tuple[str, int]:
        """The address of the listening socket."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def due(self) -> float:
        """The time at which `tick` has something to do."""
        first = next(iter(self._pending.values()), None)
        due = first.until if first is not None else float("inf")
        return min(due, self._paused_until) if self._paused_until else due

    def tick(self, now: float) -> None:
        """Drop pending connections that took too long; accept again after a pause."""
        for pending in [pending for pending in self._pending.values() if pending.until <= now]:
            self._drop(pending)
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Drop all pending connections and leave the listening socket, which stays open, to its owner."""
        for pending in list(self._pending.values()):
            self._drop(pending)
        if not self._paused_until:
            self._selector.unregister(self._listener)

    def _accept(self, mask: int, now: float) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return  # the queue is empty, or the connector is gone again
            except OSError as error:
                # Of any kind: to accept again at once could fail for ever without letting go of the loop.
                self._pause(error, now)
                return
            self._evict_oldest()
            self._start(sock, str(address[0]), now)

    def _pause(self, error: OSError, now: float) -> None:
        """Leave new connections in the queue for a moment. Where no descriptor is left, close half of the
        pending connections."""
        self._selector.unregister(self._listener)
        self._paused_until = now + _PAUSE_SECONDS
        if error.errno not in _NO_ROOM:
            _log.debug("no connection can be accepted: %r", error)
            return
        for pending in list(self._pending.values())[: MAX_UNAUTHENTICATED // 2]:
            self._drop(pending)
        if now >= self._quiet_until:
            self._quiet_until = now + _REPORT_SECONDS
            self._on_problem(limit_errors.explain_os_error(error, "no connection can be accepted"))

    def _evict_oldest(self) -> None:
        if len(self._pending) < MAX_UNAUTHENTICATED:
            return
        busiest = self._hosts.most_common(1)[0][0]
        oldest = next(pending for pending in self._pending.values() if pending.host == busiest)
        self._advance(oldest)  # its answer may be here already
        if oldest.sock in self._pending:
            self._drop(oldest)

    def _start(self, sock: socket.socket, host: str, now: float) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap(sock, handshake=False)  # the socket before is empty then
            pending = _UnprovenPeer(sock, host, now + HANDSHAKE_SECONDS)
            self._selector.register(sock, selectors.EVENT_READ, lambda mask, now: self._advance(pending))
        except Exception as error:
            self.refused += 1
            sock.close()
            _log.debug("a connection from %s was dropped: %r", host, error)
            return
        self._pending[sock] = pending
        self._hosts[host] += 1
        self._advance(pending)

    def _advance(self, pending: _UnprovenPeer) -> None:
        if pending.sock not in self._pending:
            return  # dropped in this turn, to make room for another
        try:
            acceptor = self._exchange(pending)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            return
        except Exception as error:
            self._drop(pending)
            self._log_refusal(pending.host, error)
            return
        self._forget(pending)
        try:
            self._on_authenticated(
                acceptor.context, AuthenticatedSocket(pending.sock, acceptor.session_keys(), pending.host)
            )
        except Exception as error:
            pending.sock.close()  # it may be gone already
            _log.debug("a member from %s was dropped: %r", pending.host, error)

    def _exchange(self, pending: _UnprovenPeer) -> Acceptor:
        """Continue until the peer has proved itself and has our proof; raise before, also where the peer has
        to be waited for."""
        sock, acceptor = pending.sock, pending.acceptor
        if acceptor is None:
            bound = b""
            if self._tls is not None:
                assert isinstance(sock, ssl.SSLSocket)
                sock.do_handshake()
                bound = self._tls.bound(sock)
            pending.acceptor = acceptor = Acceptor(self._protocol, self._secret, bound)
            _send_all(sock, acceptor.challenge)
        while data := sock.recv(acceptor.wanted):
            if acceptor.feed(data):
                if not self._expected(acceptor.context):
                    break
                _send_all(sock, acceptor.proof)
                return acceptor
        raise ConnectionResetError("closed before it proved anything, or not expected")

    def _log_refusal(self, host: str, error: Exception) -> None:
        if not isinstance(error, KeyedDifferentlyError | VersionError) or host in self._reported_hosts:
            return
        if len(self._reported_hosts) < _MAX_REPORTED:
            self._reported_hosts.add(host)
            refusal = f"a connection from {host} was refused: {error.message}"
            self._on_problem(type(error)(refusal, remedy=error.remedy))

    def _drop(self, pending: _UnprovenPeer) -> None:
        self.refused += 1
        self._forget(pending)
        pending.sock.close()

    def _forget(self, pending: _UnprovenPeer) -> None:
        del self._pending[pending.sock]
        self._hosts[pending.host] -= 1
        if not self._hosts[pending.host]:
            del self._hosts[pending.host]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(pending.sock)


def _send_all(sock: socket.socket, data: bytes) -> None:
    if sock.send(data) != len(data):
        raise ConnectionResetError("no room for a proof in the socket's buffer")
