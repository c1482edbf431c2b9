"""Accept connections from any host and admit only those that prove the secret; strangers cost next to
nothing.

A stranger may say an answer's fixed number of bytes (see `handshake`) in 3 seconds, TLS included. There are
at most 128 strangers at a time: the next one takes the place of the oldest from the host that has the most,
so a flood from one host does not push out a member that connects from another. When no descriptor is left,
accepting pauses instead of spinning. An exception about one stranger drops that stranger and no other. A
member that was pushed out, or that the 3 seconds caught while its machine was busy, connects again: every
connecting end does.

The owner runs the selector: it calls `key.data(mask, now)` of what is ready, and `tick(now)` when it is
`due`. Must not know what is said by those who come in.
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

from paceline.core import limits
from paceline.core.errors import PacelineError
from paceline.core.handshake import Acceptor, KeyedDifferentlyError, Protocol, VersionError
from paceline.core.sealing import Session
from paceline.core.tls import TlsEnd

_log = logging.getLogger(__name__)

STRANGERS: Final = 128
STRANGER_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 0.1
_ACCEPTS_PER_TURN: Final = 64
_COMPLAIN_SECONDS: Final = 60.0
_COMPLAINTS: Final = 64
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class Proven:
    """A connection whose other end has proved the secret, with the keys of its session. Does not block."""

    sock: socket.socket
    session: Session
    host: str = ""


@dataclass(eq=False)
class _Stranger:
    """`acceptor` is there from the moment at which TLS, where it is used, shows the certificates."""

    sock: socket.socket
    host: str
    until: float
    acceptor: Acceptor | None = None


def _log_it(error: PacelineError) -> None:
    _log.warning("%s", error.message)


@final
class Entrance:
    """A listening socket and all connections that have not proved anything yet. `expected(context)` says
    whether a connector that has proved itself may come in, `let_in(context, proven)` takes it over. `refused`
    counts the others; `complain` gets mistakes that a person can mend (another version, a secret on one end
    only, no descriptor left), those of a host once."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Protocol,
        secret: bytes,
        selector: selectors.BaseSelector,
        let_in: Callable[[bytes, Proven], None],
        *,
        expected: Callable[[bytes], bool] = lambda context: True,
        tls: TlsEnd | None = None,
        complain: Callable[[PacelineError], None] = _log_it,
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._secret = secret
        self._selector = selector
        self._let_in = let_in
        self._expected = expected
        self._tls = tls
        self._complain = complain
        self._strangers: dict[socket.socket, _Stranger] = {}  # in the order in which they came
        self._hosts: Counter[str] = Counter()
        self._paused_until = 0.0
        self._complained_of: set[str] = set()
        self._quiet_until = 0.0
        self.refused = 0
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def due(self) -> float:
        """When `tick` has something to do."""
        first = next(iter(self._strangers.values()), None)
        due = first.until if first is not None else float("inf")
        return min(due, self._paused_until) if self._paused_until else due

    def tick(self, now: float) -> None:
        """Drop those that took too long; accept again after a pause."""
        for stranger in [one for one in self._strangers.values() if one.until <= now]:
            self._drop(stranger)
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Drop all strangers and leave the listening socket, which stays open, to its owner."""
        for stranger in list(self._strangers.values()):
            self._drop(stranger)
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
            self._make_room()
            self._welcome(sock, str(address[0]), now)

    def _pause(self, error: OSError, now: float) -> None:
        """The queue waits a moment. Where no descriptor is left, half of the strangers make room."""
        self._selector.unregister(self._listener)
        self._paused_until = now + _PAUSE_SECONDS
        if error.errno not in _NO_ROOM:
            _log.debug("no connection can be accepted: %r", error)
            return
        for stranger in list(self._strangers.values())[: STRANGERS // 2]:
            self._drop(stranger)
        if now >= self._quiet_until:
            self._quiet_until = now + _COMPLAIN_SECONDS
            self._complain(limits.explained(error, "no connection can be accepted"))

    def _make_room(self) -> None:
        if len(self._strangers) < STRANGERS:
            return
        crowd = self._hosts.most_common(1)[0][0]
        oldest = next(one for one in self._strangers.values() if one.host == crowd)
        self._hear(oldest)  # its answer may be here already
        if oldest.sock in self._strangers:
            self._drop(oldest)

    def _welcome(self, sock: socket.socket, host: str, now: float) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap(sock, handshake=False)  # the socket before is empty then
            stranger = _Stranger(sock, host, now + STRANGER_SECONDS)
            self._selector.register(sock, selectors.EVENT_READ, lambda mask, now: self._hear(stranger))
        except Exception as error:
            self.refused += 1
            sock.close()
            _log.debug("a stranger from %s was dropped: %r", host, error)
            return
        self._strangers[sock] = stranger
        self._hosts[host] += 1
        self._hear(stranger)

    def _hear(self, stranger: _Stranger) -> None:
        if stranger.sock not in self._strangers:
            return  # dropped in this turn, to make room for another
        try:
            acceptor = self._converse(stranger)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            return
        except Exception as error:
            self._drop(stranger)
            self._say_why(stranger.host, error)
            return
        self._forget(stranger)
        try:
            self._let_in(acceptor.context, Proven(stranger.sock, acceptor.session(), stranger.host))
        except Exception as error:
            stranger.sock.close()  # it may be gone already
            _log.debug("a member from %s was dropped: %r", stranger.host, error)

    def _converse(self, stranger: _Stranger) -> Acceptor:
        """Go on until the stranger has proved itself and has our proof; raises before, also where it has to
        be waited for."""
        sock, acceptor = stranger.sock, stranger.acceptor
        if acceptor is None:
            bound = b""
            if self._tls is not None:
                assert isinstance(sock, ssl.SSLSocket)
                sock.do_handshake()
                bound = self._tls.bound(sock)
            stranger.acceptor = acceptor = Acceptor(self._protocol, self._secret, bound)
            _say(sock, acceptor.challenge)
        while data := sock.recv(acceptor.wanted):
            if acceptor.feed(data):
                if not self._expected(acceptor.context):
                    break
                _say(sock, acceptor.proof)
                return acceptor
        raise ConnectionResetError("closed before it proved anything, or not expected")

    def _say_why(self, host: str, error: Exception) -> None:
        if not isinstance(error, KeyedDifferentlyError | VersionError) or host in self._complained_of:
            return
        if len(self._complained_of) < _COMPLAINTS:
            self._complained_of.add(host)
            refusal = f"a connection from {host} was refused: {error.message}"
            self._complain(type(error)(refusal, remedy=error.remedy))

    def _drop(self, stranger: _Stranger) -> None:
        self.refused += 1
        self._forget(stranger)
        stranger.sock.close()

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.sock]
        self._hosts[stranger.host] -= 1
        if not self._hosts[stranger.host]:
            del self._hosts[stranger.host]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(stranger.sock)


def _say(sock: socket.socket, data: bytes) -> None:
    if sock.send(data) != len(data):
        raise ConnectionResetError("no room for a proof in the socket's buffer")
