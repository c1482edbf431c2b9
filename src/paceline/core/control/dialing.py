"""Whether two workers reach each other: a dial of the endpoint that a view would use, and a proof at its end.

    both                          the handshake of every connection (`core.handshake`): from whom, to whom
    dialing worker -> listener    LARGE_BYTES
    listener -> dialing worker    a receipt, with the tag of the session

Some links carry small packets and lose large ones (a tunnel with a smaller MTU and no ICMP): the handshake
passes there, and no gradient ever does. So the way of the data is proved with data, in the direction of the
dial; the peer proves the other one.

The listener of a worker is idle while it trains; it is used only while a view forms, and dials wait then: a
dial that meets the store of a view is repeated. One thread dials and answers, without the worker's main
thread, and ends when nothing was asked for a while: a job whose workers share a machine never has one.
Strangers are kept out as everywhere (`core.entrance`). Must not know views, nor what follows from an answer.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, final

from paceline.core.control.messages import Dialed
from paceline.core.entrance import Entrance, Proven
from paceline.core.handshake import DIAL, Connector, HandshakeError, OtherProtocolError
from paceline.core.sealing import TAG_BYTES, Session

_log = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 15.0
"""Longer than connecting: the peer may be in the middle of forming a view."""
LINGER_SECONDS: Final = 60.0
LARGE_BYTES: Final = 20_000
"""More than two packets of any usual size: jumbo frames have 9,000 bytes."""
LARGE_SECONDS: Final = 3.0
"""For the large part, once the small one was answered: time for four retransmissions."""

_RECEIPT: Final = b"receipt"
_CONTEXT: Final = struct.Struct("<II")  # from, to
_AGAIN_SECONDS: Final = 0.1
_TROUBLE_LENGTH: Final = 1000  # what a Dialed can carry: the address is another member's, and may be longer
_LOST: Final = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_HOLE: Final = (
    "small packets arrive there and large ones do not; the MTU of the way may be smaller than that of the "
    "interface"
)

Peer = tuple[int, int, str, int]
"""Member, slot, host and port, as in messages.Dial."""


@final
@dataclass
class _Target:
    """A peer to be reached. `limit` is when it must have answered; `again_at` when to dial next."""

    peer: Peer
    limit: float
    again_at: float = 0.0
    trouble: str = "it did not answer"


@final
@dataclass
class _Call:
    """A connection under way to a target. `session` once both have proved themselves: then `unsent` goes
    there, and a receipt comes back."""

    target: _Target
    sock: socket.socket
    connector: Connector
    limit: float
    connected: bool = False
    session: Session | None = None
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    heard: bytearray = field(default_factory=bytearray)


@final
@dataclass
class _Guest:
    """A worker that has proved itself, and of which `left` bytes are still to come."""

    proven: Proven
    limit: float
    left: int = LARGE_BYTES


@final
class Dialer:
    """Of one worker. `tell` gets a Dialed for each peer that was asked for; it is called in a thread."""

    def __init__(
        self, member: int, slot: int, secret: bytes, listener: socket.socket, tell: Callable[[Dialed], None]
    ) -> None:
        self._member = member
        self._slot = slot
        self._secret = secret
        self._listener = listener
        self._tell = tell
        self._lock = threading.Lock()
        self._targets: dict[int, _Target] = {}
        self._calls: dict[int, _Call] = {}  # of the thread, by the target's member
        self._guests: dict[socket.socket, _Guest] = {}  # of the thread
        self._until = 0.0
        self._holds = 0
        self._thread: threading.Thread | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def dial(self, peers: Iterable[Peer]) -> None:
        """Dial these, and answer for a while. Never blocks; who is being dialed is not dialed twice."""
        now = time.monotonic()
        with self._lock:
            self._until = now + LINGER_SECONDS
            for peer in peers:
                self._targets.setdefault(peer[0], _Target(peer, now + ANSWER_SECONDS))
            self._start()
        self._poke()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While the listener is used for a view."""
        self._hold()
        try:
            yield
        finally:
            with self._lock:
                self._holds -= 1
                if self._targets or time.monotonic() < self._until:
                    self._start()

    def close(self) -> None:
        """End the thread, for good; the listener stays the caller's."""
        self._hold()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _hold(self) -> None:
        with self._lock:
            self._holds += 1
            thread = self._thread
        self._poke()
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        """With the lock held."""
        if self._thread is None and not self._holds:
            self._thread = threading.Thread(target=self._run, name="paceline-dial", daemon=True)
            self._thread.start()

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # below: in the thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            welcome = functools.partial(self._welcome, selector)
            entrance = Entrance(
                self._listener, DIAL, self._secret, selector, welcome, expected=self._is_for_me
            )
            selector.register(self._wake, selectors.EVENT_READ, lambda mask, now: os.eventfd_read(self._wake))
            try:
                while self._is_needed():
                    self._turn(selector, entrance)
            finally:
                entrance.close()
                for call in list(self._calls.values()):
                    self._close(selector, call)
                for guest in list(self._guests.values()):
                    self._part(selector, guest)

    def _is_for_me(self, context: bytes) -> bool:
        return bool(_CONTEXT.unpack(context)[1] == self._member)

    def _is_needed(self) -> bool:
        """Decided with the lock held, so that the next caller of `dial` starts another thread."""
        with self._lock:
            busy = bool(self._targets) or time.monotonic() < self._until
            if self._holds or not busy:
                self._thread = None
                return False
            return True

    def _turn(self, selector: selectors.BaseSelector, entrance: Entrance) -> None:
        now = time.monotonic()
        with self._lock:
            targets = list(self._targets.values())
        for target in targets:
            if target.peer[0] in self._calls or now < target.again_at:
                continue
            try:
                self._dial(selector, target, now)
            except Exception as error:
                # Also an address that is none (UnicodeError, ValueError): this peer is not reached, and the
                # thread is there for the others.
                self._done(target, f"it cannot be dialed: {error}")
        limits = [self._until, entrance.due, *(call.limit for call in self._calls.values())]
        limits += [guest.limit for guest in self._guests.values()]
        limits += [target.again_at for target in targets if target.again_at]
        ready = selector.select(max(0.01, min(limits) - time.monotonic()))
        now = time.monotonic()
        for key, mask in ready:
            key.data(mask, now)
        entrance.tick(now)
        for guest in [guest for guest in self._guests.values() if now >= guest.limit]:
            self._part(selector, guest)
        for call in [call for call in self._calls.values() if now >= call.limit]:
            self._close(selector, call)
            if call.session is not None:
                self._done(call.target, _HOLE, lossy=True)
            elif call.connected:
                self._done(call.target, call.target.trouble)
            else:
                self._done(call.target, "connecting timed out", lossy=True)

    def _dial(self, selector: selectors.BaseSelector, target: _Target, now: float) -> None:
        if now >= target.limit:
            self._done(target, target.trouble)
            return
        member, _, host, port = target.peer
        connector = Connector(DIAL, self._secret, _CONTEXT.pack(self._member, member))
        try:
            family, kind, protocol, _, at = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            self._done(target, error.strerror or str(error))
            return
        sock.setblocking(False)
        code = sock.connect_ex(at)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._done(target, os.strerror(code), lossy=code in _LOST)
            return
        call = _Call(target, sock, connector, min(now + CONNECT_SECONDS, target.limit))
        self._calls[member] = call
        selector.register(sock, selectors.EVENT_WRITE, functools.partial(self._go_on, selector, call))

    def _go_on(self, selector: selectors.BaseSelector, call: _Call, mask: int, now: float) -> None:
        """A connection that could not be made is the answer, and so is a proof that is wrong; one that ended
        early, or that speaks otherwise, may have met a listener that was busy with a view: it is dialed
        again."""
        try:
            reached = self._converse(selector, call, now)
        except (BlockingIOError, InterruptedError):
            return
        except Exception as error:
            # Whatever a peer or a stranger makes us stumble over, it is that connection that ends.
            self._close(selector, call)
            final = isinstance(error, HandshakeError) and not isinstance(error, OtherProtocolError)
            lossy = isinstance(error, OSError) and error.errno in _LOST
            reason = (error.strerror if isinstance(error, OSError) else "") or str(error) or repr(error)
            if isinstance(error, HandshakeError):
                reason = f"what answers there is no worker of this job: {error.message}"
            if final or not call.connected or now >= call.target.limit:
                self._done(call.target, reason, lossy)
            else:
                call.target.trouble, call.target.again_at = reason, now + _AGAIN_SECONDS
            return
        if reached:
            self._close(selector, call)
            self._done(call.target, "")

    def _converse(self, selector: selectors.BaseSelector, call: _Call, now: float) -> bool:
        """The next piece of a call; True: the receipt is here."""
        sock, connector = call.sock, call.connector
        go_on = functools.partial(self._go_on, selector, call)
        if not call.connected:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            call.connected, call.limit = True, call.target.limit
            selector.modify(sock, selectors.EVENT_READ, go_on)
            return False
        if call.unsent:
            call.unsent = call.unsent[sock.send(call.unsent) :]
            if not call.unsent:
                selector.modify(sock, selectors.EVENT_READ, go_on)
            return False
        data = sock.recv(connector.wanted if call.session is None else TAG_BYTES - len(call.heard))
        if not data:
            raise ConnectionResetError("the connection was closed there")
        if call.session is not None:
            call.heard += data
            if len(call.heard) < TAG_BYTES:
                return False
            call.session.incoming.check(call.heard, _RECEIPT)
            return True
        if answer := connector.feed(data):
            sock.sendall(answer)
        if connector.done:
            call.session, call.unsent = connector.session(), memoryview(bytes(LARGE_BYTES))
            call.limit = now + LARGE_SECONDS
            selector.modify(sock, selectors.EVENT_WRITE, go_on)
        return False

    def _close(self, selector: selectors.BaseSelector, call: _Call) -> None:
        del self._calls[call.target.peer[0]]
        selector.unregister(call.sock)
        call.sock.close()

    def _done(self, target: _Target, trouble: str, lossy: bool = False) -> None:
        member, slot, host, port = target.peer
        with self._lock:
            self._targets.pop(member, None)
        if trouble:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            trouble = f"rank {self._slot} cannot reach rank {slot} at {where}: {trouble}"[:_TROUBLE_LENGTH]
        self._tell(Dialed(peer=member, trouble=trouble, lossy=lossy))

    # answering

    def _welcome(self, selector: selectors.BaseSelector, context: bytes, proven: Proven) -> None:
        """The other worker has our proof: the large part follows."""
        guest = _Guest(proven, time.monotonic() + 2 * LARGE_SECONDS)
        selector.register(proven.sock, selectors.EVENT_READ, functools.partial(self._take, selector, guest))
        self._guests[proven.sock] = guest

    def _take(self, selector: selectors.BaseSelector, guest: _Guest, mask: int, now: float) -> None:
        if guest.proven.sock not in self._guests:
            return  # its time was over in this turn
        try:
            data = guest.proven.sock.recv(guest.left)
            guest.left -= len(data)
            if data and guest.left:
                return
            if data:
                guest.proven.sock.sendall(guest.proven.session.outgoing.tag(_RECEIPT))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            _log.debug("a worker that dialed from %s is gone: %r", guest.proven.host, error)
        self._part(selector, guest)

    def _part(self, selector: selectors.BaseSelector, guest: _Guest) -> None:
        del self._guests[guest.proven.sock]
        selector.unregister(guest.proven.sock)
        guest.proven.sock.close()
