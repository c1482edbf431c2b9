"""Frames of bytes on a stream socket: a magic word, a length, the bytes.

Must not know what the bytes mean.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Final

from paceline.core.errors import WireError

Buffer = bytes | memoryview

DEFAULT_MAX_BYTES: Final = 4 << 30
_MAGIC: Final = b"PLf1"
_HEAD: Final = struct.Struct("<4sQ")
# The kernel refuses longer vectors (IOV_MAX is 1024 on Linux).
_MAX_VECTOR: Final = 512


def total_bytes(pieces: Iterable[Buffer]) -> int:
    """How long the message made of these pieces is."""
    return sum(nbytes(piece) for piece in pieces)


def nbytes(piece: Buffer) -> int:
    return piece.nbytes if isinstance(piece, memoryview) else len(piece)


def write_frame(sock: socket.socket, pieces: Sequence[Buffer]) -> int:
    """Send one frame made of `pieces` (as `encode` returns them) and return the bytes put on the wire.

    The socket's own timeout applies; after a TimeoutError the stream is inside a frame and unusable.
    """
    total = total_bytes(pieces)
    queue = [memoryview(_HEAD.pack(_MAGIC, total))]
    queue += [memoryview(piece).cast("B") for piece in pieces if nbytes(piece)]
    first = 0
    try:
        while first < len(queue):
            sent = sock.sendmsg(queue[first : first + _MAX_VECTOR])
            while first < len(queue) and sent >= len(queue[first]):
                sent -= len(queue[first])
                first += 1
            if sent:
                queue[first] = queue[first][sent:]
    except ConnectionError as error:
        raise WireError(
            f"the peer closed the connection while a frame of {total} bytes was sent", bytes=total
        ) from error
    return total + _HEAD.size


def read_frame(sock: socket.socket, *, max_bytes: int = DEFAULT_MAX_BYTES) -> bytearray | None:
    """The next frame, ready for `decode(..., copy=False)`; None when the peer closed between frames.

    The socket's own timeout applies; after a TimeoutError the stream may be inside a frame and unusable.
    """
    head = bytearray(_HEAD.size)
    got = _fill(sock, memoryview(head))
    if got == 0:
        return None
    if got < len(head):
        raise WireError(f"the connection closed after {got} of {len(head)} bytes of a frame's header")
    magic, length = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise WireError(f"the peer does not speak Paceline: a frame began with {magic!r}")
    if length > max_bytes:
        raise WireError(
            f"a frame of {length} bytes is longer than the limit of {max_bytes}",
            remedy="raise max_bytes if such messages are meant to be sent",
            length=length,
            max_bytes=max_bytes,
        )
    body = bytearray(length)
    got = _fill(sock, memoryview(body))
    if got < length:
        raise WireError(f"the connection closed after {got} of {length} bytes of a frame")
    return body


def _fill(sock: socket.socket, view: memoryview) -> int:
    got = 0
    try:
        while got < len(view):
            count = sock.recv_into(view[got:])
            if count == 0:
                break
            got += count
    except ConnectionError as error:
        raise WireError(f"the peer reset the connection after {got} of {len(view)} bytes") from error
    return got
