"""Large messages between ranks: own connections, proven by the mesh's handshake, and two threads.

The messages of a pair are numbered, and both ends know what the next one is: the sender does not ask before
it sends, the receiver reads the socket only where it has room for the next message, and TCP holds the
sender back meanwhile. A message travels as

    head (32 bytes), tag | chunk (up to 1 MiB), tag | chunk, tag | ...

with the tags of the connection's session, whose kind both ends agreed on (core.macs). A chunk is tagged when
the socket has taken the one before: it is sent, and was received, while it is in the cache. Bytes arrive
where they belong, and a transfer is done only when every tag was right. A head that announces something
else than what is expected is left alone: control, which compares the same facts, says who disagrees. Knows
bytes and peers, not calls.
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
from typing import Final, final

from torch import Tensor

from paceline.comm.transport.base import memory_of
from paceline.core.entrance import Proven
from paceline.core.sealing import TAG_BYTES

# Long enough that Python's part of moving a chunk (some 20 us) does not show, short enough that it is still
# in the cache when it is sent, and that its tag holds the interpreter's lock for 0.1 ms at most.
CHUNK_BYTES: Final = 1 << 20
_HEAD: Final = struct.Struct("<QqQII")
_HEAD_BYTES: Final = _HEAD.size + TAG_BYTES
# How much of one peer's message is moved before the others have their turn.
_TURN_BYTES: Final = 2 << 20
_MAX_VECTOR: Final = 16


@dataclass(frozen=True)
class Ticket:
    """What both ends know about a message before it travels."""

    length: int
    sequence: int
    signature: int
    number: int

    def packed(self) -> bytes:
        return _HEAD.pack(self.length, self.sequence, self.signature, self.number, 0)


@dataclass(eq=False)
class Transfer:
    """Something under way with `peer` (-1: with all)."""

    peer: int
    done: bool = False
    error: BaseException | None = None


def overhead(length: int) -> int:
    """The bytes that travel here besides a message of `length` bytes."""
    return _HEAD_BYTES + -(-length // CHUNK_BYTES) * TAG_BYTES


@final
class _Outgoing:
    """The sending half of one connection. Its lock orders who moves it: the caller first, then the thread."""

    def __init__(self, peer: int, proven: Proven) -> None:
        self.peer = peer
        self.sock = proven.sock
        self.lock = threading.Lock()
        self.broken: BaseException | None = None
        self._sealer = proven.session.outgoing
        self._waiting: deque[tuple[Transfer, Ticket, memoryview]] = deque()
        self._position = -1  # in the first message; -1: its head has not been prepared
        self._pieces: deque[memoryview] = deque()
        self._prepared: Transfer | None = None  # the last message of which all pieces are made

    def put(self, transfer: Transfer, ticket: Ticket, body: memoryview) -> None:
        self._waiting.append((transfer, ticket, body))

    def move(self) -> bool:
        """Send as much as the socket takes, up to a turn; True if there is more to send."""
        budget = _TURN_BYTES
        try:
            while budget > 0 and (self._pieces or self._prepare()):
                vector = [self._pieces[place] for place in range(min(len(self._pieces), _MAX_VECTOR))]
                sent = self.sock.sendmsg(vector)
                budget -= sent
                while sent:
                    piece = self._pieces.popleft()
                    if sent < len(piece):
                        self._pieces.appendleft(piece[sent:])
                        break
                    sent -= len(piece)
        except BlockingIOError:
            return True
        except OSError as error:
            self.fail(error)
        return bool(self._pieces or self._waiting)

    def _prepare(self) -> bool:
        """The next chunk with its tag, and the head before the first one; False: nothing is left."""
        if not self._waiting:
            return False
        transfer, ticket, body = self._waiting[0]
        if self._position < 0:
            head = ticket.packed()
            self._pieces.append(memoryview(head + self._sealer.tag(head)))
            self._position = 0
        chunk = body[self._position : self._position + CHUNK_BYTES]
        self._pieces.append(chunk)
        self._pieces.append(memoryview(self._sealer.tag_chunk(chunk)))
        self._position += len(chunk)
        if self._position >= len(body):
            self._waiting.popleft()
            self._position = -1
            self._prepared = transfer
        return True

    def fail(self, error: BaseException) -> None:
        self.broken = error
        for transfer in (*(waiting[0] for waiting in self._waiting), self._prepared):
            if transfer is not None:
                transfer.error, transfer.done = error, True
        self._waiting.clear()
        self._pieces.clear()


@final
class _Incoming:
    """The receiving half of one connection; only the reading thread moves it."""

    def __init__(self, peer: int, proven: Proven) -> None:
        self.peer = peer
        self.sock = proven.sock
        self.expected: deque[tuple[Transfer, Ticket, memoryview]] = deque()
        self.broken: BaseException | None = None
        self.at_odds = False
        self._failing = threading.Lock()
        self._opener = proven.session.incoming
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
        transfer, ticket, body = self.expected[0]
        if not self._begun:
            if self._have == _HEAD_BYTES:
                head = memoryview(self._head)
                self._opener.check(head[_HEAD.size :], head[: _HEAD.size])
                self.at_odds = bytes(head[: _HEAD.size]) != ticket.packed()
                self._begun, self._have = True, 0
            return False
        chunk = self._chunk()
        if self._have < len(chunk) + TAG_BYTES:
            return False
        self._opener.check_chunk(self._tag, chunk)
        self._position, self._have = self._position + len(chunk), 0
        if self._position < len(body):
            return False
        self.expected.popleft()
        self._begun, self._position = False, 0
        transfer.done = True
        return True

    def fail(self, error: BaseException) -> None:
        with self._failing:
            self.broken = error
            while self.expected:
                transfer, _, _ = self.expected.popleft()
                transfer.error, transfer.done = error, True


class Bulk:
    """One rank's bulk connections. `notify` is called whenever a transfer is done."""

    def __init__(self, connections: Mapping[int, Proven], notify: Callable[[], None]) -> None:
        self._notify = notify
        self._socks = [proven.sock for proven in connections.values()]
        self._outgoing = {peer: _Outgoing(peer, proven) for peer, proven in connections.items()}
        self._incoming = {peer: _Incoming(peer, proven) for peer, proven in connections.items()}
        self._sender: _Mover | None = None
        self._reader: _Mover | None = None
        self._starting = threading.Lock()
        self._closed = False

    def send(self, body: Tensor, peer: int, ticket: Ticket) -> Transfer:
        """Start to send; `body` must not change until the receiver has said that it has everything."""
        transfer, half = Transfer(peer), self._outgoing[peer]
        with half.lock:
            if half.broken is not None:
                return Transfer(peer, True, half.broken)
            half.put(transfer, ticket, memory_of(body))
            more = half.move()
        if more and (movers := self._movers()):
            movers[0].look_at(half.sock)
        return transfer

    def receive(self, body: Tensor, peer: int, ticket: Ticket) -> Transfer:
        """Start to receive: `body` holds the message when the transfer is done without an error."""
        transfer, half = Transfer(peer), self._incoming[peer]
        half.expected.append((transfer, ticket, memory_of(body)))
        if half.broken is not None:
            half.fail(half.broken)  # the reading thread had failed the others before this one came
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
        """The two threads, started when there is something large to move; None when it is all over."""
        with self._starting:
            if self._closed:
                return None
            if self._sender is None or self._reader is None:
                senders = {half.sock: self._sending(half) for half in self._outgoing.values()}
                readers = {half.sock: self._reading(half) for half in self._incoming.values()}
                self._sender = _Mover("paceline-bulk-out", selectors.EVENT_WRITE, senders)
                self._reader = _Mover("paceline-bulk-in", selectors.EVENT_READ, readers)
            return self._sender, self._reader

    def _sending(self, half: _Outgoing) -> Callable[[], bool]:
        def move() -> bool:
            with half.lock:
                more = half.move()
                broken = half.broken is not None
            if broken:
                self._notify()
            return more

        return move

    def _reading(self, half: _Incoming) -> Callable[[], bool]:
        def move() -> bool:
            if half.move():
                self._notify()
            return bool(half.expected) and not half.at_odds

        return move


@final
class _Mover:
    """A thread that waits for sockets and moves what it can. `moves[sock]()` says whether to go on waiting
    for the socket; else it is left alone until `look_at`."""

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
        watched: set[socket.socket] = set()
        while not self._stopped:
            for key, _ in self._selector.select():
                if key.fd == self._wake:
                    os.eventfd_read(self._wake)
                    while self._wanted:
                        sock = self._wanted.popleft()
                        if sock not in watched:
                            watched.add(sock)
                            self._selector.register(sock, self._event)
                    continue
                sock = key.fileobj  # type: ignore[assignment]
                if not self._moves[sock]():
                    watched.discard(sock)
                    self._selector.unregister(sock)
