"""Two ranks that connect, and a machine between them that passes the handshake on and then attacks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest

from paceline.comm.transport.tcp.bulk_transfer import BulkConnections
from paceline.comm.transport.tcp.dial import Look, no_check
from paceline.comm.transport.tcp.mesh import Mesh
from paceline.comm.transport.tcp.mesh_handshake import MeshStream, PeerConnections, connect_all
from paceline.core.handshake import CHALLENGE_BYTES, MESH, PROOF_BYTES
from paceline.core.listen_address import ListenAddress
from paceline.core.mac_algorithms import Mac

SECRET = b"s" * 32
PATIENCE = 120.0
_UP = MESH.answer_bytes
_DOWN = CHALLENGE_BYTES + PROOF_BYTES


@dataclass
class Forming:
    """One rank's part in connecting, in a thread."""

    port: int
    connected: dict[int, PeerConnections] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    thread: threading.Thread = field(default_factory=threading.Thread)


@contextmanager
def forming(
    rank: int,
    endpoints: dict[int, tuple[str, int]],
    macs: Mapping[int, Mac] | None = None,
    look: Look = no_check,
) -> Iterator[Forming]:
    listener = ListenAddress().open("127.0.0.1")
    found = Forming(listener.getsockname()[1])

    def run() -> None:
        try:
            deadline = time.monotonic() + PATIENCE
            found.connected.update(connect_all(rank, listener, endpoints, SECRET, deadline, look, macs))
        except BaseException as error:
            found.errors.append(error)

    found.thread = threading.Thread(target=run)
    found.thread.start()
    try:
        yield found
    finally:
        found.thread.join()
        listener.close()
        for pair in found.connected.values():
            pair.close()


Attack = Callable[[int, str, bytes], bytes]
"""(which connection, "up" or "down", bytes after the handshake) -> what is passed on."""


class Between:
    """Relays connections to `port`, byte by byte the handshake, and then what `attack` makes of the rest."""

    def __init__(self, port: int, attack: Attack) -> None:
        self._target = port
        self._attack = attack
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def __enter__(self) -> Between:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for pair in self.pairs:
            for sock in pair:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for pair in self.pairs:
            for sock in pair:
                sock.close()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            number = len(self.pairs)
            self.pairs.append((near, far))
            for way, source, sink, quiet in (("up", near, far, _UP), ("down", far, near, _DOWN)):
                thread = threading.Thread(target=self._pass_on, args=(number, way, source, sink, quiet))
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, number: int, way: str, source: socket.socket, sink: socket.socket, quiet: int) -> None:
        with suppress(OSError):
            while data := source.recv(min(quiet, 1 << 16) if quiet else 1 << 16):
                if quiet:
                    quiet -= len(data)
                else:
                    data = self._attack(number, way, data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@dataclass
class Pair:
    """Two ranks with a machine between them: `mine` is rank 0's end, `theirs` rank 1's."""

    meshes: tuple[Mesh, Mesh]
    bulks: tuple[BulkConnections, BulkConnections]


BOTH = Mac.SHA256 | Mac.GMAC
OFFERS = {"gmac": (BOTH, BOTH), "sha256": (Mac.SHA256, Mac.SHA256), "without": (BOTH, Mac.SHA256)}
by_every_kind = pytest.mark.parametrize("offers", OFFERS.values(), ids=OFFERS.keys())


@contextmanager
def apart(attack: Attack, offers: tuple[Mac, Mac] = OFFERS["gmac"]) -> Iterator[Pair]:
    macs = dict(enumerate(offers))
    with (
        forming(0, {1: ("", 0)}, macs) as first,
        Between(first.port, attack) as between,
        forming(1, {0: ("127.0.0.1", between.port)}, macs) as second,
    ):
        first.thread.join()
        second.thread.join()
        assert not first.errors + second.errors
        names = {0: "process 0", 1: "process 1"}
        meshes = (
            Mesh(0, {1: first.connected[1].control}, names),
            Mesh(1, {0: second.connected[0].control}, names),
        )
        bulks = (
            BulkConnections({1: first.connected[1].bulk}, meshes[0].notify),
            BulkConnections({0: second.connected[0].bulk}, meshes[1].notify),
        )
        try:
            yield Pair(meshes, bulks)
        finally:
            for mesh in meshes:
                closing = threading.Thread(target=mesh.close)
                closing.start()
                closing.join()
            for bulk in bulks:
                bulk.close()


def unchanged(number: int, way: str, data: bytes) -> bytes:
    return data


def flipped(stream: MeshStream, offset: int) -> Attack:
    """One bit of what rank 1 sends on `stream`, at `offset` after the handshake, is another."""
    seen = [0, 0]

    def attack(number: int, way: str, data: bytes) -> bytes:
        if way == "up":
            start, seen[number] = seen[number], seen[number] + len(data)
            if number == stream and start <= offset < seen[number]:
                changed = bytearray(data)
                changed[offset - start] ^= 4
                return bytes(changed)
        return data

    return attack
