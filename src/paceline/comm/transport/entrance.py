"""Accept connections from anybody, and let only those in that prove the secret; strangers cost next to
nothing.

A stranger may say a fixed number of bytes in 3 seconds. There are at most 128 strangers at a time: the next
one takes the place of the oldest from the host that has the most, so a flood from one host does not push
out a member that calls from another. When no descriptor is left, accepting pauses instead of spinning. An
exception about one stranger drops that stranger and no other. A member that was pushed out, or that the 3
seconds caught while its machine was busy, calls again (see handshake.connect and meeting.connect).

The owner runs the selector: it calls `key.data(mask)` of what is ready, and `tick` by the clock in every
turn. Must not know what is said by those who come in.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, final

from paceline.core.handshake import Acceptor, KeyedDifferentlyError, Protocol
from paceline.core.sealing import Session

_log = logging.getLogger("paceline.comm")

STRANGERS: Final = 128
STRANGER_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 0.1
_ACCEPTS_PER_TURN: Final = 64
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class Proven:
    """A connection whose other end has proved the secret, with the keys of its session. Does not block."""

    sock: socket.socket
    session: Session


@dataclass(eq=False)
class _Stranger:
    sock: socket.socket
    host: str
    acceptor: Acceptor
    until: float
    greeted: bool = field(default=False)


@final
class Entrance:
    """A listening socket and everybody who has not proved anything yet. `expected(context)` says whether a
    connector that has proved itself may come in, `let_in(context, proven)` takes it over."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Protocol,
        secret: bytes,
        selector: selectors.BaseSelector,
        let_in: Callable[[bytes, Proven], None],
        expected: Callable[[bytes], bool] = lambda context: True,
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._secret = secret
        self._selector = selector
        self._let_in = let_in
        self._expected = expected
        self._strangers: dict[socket.socket, _Stranger] = {}  # in the order in which they came
        self._hosts: Counter[str] = Counter()
        self._paused_until = 0.0
        self._said = False
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def due(self) -> float | None:
        """When `tick` has something to do; None: not before something happens."""
        first = next(iter(self._strangers.values()), None)
        times = [first.until] if first is not None else []
        return min([*times, self._paused_until] if self._paused_until else times, default=None)

    def tick(self, now: float) -> None:
        """Drop who took too long; accept again after a pause."""
        for stranger in [one for one in self._strangers.values() if one.until <= now]:
            self._drop(stranger)
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Drop all strangers and stop listening to the socket, which stays open."""
        for stranger in list(self._strangers.values()):
            self._drop(stranger)
        if not self._paused_until:
            self._selector.unregister(self._listener)

    def _accept(self, mask: int) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._pause()
                return  # nobody is left in the queue, or the caller is gone again
            try:
                self._welcome(sock, str(address[0]))
            except Exception as error:
                sock.close()
                _log.debug("a caller from %s was dropped: %r", address, error)

    def _pause(self) -> None:
        """No descriptor is left: half of the strangers make room, and the queue waits a moment."""
        self._selector.unregister(self._listener)
        self._paused_until = time.monotonic() + _PAUSE_SECONDS
        for stranger in list(self._strangers.values())[: STRANGERS // 2]:
            self._drop(stranger)

    def _welcome(self, sock: socket.socket, host: str) -> None:
        if len(self._strangers) >= STRANGERS:
            crowd = self._hosts.most_common(1)[0][0]
            oldest = next(one for one in self._strangers.values() if one.host == crowd)
            self._hear(oldest)  # its answer may be here already
            if oldest.sock in self._strangers:
                self._drop(oldest)
        sock.setblocking(False)
        stranger = _Stranger(
            sock, host, Acceptor(self._protocol, self._secret), time.monotonic() + STRANGER_SECONDS
        )
        self._selector.register(sock, selectors.EVENT_READ, lambda mask: self._hear(stranger))
        self._strangers[sock] = stranger
        self._hosts[host] += 1
        self._hear(stranger)

    def _hear(self, stranger: _Stranger) -> None:
        if stranger.sock not in self._strangers:
            return  # dropped in this turn, to make room for another
        try:
            proved = self._converse(stranger)
        except BlockingIOError:
            return
        except Exception as error:
            self._drop(stranger)
            if isinstance(error, KeyedDifferentlyError) and not self._said:
                self._said = True
                _log.warning("a caller from %s was refused: %s", stranger.host, error.message)
            return
        if not proved:
            return
        self._forget(stranger)
        try:
            self._let_in(stranger.acceptor.context, Proven(stranger.sock, stranger.acceptor.session()))
        except Exception as error:
            stranger.sock.close()  # it may be gone already
            _log.debug("a member from %s was dropped: %r", stranger.host, error)

    def _converse(self, stranger: _Stranger) -> bool:
        """One more piece of the way; True when the stranger has proved itself and has our proof."""
        acceptor, sock = stranger.acceptor, stranger.sock
        if not stranger.greeted:
            _say(sock, acceptor.challenge)
            stranger.greeted = True
        while data := sock.recv(acceptor.wanted):
            if acceptor.feed(data):
                if not self._expected(acceptor.context):
                    break
                _say(sock, acceptor.proof)
                return True
        raise ConnectionResetError("closed before it proved anything, or not expected")

    def _drop(self, stranger: _Stranger) -> None:
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
