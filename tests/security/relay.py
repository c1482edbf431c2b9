"""A machine on the path: passes the handshake on between two ends and then does what an attacker would.

It has no secret of the job. It knows the protocol: where the handshake ends and where frames begin and end.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, final

from paceline.core.handshake import CHALLENGE_BYTES, CONTROL, PROOF_BYTES
from paceline.core.session_auth import TAG_BYTES
from paceline.core.tls import TlsEnd

Direction = Literal["to the supervisor", "to the joiner"]
UP: Final[Direction] = "to the supervisor"
DOWN: Final[Direction] = "to the joiner"

_LENGTH: Final = struct.Struct("<I")
_HANDSHAKE: Final = {UP: CONTROL.answer_bytes, DOWN: CHALLENGE_BYTES + PROOF_BYTES}


@dataclass
class Passed:
    """One connection through the relay. `ended`: which end closed it first; `frames`: what was passed on or
    withheld, by direction; `back`: what came back to the attacker after the attack."""

    number: int
    sockets: dict[Direction, socket.socket]
    frames: dict[Direction, list[bytes]] = field(default_factory=lambda: {UP: [], DOWN: []})
    ended: Direction | None = None
    attacked: bool = False
    back: dict[Direction, list[bytes]] = field(default_factory=lambda: {UP: [], DOWN: []})

    def inject(self, towards: Direction, data: bytes) -> None:
        """Send bytes as if the other end had; the victim may have hung up already."""
        self.attacked = True
        with contextlib.suppress(OSError):
            self.sockets[towards].sendall(data)


Attack = Callable[[Passed, Direction, int, bytes], "bytes | None"]
"""(connection, direction, the frame's number in it, the frame) -> what is sent instead; None: as it is."""


def honest(passed: Passed, direction: Direction, number: int, frame: bytes) -> bytes | None:
    return None


@final
class Relay:
    """Listens on loopback and relays to `target`. With `tls`, it ends TLS on both sides with a certificate of
    its own: (as the acceptor, as the connector)."""

    def __init__(
        self, target: tuple[str, int], attack: Attack = honest, tls: tuple[TlsEnd, TlsEnd] | None = None
    ) -> None:
        self._target = target
        self._attack = attack
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = ("127.0.0.1", self._listener.getsockname()[1])
        self.passed: list[Passed] = []
        self._threads = [threading.Thread(target=self._serve, name="relay")]
        self._closing = False
        self._threads[0].start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for passed in self.passed:
            for sock in passed.sockets.values():
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()

    @property
    def address_text(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    def _serve(self) -> None:
        while not self._closing:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._relay, args=(near,), name="relayed")
            self._threads.append(thread)
            thread.start()

    def _relay(self, near: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(near)
            try:
                far = stack.enter_context(socket.create_connection(self._target, timeout=10.0))
                near.settimeout(10.0)
                if self._tls is not None:
                    near = stack.enter_context(self._tls[0].wrap(near))
                    far = stack.enter_context(self._tls[1].wrap(far))
            except OSError:
                return
            passed = Passed(len(self.passed) + 1, {UP: far, DOWN: near})
            self.passed.append(passed)
            self._pump(passed)

    def _pump(self, passed: Passed) -> None:
        towards: dict[socket.socket, Direction] = {passed.sockets[DOWN]: UP, passed.sockets[UP]: DOWN}
        left = dict(_HANDSHAKE)
        boxes: dict[Direction, bytearray] = {UP: bytearray(), DOWN: bytearray()}
        with selectors.DefaultSelector() as selector:
            for sock in towards:
                sock.settimeout(10.0)
                selector.register(sock, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    direction = towards[key.fileobj]
                    try:
                        data = key.fileobj.recv(1 << 16)
                    except OSError:
                        data = b""
                    if not data:
                        passed.ended = UP if direction == DOWN else DOWN
                        return
                    try:
                        data = self._handshake(passed, direction, left, data)
                        if self._attack is honest:
                            passed.sockets[direction].sendall(data)
                            continue
                        boxes[direction] += data
                        self._frames(passed, direction, boxes[direction])
                    except OSError:
                        # What cannot be passed on: the end it goes to has closed, and its reset was not read
                        # yet because the other socket was ready in the same turn.
                        passed.ended = direction
                        return

    def _handshake(
        self, passed: Passed, direction: Direction, left: dict[Direction, int], data: bytes
    ) -> bytes:
        begin, rest = data[: left[direction]], data[left[direction] :]
        if begin:
            passed.sockets[direction].sendall(begin)
            left[direction] -= len(begin)
        return rest

    def _frames(self, passed: Passed, direction: Direction, box: bytearray) -> None:
        while len(box) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(box)
            end = _LENGTH.size + length + TAG_BYTES
            if len(box) < end:
                return
            frame = bytes(box[:end])
            del box[:end]
            number = len(passed.frames[direction])
            passed.frames[direction].append(frame)
            if passed.attacked:
                passed.back[direction].append(frame)
            sent = self._attack(passed, direction, number, frame)
            passed.sockets[direction].sendall(frame if sent is None else sent)
