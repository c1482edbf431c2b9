"""The supervisor's end of a ControlClient for tests: accept the connection, authenticate, show what comes."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import TypeVar, final
from weakref import WeakKeyDictionary

from paceline.control.channel import Channel
from paceline.control.messages import ControlMessage, Heartbeat, MemberAccepted, MemberHello
from paceline.core.errors import WireError
from paceline.core.handshake import CONTROL, Acceptor
from paceline.core.tls import TlsEnd

SECRET = b"s" * 32
M = TypeVar("M", bound=ControlMessage)


@final
class FarEnd:
    """A listening socket; `accept` gives the next connection that proved itself."""

    def __init__(self, port: int = 0, secret: bytes = SECRET, tls: TlsEnd | None = None) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self._listener.settimeout(10.0)
        self._secret = secret
        self._tls = tls
        self.address: tuple[str, int] = ("127.0.0.1", self._listener.getsockname()[1])

    def accept(self) -> Channel:
        """Prove both sides; ConnectionError where the other has another secret."""
        sock, _ = self._listener.accept()
        sock.settimeout(10.0)
        bound = b""
        if self._tls is not None:
            sock = self._tls.wrap(sock)
            bound = self._tls.bound(sock)
        acceptor = Acceptor(CONTROL, self._secret, bound)
        sock.sendall(acceptor.challenge)
        try:
            while not acceptor.feed(sock.recv(acceptor.wanted)):
                pass
        except WireError as error:
            sock.close()
            raise ConnectionError(error.message) from error
        sock.sendall(acceptor.proof)
        return Channel(sock, acceptor.session_keys())

    def welcome(self, heartbeat: float = 0.02) -> tuple[Channel, MemberHello]:
        """Accept, hear the Hello, answer it."""
        channel = self.accept()
        hello = next_of(channel, MemberHello)
        channel.send(MemberAccepted(heartbeat=heartbeat, patience=5.0))
        return channel, hello

    def close(self) -> None:
        # Also wakes a thread that waits in accept.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


_read_ahead: WeakKeyDictionary[Channel, list[tuple[int, ControlMessage]]] = WeakKeyDictionary()
"""What came together with a message that was waited for, and was not asked for yet."""


def hear(channel: Channel, seconds: float = 10.0) -> list[tuple[int, ControlMessage]]:
    """What comes next, heartbeats left out."""
    early = [one for one in _read_ahead.pop(channel, []) if not isinstance(one[1], Heartbeat)]
    if early:
        return early
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and not channel.closed:
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        poll.poll(max(0.0, limit - time.monotonic()) * 1000)
        found = [one for one in channel.receive() if not isinstance(one[1], Heartbeat)]
        if found:
            return found
    return []


def next_of(channel: Channel, kind: type[M], seconds: float = 10.0) -> M:
    """The next message of this kind; others before it are dropped."""
    limit = time.monotonic() + seconds
    came = _read_ahead.pop(channel, [])
    while True:
        for place, (_, message) in enumerate(came):
            if isinstance(message, kind):
                _read_ahead[channel] = came[place + 1 :]
                return message
        if time.monotonic() >= limit or channel.closed:
            break
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        poll.poll(max(0.0, limit - time.monotonic()) * 1000)
        came = list(channel.receive())
    raise AssertionError(f"no {kind.__name__} came: {channel.closed}")
