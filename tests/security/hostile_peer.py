"""A peer that has the job's token and sends what no worker would."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, final

import msgpack
from tests.elastic.supervised_jobs import Run

from paceline.core.control import address, channel
from paceline.core.control.messages import Ask, Hello, Message
from paceline.core.sealing import Session
from paceline.elastic import tools


@final
class Hostile:
    """One connection with a keyed session, on which anything can be sent."""

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.sock = sock
        self._session = session

    def send(self, *messages: Message | list[Any] | bytes) -> None:
        """In one piece: messages, plain trees in place of them, or bytes in place of a body."""
        self.sock.sendall(b"".join(map(self._sealed, messages)))

    def _sealed(self, message: Message | list[Any] | bytes) -> bytes:
        if isinstance(message, Message):
            data = channel.frame(message)
        else:
            body = message if isinstance(message, bytes) else packed(message)
            data = struct.pack("<I", len(body)) + body
        return data + self._session.outgoing.tag(data)

    def is_dropped(self, seconds: float = 60.0) -> bool:
        """Whether the supervisor ends the connection in time, whatever it says before."""
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self.sock, select.POLLIN)
            if not poll.poll(left * 1000):
                break
            try:
                if not self.sock.recv(1 << 16):
                    return True
            except OSError:
                return True
        return False


def packed(plain: Any) -> bytes:
    body: bytes = msgpack.packb(plain, use_bin_type=True, unicode_errors="surrogatepass")
    return body


@contextlib.contextmanager
def hostile(run: Run) -> Iterator[Hostile]:
    """A connection to the run's supervisor, proven with its token."""
    with socket.create_connection(run.supervised.address, timeout=30.0) as sock:
        session = channel.prove(sock, address.read_secret(run.folder), 30.0)
        sock.settimeout(30.0)
        yield Hostile(sock, session)


def facts(run: Run) -> dict[str, Any]:
    return tools.ask(run.folder, Ask(what="status"), 60.0).facts


def hello_as(worker: dict[str, Any], generation: int = 0) -> Hello:
    """How a peer with the token takes the place of a worker: `status` tells its process."""
    return Hello(
        member=worker["member"],
        slot=worker["rank"],
        pid=worker["pid"],
        host="h",
        hostname="n",
        endpoint=("", 0),
        fingerprint={"cpu": "same"},
        generation=generation,
        progress=(worker["step"], 0, 0),
    )
