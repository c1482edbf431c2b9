"""Whether two workers reach each other: a dial of the endpoint that a view would use, and a proof at its end.

    dialing worker -> listener    magic, from, to, nonce, HMAC("ask" of these)
    listener -> dialing worker    HMAC("answer" of the same)
    dialing worker -> listener    LARGE_BYTES
    listener -> dialing worker    HMAC("receipt" of the same)

Some links carry small packets and lose large ones (a tunnel with a smaller MTU and no ICMP): the first two
messages pass there, and no gradient ever does. So the way of the data is proved with data, in the direction
of the dial; the peer proves the other one.

The listener of a worker is idle while it trains; it is used only while a view forms, and dials wait then.
One thread dials and answers, without the worker's main thread, and ends when nothing was asked for a while:
a job whose workers share a machine never has one. Who connects and says anything else is dropped. Must not
know views, nor what follows from an answer.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
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

CONNECT_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 15.0
"""Longer than connecting: the peer may be in the middle of forming a view."""
LINGER_SECONDS: Final = 60.0
GUESTS: Final = 64
GUEST_SECONDS: Final = 3.0
LARGE_BYTES: Final = 20_000
"""More than two packets of any usual size: jumbo frames have 9,000 bytes."""
LARGE_SECONDS: Final = 3.0
"""For the large part, once the small one was answered: time for four retransmissions."""

_MAGIC: Final = b"PLdial2\0"
_HEAD: Final = struct.Struct("<8sII16s")
_MAC_BYTES: Final = 32
_ASK_BYTES: Final = _HEAD.size + _MAC_BYTES
_AGAIN_SECONDS: Final = 0.1
_TROUBLE_LENGTH: Final = 1000  # what a Dialed can carry: the address is another member's, and may be longer
_LOST: Final = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_HOLE: Final = (
    "small packets arrive there and large ones do not; the MTU of the way may be smaller than that of the "
    "interface"
)
_NO_PROOF: Final = "what answers there does not know this job's secret"

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
    """A connection under way to a target."""

    target: _Target
    head: bytes
    limit: float
    connected: bool = False
    answered: bool = False
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    heard: bytearray = field(default_factory=bytearray)


@final
@dataclass
class _Guest:
    """A connection of which nothing is known yet; `head` once it has proved itself, then `large` bytes are
    still to come."""

    limit: float
    heard: bytearray = field(default_factory=bytearray)
    head: bytes = b""
    large: int = LARGE_BYTES


@final
class Dialer:
    """Of one worker. `tell` gets a Dialed for each peer that was asked for; it is called in a thread."""

    def __init__(
        self, member: int, slot: int, secret: bytes, listener: socket.socket, tell: Callable[[Dialed], None]
    ) -> None:
        self._member = member
        self._slot = slot
        self._key = hmac.new(secret, b"dial", hashlib.sha256).digest()
        self._listener = listener
        self._tell = tell
        self._lock = threading.Lock()
        self._targets: dict[int, _Target] = {}
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
        """While the listener is somebody else's."""
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
            self._listener.setblocking(False)
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            try:
                while self._is_needed(selector):
                    self._turn(selector)
            finally:
                for key in list(selector.get_map().values()):
                    if isinstance(key.data, _Call | _Guest):
                        _close(selector, key.fileobj)

    def _is_needed(self, selector: selectors.BaseSelector) -> bool:
        """Decided with the lock held, so that whoever asks next starts another thread."""
        with self._lock:
            busy = bool(self._targets) or time.monotonic() < self._until
            if self._holds or not busy:
                self._thread = None
                return False
            return True

    def _turn(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        with self._lock:
            targets = list(self._targets.values())
        calls = {id(key.data.target) for key in selector.get_map().values() if isinstance(key.data, _Call)}
        for target in targets:
            if id(target) in calls or now < target.again_at:
                continue
            try:
                self._dial(selector, target, now)
            except Exception as error:
                # Also an address that is none (UnicodeError, ValueError): this peer is not reached, and the
                # thread is there for the others.
                self._done(target, f"it cannot be dialed: {error}")
        for key, mask in selector.select(self._pause(selector, targets)):
            try:
                self._ready(selector, key, mask)
            except Exception as error:
                # Whatever a peer or a stranger makes us stumble over, it is that connection that ends.
                _close(selector, key.fileobj)
                if isinstance(key.data, _Call):
                    self._failed(key.data, error)
        self._expire(selector)

    def _pause(self, selector: selectors.BaseSelector, targets: list[_Target]) -> float:
        limits: list[float] = [key.data.limit for key in selector.get_map().values() if key.data is not None]
        limits += [target.again_at for target in targets if target.again_at]
        return max(0.01, min([self._until, *limits]) - time.monotonic())

    def _ready(self, selector: selectors.BaseSelector, key: selectors.SelectorKey, mask: int) -> None:
        if key.data is None:
            if key.fileobj is self._listener:
                self._accept(selector)
            else:
                os.eventfd_read(self._wake)
            return
        sock = key.fileobj
        assert isinstance(sock, socket.socket)
        if isinstance(key.data, _Guest):
            self._answer(selector, sock, key.data)
        else:
            self._go_on(selector, sock, key.data)

    # dialing

    def _dial(self, selector: selectors.BaseSelector, target: _Target, now: float) -> None:
        if now >= target.limit:
            self._done(target, target.trouble)
            return
        member, _, host, port = target.peer
        head = _HEAD.pack(_MAGIC, self._member, member, os.urandom(16))
        call = _Call(target, head, min(now + CONNECT_SECONDS, target.limit))
        try:
            family, kind, protocol, _, at = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            self._failed(call, error)
            return
        sock.setblocking(False)
        code = sock.connect_ex(at)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._failed(call, OSError(code, os.strerror(code)))
            return
        selector.register(sock, selectors.EVENT_WRITE, call)

    def _go_on(self, selector: selectors.BaseSelector, sock: socket.socket, call: _Call) -> None:
        if not call.connected:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            call.connected, call.limit = True, call.target.limit
            sock.sendall(call.head + self._mac(b"ask", call.head))
            selector.modify(sock, selectors.EVENT_READ, call)
            return
        if call.unsent:
            call.unsent = call.unsent[sock.send(call.unsent) :]
            if not call.unsent:
                selector.modify(sock, selectors.EVENT_READ, call)
            return
        data = sock.recv(_MAC_BYTES - len(call.heard))
        if not data:
            raise ConnectionResetError("the connection was closed there")
        call.heard += data
        if len(call.heard) < _MAC_BYTES:
            return
        role = b"receipt" if call.answered else b"answer"
        if not hmac.compare_digest(bytes(call.heard), self._mac(role, call.head)):
            # Perhaps the listener serves a view that forms, and something else speaks there.
            raise ConnectionAbortedError(_NO_PROOF)
        if call.answered:
            _close(selector, sock)
            self._done(call.target, "")
            return
        call.answered, call.unsent = True, memoryview(bytes(LARGE_BYTES))
        call.heard.clear()
        call.limit = time.monotonic() + LARGE_SECONDS
        selector.modify(sock, selectors.EVENT_WRITE, call)

    def _failed(self, call: _Call, error: Exception) -> None:
        """A connection that could not be made is the answer; one that ended early may have met a listener
        that was busy with a view, and is tried again."""
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else repr(error)
        lossy = isinstance(error, OSError) and error.errno in _LOST
        if call.connected and time.monotonic() < call.target.limit:
            call.target.trouble = reason
            call.target.again_at = time.monotonic() + _AGAIN_SECONDS
        else:
            self._done(call.target, reason, lossy)

    def _done(self, target: _Target, trouble: str, lossy: bool = False) -> None:
        member, slot, host, port = target.peer
        with self._lock:
            self._targets.pop(member, None)
        if trouble:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            trouble = f"rank {self._slot} cannot reach rank {slot} at {where}: {trouble}"[:_TROUBLE_LENGTH]
        self._tell(Dialed(peer=member, trouble=trouble, lossy=lossy))

    # answering

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # gone again, or no descriptor is left
        sock.setblocking(False)
        guests = [key for key in selector.get_map().values() if isinstance(key.data, _Guest)]
        if len(guests) >= GUESTS:
            _close(selector, min(guests, key=lambda key: key.data.limit).fileobj)
        selector.register(sock, selectors.EVENT_READ, _Guest(time.monotonic() + GUEST_SECONDS))

    def _answer(self, selector: selectors.BaseSelector, sock: socket.socket, guest: _Guest) -> None:
        if guest.head:
            guest.large -= len(data := sock.recv(guest.large))
            if data and guest.large:
                return
            if data:
                sock.sendall(self._mac(b"receipt", guest.head))
            _close(selector, sock)
            return
        data = sock.recv(_ASK_BYTES - len(guest.heard))
        guest.heard += data
        head, mac = bytes(guest.heard[: _HEAD.size]), bytes(guest.heard[_HEAD.size :])
        if not data or not head.startswith(_MAGIC[: len(head)]):
            _close(selector, sock)  # a rank that is early for a view comes again
        elif len(guest.heard) == _ASK_BYTES:
            to_me = _HEAD.unpack(head)[2] == self._member
            if to_me and hmac.compare_digest(mac, self._mac(b"ask", head)):
                sock.sendall(self._mac(b"answer", head))
                guest.head, guest.limit = head, time.monotonic() + LARGE_SECONDS + GUEST_SECONDS
            else:
                _close(selector, sock)

    def _expire(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for key in list(selector.get_map().values()):
            if key.data is None or now < key.data.limit:
                continue
            _close(selector, key.fileobj)
            if isinstance(key.data, _Call):
                target = key.data.target
                if key.data.answered:
                    self._done(target, _HOLE, lossy=True)
                elif key.data.connected:
                    self._done(target, target.trouble)
                else:
                    self._done(target, "connecting timed out", lossy=True)

    def _mac(self, role: bytes, head: bytes) -> bytes:
        return hmac.new(self._key, role + head, hashlib.sha256).digest()


def _close(selector: selectors.BaseSelector, sock: object) -> None:
    assert isinstance(sock, socket.socket)
    with contextlib.suppress(KeyError):
        selector.unregister(sock)
    sock.close()
