"""A peer that has the job's token and sends what no worker would."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, final

import msgpack
from tests.elastic.supervised_jobs import Run

from paceline.control import channel, supervisor_address
from paceline.control.messages import ControlMessage, MemberHello, ToolRequest
from paceline.core.session_auth import SessionKeys
from paceline.elastic.supervisor import tool_client


@final
class Hostile:
    """One connection with a keyed session, on which anything can be sent."""

    def __init__(self, sock: socket.socket, session: SessionKeys) -> None:
        self.sock = sock
        self._session = session

    def send(self, *messages: ControlMessage | list[Any] | bytes) -> None:
        """In one piece: messages, plain trees in place of them, or bytes in place of a body."""
        self.sock.sendall(b"".join(map(self._sealed, messages)))

    def _sealed(self, message: ControlMessage | list[Any] | bytes) -> bytes:
        if isinstance(message, ControlMessage):
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
        session = channel.authenticate(sock, supervisor_address.read_secret(run.folder), 30.0)
        sock.settimeout(30.0)
        yield Hostile(sock, session)


@contextlib.contextmanager
def in_place_of(run: Run, worker: dict[str, Any], generation: int = 0) -> Iterator[Hostile]:
    """A connection in the place of `worker`, which is stopped meanwhile: it would reconnect at once, and the
    supervisor would close this connection for the worker's new one before a long message is read."""
    os.kill(worker["pid"], signal.SIGSTOP)
    try:
        with hostile(run) as peer:
            peer.send(hello_as(worker, generation))
            yield peer
    finally:
        os.kill(worker["pid"], signal.SIGCONT)


def facts(run: Run) -> dict[str, Any]:
    return tool_client.ask(run.folder, ToolRequest(what="status"), 60.0).facts


def hello_as(worker: dict[str, Any], generation: int = 0) -> MemberHello:
    """How a peer with the token takes the place of a worker: `status` tells its process."""
    return MemberHello(
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
