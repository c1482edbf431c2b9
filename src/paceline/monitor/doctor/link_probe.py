"""Measure the link to a host on which `paceline doctor --serve` runs: round trip, speed, clock.

    both               the handshake of every connection (`core.handshake`)
    asking -> asked    {"do": "time"}                       the clock and the name of the host
    asking -> asked    {"do": "sink", "bytes": n}, n bytes  how long they took to arrive
    asking -> asked    {"do": "probe", "host": h, "port": p}   the asked host measures its link to a third one

Every message is a small JSON object with the tag of the session. What is sent to be timed means nothing, and
has no tag. Both ends prove the secret, so that no stranger is measured, served, or has this host connect
anywhere.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, final

from paceline.core import type_conversion
from paceline.core.errors import PacelineError, WireError
from paceline.core.handshake import DOCTOR, Connector
from paceline.core.session_auth import TAG_BYTES, SessionKeys
from paceline.core.time_limits import CONNECT_SECONDS

DEFAULT_PORT: Final = 41900
MOST_BYTES: Final = 64 << 20
SECONDS: Final = 20.0
"""For one answer; the transfer of a slow link takes the longest."""

_LENGTH: Final = struct.Struct("<I")
_LONGEST: Final = 4096
_CHUNK: Final = bytes(1 << 20)
_ROUNDS: Final = 5
_FIRST_BYTES: Final = 1 << 20
_ENOUGH_SECONDS: Final = 0.1


@final
@dataclass(frozen=True)
class LinkMeasure:
    """One direction of a link. `skew`: how far the other clock is ahead. `problem`: why nothing is known."""

    host: str = ""
    round_trip: float = 0.0
    bytes_per_second: float = 0.0
    skew: float = 0.0
    problem: str = ""


@final
class ProbeConnection:
    """A proven connection with messages; every wait has a limit."""

    def __init__(self, sock: socket.socket, session: SessionKeys) -> None:
        self.sock = sock
        self._session = session
        sock.settimeout(SECONDS)

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self.sock.sendall(_LENGTH.pack(len(data)) + self._session.outgoing.tag(data) + data)

    def receive(self) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if length > _LONGEST:
            raise WireError(f"a message of {length} bytes is longer than any of the doctor's")
        tag, data = self.read(TAG_BYTES), self.read(length)
        self._session.incoming.check(tag, data)
        message = json.loads(data)
        if not isinstance(message, dict):
            raise WireError("a message of the doctor is an object")
        return message

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.sock.recv(min(count - len(data), len(_CHUNK)))
            if not piece:
                raise ConnectionResetError("the connection was closed there")
            data += piece
        return data

    def send_zeros(self, count: int) -> None:
        for start in range(0, count, len(_CHUNK)):
            self.sock.sendall(memoryview(_CHUNK)[: min(len(_CHUNK), count - start)])

    def swallow(self, count: int) -> None:
        """Read bytes that mean nothing."""
        buffer = memoryview(bytearray(len(_CHUNK)))
        while count:
            found = self.sock.recv_into(buffer[: min(count, len(buffer))])
            if not found:
                raise ConnectionResetError("the connection was closed there")
            count -= found


def connect(host: str, port: int, secret: bytes) -> ProbeConnection:
    """Connect to a serving doctor; both ends prove the secret."""
    sock = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def read(count: int) -> bytes:
            data = sock.recv(count)
            if not data:
                raise ConnectionResetError("it closed the connection: is the secret the same on both hosts?")
            return data

        return ProbeConnection(sock, Connector(DOCTOR, secret).run(read, sock.sendall))
    except BaseException:
        sock.close()
        raise


def measure(host: str, port: int, secret: bytes, most: int = MOST_BYTES) -> LinkMeasure:
    """Measure the link to a host; what goes wrong is the measure's `problem`."""
    proved = False
    try:
        connection = connect(host, port, secret)
        try:
            proved = True
            return _measured(connection, most)
        finally:
            connection.sock.close()
    except ConnectionRefusedError:
        return LinkMeasure(problem=f"nothing listens at {host}:{port}")
    except TimeoutError:
        hole = "small packets arrive and large ones do not: is the MTU of the way too small?"
        return LinkMeasure(problem=hole if proved else f"{host}:{port} does not answer")
    except PacelineError as error:
        return LinkMeasure(problem=f"{host}:{port}: {error.message}")
    except (OSError, ValueError) as error:
        return LinkMeasure(problem=f"{host}:{port}: {getattr(error, 'strerror', None) or error}")


def measure_from(
    asked: tuple[str, int], target: tuple[str, int], secret: bytes, most: int = MOST_BYTES
) -> LinkMeasure:
    """Have the host `asked` measure its link to `target`."""
    try:
        connection = connect(*asked, secret)
        try:
            connection.sock.settimeout(3 * SECONDS)
            connection.send({"do": "probe", "host": target[0], "port": target[1], "bytes": most})
            answer: LinkMeasure = type_conversion.convert(connection.receive(), LinkMeasure, "")
            return answer
        finally:
            connection.sock.close()
    except (OSError, ValueError, PacelineError, type_conversion.ConversionError) as error:
        return LinkMeasure(problem=f"{asked[0]}:{asked[1]} could not be asked: {error}")


def answer(
    connection: ProbeConnection, secret: bytes, host: str, clock: Callable[[], float] = time.time
) -> None:
    """Answer one request of the other end."""
    match connection.receive():
        case {"do": "time"}:
            connection.send({"time": clock(), "host": host})
        case {"do": "sink", "bytes": int(count)} if 0 < count <= MOST_BYTES:
            begun = time.monotonic()
            connection.swallow(count)
            connection.send({"seconds": time.monotonic() - begun})
        case {"do": "probe", "host": str(target), "port": int(port), "bytes": int(most)}:
            connection.send(asdict(measure(target, port, secret, min(most, MOST_BYTES))))
        case request:
            raise WireError(f"the doctor does not know {request.get('do')!r}")


def _measured(connection: ProbeConnection, most: int) -> LinkMeasure:
    trips = []
    name = ""
    for _ in range(_ROUNDS):
        sent, began = time.time(), time.monotonic()
        connection.send({"do": "time"})
        reply = connection.receive()
        took = time.monotonic() - began
        # The other clock was read in the middle of the round trip, within half of it.
        trips.append((took, float(reply["time"]) - (sent + took / 2)))
        name = str(reply.get("host", ""))
    round_trip, skew = min(trips)
    count = _FIRST_BYTES
    while True:
        connection.send({"do": "sink", "bytes": count})
        begun = time.monotonic()
        connection.send_zeros(count)
        connection.receive()
        # Until the answer: what waits in buffers has not arrived. Its way back is not the data's.
        seconds = max(time.monotonic() - begun - round_trip / 2, 1e-9)
        if seconds >= _ENOUGH_SECONDS or count * 4 > most:
            return LinkMeasure(name, round_trip, count / seconds, skew)
        count *= 4
