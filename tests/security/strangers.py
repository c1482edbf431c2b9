"""What a stranger can do to a port: connections without the secret, one or many, quiet or not."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import final

import msgpack

# The frame that once stopped the store: a header of 32 bytes, and a message whose number is infinite.
_HEADER = struct.Struct("<QqQBxxxI")
_MESSAGE_KIND = 4


def frame_of(body: bytes) -> bytes:
    return _HEADER.pack(len(body), 0, 0, _MESSAGE_KIND, 0) + body


def message_of(tree: bytes) -> bytes:
    """A message of the wire format whose tree is given as msgpack."""
    return struct.pack("<4sIQ", b"PLm1", 0, len(tree)) + tree


INFINITE = frame_of(message_of(msgpack.packb([float("inf"), 0])))
"""59 bytes: int() of the number is an OverflowError."""

# An array of shape [2**62] of strings without characters: it is 0 bytes long, and too large for any memory.
HUGE_ARRAY = frame_of(
    message_of(msgpack.packb([1, [msgpack.ExtType(4, b""), "|S0", [2**62], "C", b""]], use_bin_type=True))
)


def dropped(sock: socket.socket) -> bool:
    """Wait until the other end has closed the connection; False if it does not within the timeout."""
    try:
        while sock.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def calling(port: int, data: bytes = b"", *, timeout: float = 30.0) -> Iterator[socket.socket]:
    """A stranger's connection, on which `data` was said, or what the port read of it before it closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as sock:
        with suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(data)
        yield sock


@final
class KnockedAt(socket.socket):
    """A listening socket at which the next stranger waits whenever one is let in, up to KNOCKS of them: its
    owner never finds it quiet."""

    KNOCKS = 20_000

    def __init__(self) -> None:
        opened = socket.create_server(("127.0.0.1", 0), backlog=64)
        super().__init__(fileno=opened.detach())
        self.knocks = 0
        self._strangers: deque[socket.socket] = deque()
        self._knock()

    def accept(self) -> tuple[socket.socket, object]:
        if self.knocks < self.KNOCKS:
            self._knock()
        return super().accept()

    def _knock(self) -> None:
        self.knocks += 1
        self._strangers.append(socket.create_connection(self.getsockname()))
        if len(self._strangers) > 8:
            self._strangers.popleft().close()

    def close(self) -> None:
        super().close()
        while self._strangers:
            self._strangers.popleft().close()


_KNOCK = """
import contextlib, socket, sys
port, data, count = int(sys.argv[1]), bytes.fromhex(sys.argv[2]), 0
while True:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(data)
        count += 1
        if count == 100:
            print("knocking", flush=True)
"""


@contextmanager
def knocking(port: int, data: bytes = b"") -> Iterator[None]:
    """Strangers who connect, say `data` and leave, without a pause, while the block lasts."""
    command = [sys.executable, "-c", _KNOCK, str(port), data.hex()]
    with ExitStack() as stack:
        strangers = []
        for _ in range(2):
            stranger = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(stranger.kill)
            strangers.append(stranger)
        for stranger in strangers:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == b"knocking\n"
        yield
