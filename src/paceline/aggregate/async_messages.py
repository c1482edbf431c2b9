"""What server, workers and caller of asynchronous SGD say to each other: small maps on socket pairs.

    server -> worker   {"do": "compute", epoch, start, stop, version}   {"do": "end"}
    worker -> server   {"say": "ready", pid, host}   {"say": "done", loss, count, seconds, unused}
    caller -> server   {"do": "join", worker} [socket, memory file]   {"do": "stop", reason}
                       {"do": "lost", worker, pid, reason, cause}
    server -> caller   {"say": "joined", worker, pid}   {"say": "learned", worker}   (once)
                       {"say": "hung", worker, pid, reason}

The pairs are made by the caller and handed over, never bound to a name, so nobody else can speak on them.
They keep message boundaries. Must not know what the messages lead to.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Final

from paceline.core import wire
from paceline.core.errors import ResourceError, WireError

_MOST_BYTES: Final = 64 * 1024
_MOST_DESCRIPTORS: Final = 4


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep message boundaries."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> bool:
    """Send one message; False when nobody listens any more. The sender keeps its descriptors."""
    data = b"".join(wire.encode(message))
    try:
        socket.send_fds(sock, [data], descriptors)
    except (ConnectionError, BrokenPipeError):
        return False
    return True


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and the descriptors that came with it; None when the other side is gone."""
    try:
        data, descriptors, flags, _ = socket.recv_fds(
            sock, _MOST_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionError:
        return None
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        for descriptor in descriptors:
            os.close(descriptor)
        raise ResourceError(
            "a message of asynchronous SGD lost its descriptors: this process has too many files open",
            remedy="raise the limit with `ulimit -n`, or use fewer workers",
        )
    if not data:
        return None
    message = wire.decode(data)
    if not isinstance(message, dict):
        raise WireError(f"a message of asynchronous SGD is a {type(message).__name__}")
    return message, list(descriptors)
