"""Messages that carry file descriptors, between processes of one machine: plain JSON data over socket pairs.

The pairs are made by one process and inherited or passed on, never bound to a name, so no other process can
connect to them. They keep message boundaries and order: several senders can share one socket. What is longer
than a message travels in a memory file, whose descriptor the message carries.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from paceline.core.errors import ResourceError
from paceline.core.sandbox_fallbacks import memory_file

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

_MAX_BYTES: Final = 64 * 1024
_MAX_DESCRIPTORS: Final = 253  # the kernel's limit for one message


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep message boundaries."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(
    sock: socket.socket, body: Mapping[str, Any] | Sequence[Any], descriptors: Sequence[int] = ()
) -> None:
    """Send one message. The descriptors are duplicated: the sender keeps its own."""
    socket.send_fds(sock, [json.dumps(body).encode()], list(descriptors))


def receive(sock: socket.socket) -> tuple[Any, tuple[int, ...]] | None:
    """Return the next message and its descriptors, which belong to the receiver; None when the other side has
    closed."""
    try:
        data, descriptors, flags, _ = socket.recv_fds(
            sock, _MAX_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionError:
        return None
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        close_all(descriptors)
        raise ResourceError(
            "a message of another process lost its descriptors: this process has too many files open",
            remedy="close files that are no longer used, raise `ulimit -n`, or use fewer workers",
        )
    return (json.loads(data), tuple(descriptors)) if data else None


def to_memory_file(name: str, body: Mapping[str, Any]) -> int:
    """Write a body that is longer than a message to a memory file, and return its descriptor."""
    descriptor = memory_file(name)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(json.dumps(body).encode())
    return descriptor


def from_memory_file(descriptor: int) -> Any:
    """Return the body in a memory file; the descriptor stays open."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return json.load(file)


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors received in a message."""
    for descriptor in descriptors:
        os.close(descriptor)
