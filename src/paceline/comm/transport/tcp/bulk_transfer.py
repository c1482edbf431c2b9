"""Large messages between ranks: own connections, proven by the mesh's handshake, and two threads.

The messages of a pair are numbered, and both ends know what the next one is: the sender does not ask before
it sends, the receiver reads the socket only where it has room for the next message, and TCP holds the
sender back meanwhile. A message travels as

    head (32 bytes), tag | chunk (up to 1 MiB), tag | chunk, tag | ...

with the tags of the connection's session, whose kind both ends agreed on (core.mac_algorithms). A chunk is
tagged when the socket has taken the one before: it is sent, and was received, while it is in the cache. Bytes
arrive where they belong, and a transfer is done only when every tag was right. A head that announces
something else than what is expected is left alone: control, which compares the same facts, names the ranks
that disagree.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, final

from torch import Tensor

from paceline.comm.transport.base import memory_of
from paceline.comm.transport.tcp.framed_socket import send_first
from paceline.core.authenticated_listener import AuthenticatedSocket
from paceline.core.session_auth import TAG_BYTES

# Long enough that Python's part of moving a chunk (some 20 us) does not show, short enough that it is still
# in the cache when it is sent, and that its tag holds the interpreter's lock for 0.1 ms at most.
CHUNK_BYTES: Final = 1 << 20
_HEAD: Final = struct.Struct("<QqQII")
_HEAD_BYTES: Final = _HEAD.size + TAG_BYTES
# How much of one peer's message is moved before the others have their turn.
_TURN_BYTES: Final = 2 << 20
_MAX_VECTOR: Final = 16


def bulk_head(length: int, sequence: int, signature: int, number: int) -> bytes:
    """Pack what both ends know about a message before it travels."""
    return _HEAD.pack(length, sequence, signature, number, 0)


@dataclass(eq=False)
class BulkTransfer:
    """A message, or an all-reduce of a backend (peer -1), that another thread moves."""

    peer: int
    done: bool = False
    error: BaseException | None = None


def overhead(length: int) -> int:
    """Return the bytes that travel here besides a message of `length` bytes."""
    return _HEAD_BYTES + -(-length // CHUNK_BYTES) * TAG_BYTES


@final
class _SendingHalf:
    """The sending half of one connection. Moved under its lock: first by the caller of `send`, which saves a
    thread switch for what the socket takes at once, then by the sending thread."""

    def __init__(self, peer: int, proven: AuthenticatedSocket) -> None:
        self.peer = peer
        self.sock = proven.sock
        self.lock = threading.Lock()
        self.broken: BaseException | None = None
        self._outgoing_tags = proven.session.outgoing
        self.waiting: deque[tuple[BulkTransfer, bytes, memoryview]] = deque()
        self._position = -1  # in the first message; -1: its head has not been prepared
        self._pieces: deque[memoryview] = deque()
        self._prepared: BulkTransfer | None = None  # the last message of which all pieces are made

    def move(self) -> bool:
        """Send as much as the socket takes, up to a turn; True if there is more to send."""
        budget = _TURN_BYTES
        try:
            while budget > 0 and (self._pieces or self._prepare()):
                budget -= send_first(self.sock, self._pieces, _MAX_VECTOR)
        except BlockingIOError:
            return True
        except OSError as error:
            self.fail(error)
        return bool(self._pieces or self.waiting)

    def _prepare(self) -> bool:
        """Make the next chunk with its tag, and the head before the first one; False: nothing is left.

        Called only when the socket has taken all earlier pieces: a chunk that is tagged long before it is
        sent would pass through memory twice. The tags of a session are numbered, so the order of the calls
        here is the order on the wire, also between messages.
        """
        if not self.waiting:
            return False
        transfer, head, body = self.waiting[0]
        if self._position < 0:
            self._pieces.append(memoryview(head + self._outgoing_tags.tag(head)))
            self._position = 0
        chunk = body[self._position : self._position + CHUNK_BYTES]
        self._pieces.extend((chunk, memoryview(self._outgoing_tags.tag_chunk(chunk))))
        self._position += len(chunk)
        if self._position >= len(body):
            # The body is still in use until the receiver sends DONE (exchange.py). Remembered, because an
            # error from here on concerns this message too, although it is no longer waiting.
            self.waiting.popleft()
            self._position = -1
            self._prepared = transfer
        return True

    def fail(self, error: BaseException) -> None:
        self.broken = error
        for transfer in (*(waiting[0] for waiting in self.waiting), self._prepared):
            if transfer is not None:
                transfer.error, transfer.done = error, True
        self.waiting.clear()
        self._pieces.clear()


@final
class _ReceivingHalf:
    """The receiving half of one connection; only the reading thread moves it."""

    def __init__(self, peer: int, proven: AuthenticatedSocket) -> None:
        self.peer = peer
        self.sock = proven.sock
        self.expected: deque[tuple[BulkTransfer, bytes, memoryview]] = deque()
        self.broken: BaseException | None = None
        self.at_odds = False
        self._failing = threading.Lock()
        self._incoming_tags = proven.session.incoming
        self._head = bytearray(_HEAD_BYTES)
        self._tag = memoryview(bytearray(TAG_BYTES))
        self._begun = False
        self._position = 0  # of the chunk in the message
        self._have = 0  # bytes of the head, or of the chunk and its tag

    def move(self) -> bool:
        """Read what has come, up to a turn; True if a message is complete, or never will be."""
        finished = False
        budget = _TURN_BYTES
        try:
            # Without room for the next message the socket is not read: TCP holds the sender back.
            while budget > 0 and self.expected and not self.at_odds:
                count, *_ = self.sock.recvmsg_into(self._room())
                if count == 0:
                    raise ConnectionResetError("the connection was closed")
                budget -= count
                finished |= self._took(count)
        except BlockingIOError:
            return finished
        except Exception as error:
            # A tag that is not the session's, too: nothing that follows on this connection can be believed.
            self.fail(error)
            return True
        return finished

    def _chunk(self) -> memoryview:
        return self.expected[0][2][self._position : self._position + CHUNK_BYTES]

    def _room(self) -> list[memoryview]:
        if not self._begun:
            return [memoryview(self._head)[self._have :]]
        chunk = self._chunk()
        if self._have < len(chunk):
            return [chunk[self._have :], self._tag]
        return [self._tag[self._have - len(chunk) :]]

    def _took(self, count: int) -> bool:
        self._have += count
        transfer, due, body = self.expected[0]
        if not self._begun:
            if self._have == _HEAD_BYTES:
                head = memoryview(self._head)
                self._incoming_tags.check(head[_HEAD.size :], head[: _HEAD.size])
                # Both ends know the next message, so another head means that the ranks are in different
                # calls. The bytes stay where they are: the control connection carries the same facts and
                # will name the ranks that disagree.
                self.at_odds = head[: _HEAD.size] != due
                self._begun, self._have = True, 0
            return False
        chunk = self._chunk()
        if self._have < len(chunk) + TAG_BYTES:
            return False
        self._incoming_tags.check_chunk(self._tag, chunk)
        self._position, self._have = self._position + len(chunk), 0
        if self._position < len(body):
            return False
        self.expected.popleft()
        self._begun, self._position = False, 0
        transfer.done = True
        return True

    def fail(self, error: BaseException) -> None:
        # `broken` first: a `receive` that appends after this loop has ended sees it and fails its own.
        with self._failing:
            self.broken = error
            while self.expected:
                transfer, _, _ = self.expected.popleft()
                transfer.error, transfer.done = error, True


class BulkConnections:
    """One rank's bulk connections. `notify` is called whenever a transfer is done."""

    def __init__(self, connections: Mapping[int, AuthenticatedSocket], notify: Callable[[], None]) -> None:
        self._notify = notify
        self._socks = [proven.sock for proven in connections.values()]
        self._outgoing = {peer: _SendingHalf(peer, proven) for peer, proven in connections.items()}
        self._incoming = {peer: _ReceivingHalf(peer, proven) for peer, proven in connections.items()}
        self._sender: _Mover | None = None
        self._reader: _Mover | None = None
        self._starting = threading.Lock()
        self._closed = False

    def send(self, body: Tensor, peer: int, head: bytes) -> BulkTransfer:
        """Start to send; `body` must not change until the receiver has said that it has everything."""
        transfer, half = BulkTransfer(peer), self._outgoing[peer]
        with half.lock:
            if half.broken is not None:
                return BulkTransfer(peer, True, half.broken)
            # Queued behind earlier messages, whose rest the sending thread may be moving: the queue and the
            # session's tags keep one order, whichever thread holds the lock.
            half.waiting.append((transfer, head, memory_of(body)))
            more = half.move()
        # Outside of the lock, which the sending thread takes for each turn. It wants the socket only now that
        # the socket is full: an idle one would be ready to write all the time.
        if more and (movers := self._movers()):
            movers[0].look_at(half.sock)
        return transfer

    def receive(self, body: Tensor, peer: int, head: bytes) -> BulkTransfer:
        """Start to receive: `body` holds the message when the transfer is done without an error."""
        transfer, half = BulkTransfer(peer), self._incoming[peer]
        # Appended first, checked second; the reading thread sets `broken` first and empties the queue second.
        # So a transfer that comes while the connection fails is failed by one of the two, never forgotten.
        half.expected.append((transfer, head, memory_of(body)))
        if half.broken is not None:
            half.fail(half.broken)
        elif movers := self._movers():
            movers[1].look_at(half.sock)
        return transfer

    def close(self) -> None:
        """End what is under way, the threads and the connections; a second call does nothing."""
        with self._starting:
            if self._closed:
                return
            self._closed = True
        for mover in (self._sender, self._reader):
            if mover is not None:
                mover.close()
        for sock in self._socks:
            sock.close()

    def _movers(self) -> tuple[_Mover, _Mover] | None:
        """Return the two threads, started when there is something large to move; None when it is all over."""
        with self._starting:
            if self._closed:
                return None
            if self._sender is None or self._reader is None:
                senders = {half.sock: partial(self._move_out, half) for half in self._outgoing.values()}
                readers = {half.sock: partial(self._move_in, half) for half in self._incoming.values()}
                self._sender = _Mover("paceline-bulk-out", selectors.EVENT_WRITE, senders)
                self._reader = _Mover("paceline-bulk-in", selectors.EVENT_READ, readers)
            return self._sender, self._reader

    def _move_out(self, half: _SendingHalf) -> bool:
        with half.lock:
            more = half.move()
            broken = half.broken is not None
        if broken:
            self._notify()
        return more

    def _move_in(self, half: _ReceivingHalf) -> bool:
        if half.move():
            self._notify()
        return bool(half.expected) and not half.at_odds


@final
class _Mover:
    """A thread that waits for sockets and moves what it can. `moves[sock]()` returns whether to wait for the
    socket again; else it is left alone until `look_at`."""

    def __init__(self, name: str, event: int, moves: Mapping[socket.socket, Callable[[], bool]]) -> None:
        self._event = event
        self._moves = moves
        self._wanted: deque[socket.socket] = deque()
        self._stopped = False
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def look_at(self, sock: socket.socket) -> None:
        self._wanted.append(sock)
        self._ring()

    def close(self) -> None:
        self._stopped = True
        self._ring()
        self._thread.join()
        with self._closing:
            self._selector.close()
            os.close(self._wake)
            self._wake = -1

    def _ring(self) -> None:
        with self._closing:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        # Only this thread touches `watched` and the selector: other threads queue a socket and ring.
        watched: set[socket.socket] = set()
        while not self._stopped:
            for key, _ in self._selector.select():
                if key.fd == self._wake:
                    # Cleared before the queue is read: what is queued after this loop rings again.
                    os.eventfd_read(self._wake)
                    while self._wanted:
                        sock = self._wanted.popleft()
                        # One that is watched stays so until a move finds nothing left for it, and that move
                        # finds what was queued before the ring.
                        if sock not in watched:
                            watched.add(sock)
                            self._selector.register(sock, self._event)
                    continue
                sock = key.fileobj  # type: ignore[assignment]
                # At most a turn (`_TURN_BYTES`): the selector reports a socket again that has more, after the
                # others. A socket without work is dropped, or it would be ready all the time: an idle one to
                # write, one with bytes of a message that this rank does not expect yet to read. Work that is
                # queued between the move and the drop is not lost: its ring is handled after the drop.
                if not self._moves[sock]():
                    watched.discard(sock)
                    self._selector.unregister(sock)
