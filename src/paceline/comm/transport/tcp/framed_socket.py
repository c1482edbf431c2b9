"""One proven connection between two ranks: frames out without blocking, frames in as they come.

A frame is a header of 32 bytes (length, sequence or tag, signature, kind, number) with its tag, and, for most
kinds, a body of `length` bytes with its own. The tags are those of the session (core.session_auth): frames
that were changed, repeated, left out or made by a third party on the way end the connection. The header's tag
is checked before its length is believed. A body up to 64 KB is tagged like a chunk of bulk data, by the kind
that both ends agreed on (core.mac_algorithms); the tag of a longer one is over its SHA-256, which is computed
as the bytes come. What the socket does not take at once waits in the outbox.
"""

from __future__ import annotations

import enum
import itertools
import socket
import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from paceline.core.authenticated_listener import AuthenticatedSocket
from paceline.core.errors import WireError
from paceline.core.session_auth import TAG_BYTES

_HEADER = struct.Struct("<QqQBxxxI")  # HEADER_BYTES of comm/transport/base.py, which would import torch

INLINE_BYTES = 64 * 1024
"""Messages of collectives up to this size travel inside their frame, larger ones beside it."""

HEAD_BYTES = _HEADER.size + TAG_BYTES
"""A header and its tag: what travels of a frame without a body."""

BODY_TAG_BYTES = TAG_BYTES
"""What travels of a body besides the body."""

_NOTE_BYTES = 256 * 1024
_READ_BUDGET = 4 << 20
_MAX_VECTOR = 64


class FrameKind(enum.IntEnum):
    DATA = 1  # of a collective, with its body
    BULK = 2  # of a collective; the body travels beside
    ACCEPT = 3  # the receiver of a BULK has checked it and takes it
    MESSAGE = 4  # point to point
    STATUS = 5
    WHERE = 6  # a question ...
    HERE = 7  # ... and its answer
    FAILURE = 8
    BYE = 9
    DONE = 11  # the receiver of a BULK has all of it
    ACK = 10  # everything up to the BYE or FAILURE was read
    NOTE = 12  # a key and a value for a store that all ranks share


_LIMITS = {FrameKind.DATA: INLINE_BYTES} | dict.fromkeys(
    (FrameKind.STATUS, FrameKind.HERE, FrameKind.FAILURE, FrameKind.NOTE), _NOTE_BYTES
)


@dataclass(slots=True)
class Frame:
    kind: FrameKind
    length: int
    sequence: int
    signature: int
    number: int
    body: bytearray


class FramedSocket:
    """A proven connection that carries frames: many threads may put frames in, one thread reads."""

    def __init__(self, proven: AuthenticatedSocket, max_message: int = 1 << 40) -> None:
        self.sock = proven.sock
        self._outgoing_tags = proven.session.outgoing
        self._incoming_tags = proven.session.incoming
        self._limits = {**_LIMITS, FrameKind.MESSAGE: max_message}
        self.put_bytes = 0
        self.sent_bytes = 0
        self._outbox: deque[memoryview] = deque()
        self._lock = threading.Lock()
        self._head = bytearray(HEAD_BYTES)
        self._tag = bytearray(BODY_TAG_BYTES)
        self._have = 0
        self._frame: Frame | None = None
        self._digest = sha256()
        self._broken = False

    def put(
        self,
        kind: FrameKind,
        pieces: Sequence[memoryview] = (),
        *,
        length: int | None = None,
        sequence: int = 0,
        signature: int = 0,
        number: int = 0,
    ) -> int:
        """Send a frame as far as the socket takes it; `pieces` are in use until `sent_bytes` is so far."""
        pieces = [piece for piece in pieces if len(piece)]
        size = sum(len(piece) for piece in pieces)
        header = _HEADER.pack(size if length is None else length, sequence, signature, kind, number)
        short = size <= INLINE_BYTES
        body = _digest(pieces) if not short else pieces[0] if len(pieces) == 1 else b"".join(pieces)
        with self._lock:
            self._outbox.append(memoryview(header + self._outgoing_tags.tag(header)))
            self.put_bytes += HEAD_BYTES
            if pieces:
                self._outbox.extend(pieces)
                tag = self._outgoing_tags.tag_chunk(body) if short else self._outgoing_tags.tag(body)
                self._outbox.append(memoryview(tag))
                self.put_bytes += size + BODY_TAG_BYTES
            mark = self.put_bytes
            self._flush()
        return mark

    @property
    def waiting(self) -> bool:
        """Return whether frames wait for the socket to take more."""
        return bool(self._outbox)

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def settle(self) -> None:
        """Copy what still waits, so that the callers' memory is free."""
        with self._lock:
            self._outbox = deque(memoryview(bytes(piece)) for piece in self._outbox)

    def _flush(self) -> None:
        try:
            while self._outbox and not self._broken:
                self.sent_bytes += send_first(self.sock, self._outbox, _MAX_VECTOR)
        except BlockingIOError:
            return
        except OSError:
            # The reader finds the end of the connection too, and can say more about it.
            self._broken = True
        if self._broken:
            self._outbox.clear()

    def read(self) -> tuple[list[Frame], bool]:
        """Return the frames that are complete by now, and whether the connection has ended. Never blocks.
        WireError: what came is not the other end's; the connection is of no use from then on."""
        frames: list[Frame] = []
        budget = _READ_BUDGET
        try:
            while budget > 0:
                count, *_ = self.sock.recvmsg_into(self._next_room())
                if count == 0:
                    return frames, True
                budget -= count
                self._took(count, frames)
        except BlockingIOError:
            return frames, False
        except OSError:
            return frames, True
        return frames, False

    def close(self) -> None:
        with self._lock:
            self._broken = True
            self._outbox.clear()
        self.sock.close()

    def _next_room(self) -> list[memoryview]:
        if self._frame is None:
            return [memoryview(self._head)[self._have :]]
        size = len(self._frame.body)
        if self._have >= size:
            return [memoryview(self._tag)[self._have - size :]]
        return [memoryview(self._frame.body)[self._have :], memoryview(self._tag)]

    def _took(self, count: int, frames: list[Frame]) -> None:
        if self._frame is None:
            self._have += count
            if self._have < HEAD_BYTES:
                return
            head = memoryview(self._head)
            self._incoming_tags.check(head[_HEADER.size :], head[: _HEADER.size])
            self._frame, self._have = _opened(self._head, self._limits), 0
            self._digest = sha256()
            if not self._frame.body:
                self._completed(frames)
            return
        size = len(self._frame.body)
        if size > INLINE_BYTES and self._have < size:
            self._digest.update(memoryview(self._frame.body)[self._have : min(self._have + count, size)])
        self._have += count
        if self._have == size + BODY_TAG_BYTES:
            if size <= INLINE_BYTES:
                self._incoming_tags.check_chunk(self._tag, self._frame.body)
            else:
                self._incoming_tags.check(self._tag, self._digest.digest())
            self._completed(frames)

    def _completed(self, frames: list[Frame]) -> None:
        assert self._frame is not None
        frames.append(self._frame)
        self._frame, self._have = None, 0


def send_first(sock: socket.socket, pieces: deque[memoryview], most: int) -> int:
    """Send up to `most` of the first pieces, drop from them what the socket took, and return how much."""
    sent = taken = sock.sendmsg(list(itertools.islice(pieces, most)))
    while taken:
        piece = pieces.popleft()
        if taken < len(piece):
            pieces.appendleft(piece[taken:])
            break
        taken -= len(piece)
    return sent


def _digest(pieces: Sequence[memoryview]) -> bytes:
    digest = sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _opened(head: bytearray, limits: Mapping[FrameKind, int]) -> Frame:
    length, sequence, signature, code, number = _HEADER.unpack_from(head)
    try:
        kind = FrameKind(code)
    except ValueError:
        raise WireError(f"a frame of the unknown kind {code}") from None
    limit = limits.get(kind)
    if limit is not None and length > limit:
        raise WireError(f"a {kind.name} frame of {length} bytes; at most {limit} are allowed")
    return Frame(kind, length, sequence, signature, number, bytearray(length if limit is not None else 0))
