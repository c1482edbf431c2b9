"""Connect to a peer before there are frames: waits end at a deadline, or when they are called off.

A group may be given up while a rank still waits for a connection (a peer has failed, a supervisor interrupts
the rank). So no wait here blocks for longer than a few milliseconds: between two looks at the socket it calls
`look`, which raises when the wait must end.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import time
from collections.abc import Callable

from paceline.core.errors import RendezvousError

_log = logging.getLogger("paceline.comm")

Look = Callable[[], None]
"""Called now and then by a thread that waits; may raise."""

DIAL_LOOK_SECONDS = 0.005
FIRST_NOTICE = 2.0
NEXT_NOTICE = 30.0
MAX_PAUSE = 0.05


class Deadline:
    """A wait with a deadline: pauses that grow, and now and then a log line that names the missing ranks."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._pause = 0.001
        self._notice_at = time.monotonic() + FIRST_NOTICE

    def pause(self, what: Callable[[], str]) -> None:
        """Sleep a little; raise RendezvousError with `what()` at the deadline."""
        self.check(what)
        time.sleep(min(self._pause, max(self._deadline - time.monotonic(), 0.0)))
        self._pause = min(self._pause * 1.5, MAX_PAUSE)

    def check(self, what: Callable[[], str]) -> None:
        """Raise at the deadline and log now and then, as `pause`: for a caller that has slept already."""
        now = time.monotonic()
        if now >= self._deadline:
            raise RendezvousError(f"{what()}, and the time for it is over")
        if now >= self._notice_at:
            self._notice_at = now + NEXT_NOTICE
            _log.warning("%s", what())


def no_check() -> None:
    """Check nothing: for waits that cannot be called off."""


def dial(host: str, port: int, deadline: float, look: Look = no_check) -> socket.socket:
    """Connect, not blocking, to the first address of `host` that takes it; OSError of the last one."""
    failure: OSError = ConnectionError(f"{host} has no address")
    for family, kind, protocol, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            code = sock.connect_ex(target)
            if code == errno.EINPROGRESS:
                _until_ready(sock, select.POLLOUT, deadline, look)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def read_exactly(sock: socket.socket, size: int, deadline: float, look: Look = no_check) -> bytes:
    """Read `size` bytes of a socket that does not block; EOFError if it ends before."""
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
    while not poll.poll(DIAL_LOOK_SECONDS * 1000):
        look()
        if time.monotonic() >= deadline:
            raise TimeoutError("timed out")
