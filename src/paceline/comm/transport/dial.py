"""Connections that are made and read without losing sight of the rest: whoever waits looks around every few
milliseconds and may be called off.

Knows sockets and nothing of what is said over them.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable

LOOK_SECONDS = 0.005

Look = Callable[[], None]
"""Called now and then by a thread that waits; may raise."""


def nothing_to_see() -> None:
    """For waits that nobody calls off."""


def dial(host: str, port: int, deadline: float, look: Look = nothing_to_see) -> socket.socket:
    """A connection, not blocking, to the first address of `host` that takes it; OSError of the last one."""
    failure: OSError = ConnectionError(f"{host} has no address")
    for family, kind, protocol, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            _connect(sock, target, deadline, look)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def _connect(sock: socket.socket, target: object, deadline: float, look: Look) -> None:
    code = sock.connect_ex(target)  # type: ignore[arg-type]
    if code == errno.EINPROGRESS:
        _until_ready(sock, select.POLLOUT, deadline, look)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def read_exactly(sock: socket.socket, size: int, deadline: float, look: Look = nothing_to_see) -> bytes:
    """`size` bytes of a socket that does not block; EOFError if it ends before."""
    data = b""
    while len(data) < size:
        _until_ready(sock, select.POLLIN, deadline, look)
        if time.monotonic() >= deadline:
            raise TimeoutError("timed out")  # also where single bytes keep coming
        more = sock.recv(size - len(data))
        if not more:
            raise EOFError("the connection was closed")
        data += more
    return data


def _until_ready(sock: socket.socket, events: int, deadline: float, look: Look) -> None:
    poll = select.poll()
    poll.register(sock, events)
    while not poll.poll(LOOK_SECONDS * 1000):
        look()
        if time.monotonic() >= deadline:
            raise TimeoutError("timed out")
