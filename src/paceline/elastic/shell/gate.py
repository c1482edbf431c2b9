"""The control port: takes strangers in, lets those who prove themselves through, and drops the others.

A stranger may say 72 bytes in 3 seconds, and there are at most 128 strangers at a time: the oldest makes room
for the newest. When no descriptor is left, accepting pauses instead of spinning. Must not know what is said
by those who came through.
"""

from __future__ import annotations

import errno
import resource
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from typing import Final, final

from paceline.core.control import channel
from paceline.core.control.auth import Acceptor, Tls, TlsEnd
from paceline.core.control.channel import Channel
from paceline.core.errors import ResourceError, UsageError
from paceline.core.listening import ANY_PORT, Listening, resolves_to_loopback
from paceline.core.sealing import Session

STRANGERS: Final = 128
STRANGER_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 0.5
_ACCEPTS_PER_TURN: Final = 64
RETURN_SECONDS: Final = 5.0
_AGAIN_SECONDS: Final = 0.05


def listen(
    host: str,
    port: int,
    preferred: int = 0,
    seconds: float = RETURN_SECONDS,
    listening: Listening = ANY_PORT,
) -> socket.socket:
    """A listening socket; `preferred` is the port of a supervisor that was here before: where other machines
    look for it, so it is tried for so many seconds."""
    if not listening.interface and (loopback := resolves_to_loopback(host)):
        raise UsageError(
            f"bind={host!r} stands for {loopback} on this machine (see /etc/hosts): no other machine could "
            "reach the control port there",
            remedy="give an address of the interface that the others reach (`ip address` lists them), or "
            "interface=; bind='127.0.0.1' where all workers run here",
        )
    until = time.monotonic() + seconds
    while preferred:
        try:
            return _listener(host, preferred, listening)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until:
                break
        time.sleep(_AGAIN_SECONDS)
    try:
        return _listener(host, port, listening)
    except OSError as error:
        trouble = error
    # A name that nobody knows: a plain OSError with the resolver's number, which is negative.
    unknown = trouble.errno is not None and trouble.errno < 0
    if unknown or trouble.errno == errno.EADDRNOTAVAIL:
        raise UsageError(
            f"the control port cannot listen at {host}: {trouble.strerror}",
            remedy="give an address of this machine, or 0.0.0.0 for all of them",
        ) from trouble
    limit = _ports() if port == 0 else f"port {port} is asked for"
    raise ResourceError(
        f"there is no port for the control connection at {host}: {trouble.strerror} ({limit})",
        remedy="wait until closed connections are forgotten, choose another port, or widen the range: "
        "sysctl net.ipv4.ip_local_port_range",
    ) from trouble


def _listener(host: str, port: int, listening: Listening) -> socket.socket:
    listener = listening.open(host, port)
    listener.setblocking(False)
    return listener


def too_many_files() -> ResourceError:
    """What to say when no descriptor is left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ResourceError(
        f"the supervisor has no file descriptor left for a connection: the limit is {soft} open files",
        remedy=f"raise it with `ulimit -n` before starting (up to {hard} here), or use fewer workers",
    )


@final
class Gate:
    """The listening socket and everybody who has not proved anything yet."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        selector: selectors.BaseSelector,
        let_in: Callable[[Channel, str], None],
        complain: Callable[[ResourceError], None],
        tls: Tls | None = None,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._selector = selector
        self._let_in = let_in
        self._complain = complain
        self._tls = tls.server() if tls is not None else None
        self._strangers: dict[int, _Stranger] = {}
        self._paused_until = 0.0
        self.refused = 0
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def due(self) -> float:
        """When `tick` has something to do."""
        # Strangers are kept in the order in which they came.
        first = next(iter(self._strangers.values()), None)
        due = first.limit if first is not None else float("inf")
        return min(due, self._paused_until) if self._paused_until else due

    def tick(self, now: float) -> None:
        """Drop who took too long; accept again after a pause."""
        for stranger in [one for one in self._strangers.values() if one.limit <= now]:
            self._drop(stranger)
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        for stranger in list(self._strangers.values()):
            self._drop(stranger)
        if not self._paused_until:
            self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self, _: int, now: float) -> None:
        for _turn in range(_ACCEPTS_PER_TURN):
            try:
                sock, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                self._pause(now)
                return
            if len(self._strangers) >= STRANGERS:
                self._drop(next(iter(self._strangers.values())))
            self._welcome(sock, str(peer[0]), now)

    def _welcome(self, sock: socket.socket, host: str, now: float) -> None:
        try:
            sock.setblocking(False)
            channel.tune(sock)
            if self._tls is not None:
                sock = self._tls.wrap(sock, handshake=False)
        except OSError:
            # Gone before it said anything.
            sock.close()
            return
        stranger = _Stranger(sock, host, Acceptor(self._secret), now + STRANGER_SECONDS, self._tls)
        self._strangers[sock.fileno()] = stranger
        self._selector.register(sock, selectors.EVENT_READ, lambda mask, when: self._hear(stranger))
        self._hear(stranger)

    def _hear(self, stranger: _Stranger) -> None:
        if self._strangers.get(stranger.sock.fileno()) is not stranger:
            return  # dropped in the same turn, to make room for another
        try:
            through = stranger.go_on()
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            return
        except OSError:
            # Also ssl.SSLError, and a socket buffer that cannot even take 72 bytes.
            self._drop(stranger)
            return
        if stranger.acceptor.refused:
            self._drop(stranger)
        elif through is not None:
            self._forget(stranger)
            self._let_in(Channel(stranger.sock, through), stranger.host)

    def _drop(self, stranger: _Stranger) -> None:
        self.refused += 1
        self._forget(stranger)
        stranger.sock.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.pop(stranger.sock.fileno(), None)
        self._selector.unregister(stranger.sock)

    def _pause(self, now: float) -> None:
        first = not self._paused_until
        self._selector.unregister(self._listener)
        self._paused_until = now + _PAUSE_SECONDS
        for stranger in list(self._strangers.values())[: STRANGERS // 2]:
            self._drop(stranger)
        if first:
            self._complain(too_many_files())


@final
class _Stranger:
    def __init__(
        self, sock: socket.socket, host: str, acceptor: Acceptor, limit: float, tls: TlsEnd | None
    ) -> None:
        self.sock = sock
        self.host = host
        self.acceptor = acceptor
        self.limit = limit
        self._tls = tls
        self._greeted = False

    def go_on(self) -> Session | None:
        """One more piece of the way; the session when the stranger has proved itself and got our proof."""
        if self._tls is not None:
            assert isinstance(self.sock, ssl.SSLSocket)
            self.sock.do_handshake()
            self.acceptor.bound = self._tls.bound(self.sock)
            self._tls = None
        if not self._greeted:
            self._say(self.acceptor.challenge)
            self._greeted = True
        while not self.acceptor.refused:
            data = self.sock.recv(self.acceptor.wanted)
            if not data:
                raise ConnectionResetError("closed before it proved anything")
            if self.acceptor.feed(data):
                self._say(self.acceptor.proof)
                return self.acceptor.session
        return None

    def _say(self, data: bytes) -> None:
        if self.sock.send(data) != len(data):
            raise ConnectionResetError("no room for a proof in the socket's buffer")


def _ports() -> str:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = file.read().split()
    except (OSError, ValueError):
        return "no free port"
    return f"all ports from {low} to {high} are taken"
