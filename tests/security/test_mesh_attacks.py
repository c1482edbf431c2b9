"""Strangers at the ports of ranks while a group forms and while it works, and a machine between two ranks."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.comm.transport.ranks import run_contexts, values
from tests.security.strangers import KnockedAt, calling, dropped, knocking
from tests.waiting import wait_for

from paceline.comm.calls import RankState
from paceline.comm.context import DistributedContext
from paceline.comm.transport.bulk import Bulk, Ticket
from paceline.comm.transport.handshake import _CONTEXT, _PROTOCOL, Connected, Stream, connect_all
from paceline.comm.transport.link import Kind
from paceline.comm.transport.mesh import Mesh
from paceline.core.errors import RendezvousError
from paceline.core.handshake import Connector
from paceline.core.listening import Listening

SECRET = b"s" * 32
PATIENCE = 120.0
_UP = _PROTOCOL.answer_bytes
_DOWN = 9 + 32 + 32


@dataclass
class Forming:
    """One rank's part in connecting, in a thread."""

    port: int
    connected: dict[int, Connected] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    thread: threading.Thread = field(default_factory=threading.Thread)


@contextmanager
def forming(rank: int, endpoints: dict[int, tuple[str, int]]) -> Iterator[Forming]:
    listener = Listening().open("127.0.0.1")
    found = Forming(listener.getsockname()[1])

    def run() -> None:
        try:
            deadline = time.monotonic() + PATIENCE
            found.connected.update(connect_all(rank, listener, endpoints, SECRET, deadline))
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


def join(port: int, rank: int = 1) -> None:
    """An honest rank connects to rank 0."""
    with forming(rank, {0: ("127.0.0.1", port)}) as member:
        member.thread.join()
    assert not member.errors, member.errors
    assert set(member.connected) == {0}


def test_knocking_does_not_put_the_deadline_off() -> None:
    with KnockedAt() as listener:
        with pytest.raises(RendezvousError, match="waits for rank 1 to connect"):
            connect_all(0, listener, {1: ("", 0)}, SECRET, time.monotonic() + 0.3)
        assert listener.knocks < KnockedAt.KNOCKS


def test_knocking_does_not_keep_it_from_being_called_off() -> None:
    def look() -> None:
        raise InterruptedError("called off")

    with KnockedAt() as listener:
        with pytest.raises(InterruptedError, match="called off"):
            connect_all(0, listener, {1: ("", 0)}, SECRET, time.monotonic() + PATIENCE, look)
        assert listener.knocks < KnockedAt.KNOCKS


def test_a_member_gets_in_while_strangers_knock() -> None:
    with forming(0, {1: ("", 0)}) as acceptor, knocking(acceptor.port, b"GET / HTTP/1.1\r\n\r\n"):
        join(acceptor.port)
        acceptor.thread.join()
    assert not acceptor.errors


@pytest.mark.parametrize("said", [b"", b"PLmesh2\0", b"PLmesh1\0" + bytes(24)], ids=["silent", "slow", "old"])
def test_300_strangers_who_stay_do_not_keep_a_member_out(said: bytes) -> None:
    with forming(0, {1: ("", 0)}) as acceptor, ExitStack() as stack:
        strangers = [stack.enter_context(calling(acceptor.port, said)) for _ in range(300)]
        # The first ones made room for the last ones while rank 1 was not there.
        assert all(dropped(one) for one in strangers[:100])
        join(acceptor.port)
        acceptor.thread.join()
        assert not acceptor.errors


def test_a_stranger_cannot_take_a_ranks_place() -> None:
    with forming(0, {1: ("", 0)}) as acceptor:
        for stream in Stream:
            connector = Connector(_PROTOCOL, b"x" * 32, _CONTEXT.pack(1, 0, stream))
            with calling(acceptor.port) as stranger:
                answer = b""
                while not answer:
                    answer = connector.feed(stranger.recv(connector.wanted))
                stranger.sendall(answer)
                assert dropped(stranger)
        join(acceptor.port)
        acceptor.thread.join()
    assert not acceptor.errors


# a group that works


def ports_of_this_process() -> list[int]:
    """Where this process listens."""
    mine = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            mine.add(os.readlink(entry))
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                    found.append(int(fields[1].rpartition(":")[2], 16))
    return found


def besieged(ctx: DistributedContext) -> tuple[list[int], float]:
    """A large sum, strangers at every port that is open, and the sum again with few descriptors left."""
    data = torch.ones(200_000)
    ctx.all_reduce(data, algorithm="ring")
    ports = ctx.all_gather(ports_of_this_process())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, hard))
    ctx.barrier()
    with ExitStack() as stack:
        for _ in range(50):
            for port in ports[1 - ctx.rank]:
                with suppress(OSError):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        ctx.barrier()
        total = ctx.all_reduce(data, algorithm="ring")
        ctx.barrier()
    return [port for some in ports for port in some], float(total[7])


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_group_that_stands_listens_nowhere(hosts: int) -> None:
    backend = "gloo" if hosts == 1 else "auto"
    for ports, total in values(run_contexts(2, besieged, backend=backend, hosts=hosts)):
        assert ports == []
        assert total == 2.0


# a machine between two ranks


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
    bulks: tuple[Bulk, Bulk]


@contextmanager
def apart(attack: Attack) -> Iterator[Pair]:
    with (
        forming(0, {1: ("", 0)}) as first,
        Between(first.port, attack) as between,
        forming(1, {0: ("127.0.0.1", between.port)}) as second,
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
            Bulk({1: first.connected[1].bulk}, meshes[0].notify),
            Bulk({0: second.connected[0].bulk}, meshes[1].notify),
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


def flipped(stream: Stream, offset: int) -> Attack:
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


SIZE = 1_000_000


def transferred(pair: Pair, messages: int = 1) -> list[torch.Tensor | BaseException]:
    """Rank 1 sends messages of a million bytes to rank 0: what arrived, or the error."""
    found: list[torch.Tensor | BaseException] = []
    for number in range(messages):
        ticket = Ticket(SIZE, 1, 2, number)
        body, room = torch.full((SIZE,), number + 1, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
        transfer = pair.bulks[0].receive(room, 1, ticket)
        pair.bulks[1].send(body, 0, ticket)
        wait_for(partial(getattr, transfer, "done"), "the transfer did not end")
        found.append(room if transfer.error is None else transfer.error)
    return found


def test_an_honest_relay_is_not_noticed() -> None:
    with apart(unchanged) as pair:
        found = transferred(pair, 3)
        assert [float(one.float().mean()) for one in found if isinstance(one, torch.Tensor)] == [1, 2, 3]
        pair.meshes[1].send(0, Kind.MESSAGE, [memoryview(b"hello")], sequence=3)
        wait_for(lambda: pair.meshes[0].next_message(1, 3))


@pytest.mark.parametrize("offset", [3, 40, 50, 300_000, SIZE])
def test_bulk_data_that_was_changed_on_the_way_is_never_taken(offset: int) -> None:
    with apart(flipped(Stream.BULK, offset)) as pair:
        (found,) = transferred(pair)
        assert isinstance(found, Exception)
        assert "tag of this session" in str(found)


def test_bulk_data_that_is_repeated_is_never_taken() -> None:
    first: list[bytes] = []

    def attack(number: int, way: str, data: bytes) -> bytes:
        if number == Stream.BULK and way == "up":
            first.append(data)
            # After the whole first message it comes again, instead of the second.
            if sum(map(len, first)) > SIZE + 1000:
                return b"".join(first)[: len(data)]
        return data

    with apart(attack) as pair:
        found = transferred(pair, 2)
        assert isinstance(found[0], torch.Tensor)
        assert isinstance(found[1], Exception)


@pytest.mark.parametrize("offset", [2, 36, 52, 70])
def test_a_frame_of_the_mesh_that_was_changed_ends_the_connection(offset: int) -> None:
    with apart(flipped(Stream.CONTROL, offset)) as pair:
        pair.meshes[1].send(0, Kind.MESSAGE, [memoryview(b"pay 10 euros to me")], sequence=3)
        wait_for(lambda: pair.meshes[0].peers()[1].state is RankState.DEAD)
        assert "tag of this session" in pair.meshes[0].peers()[1].reason
        assert pair.meshes[0].next_message(1, 3) is None


def test_a_frame_of_the_mesh_that_is_repeated_ends_the_connection() -> None:
    def attack(number: int, way: str, data: bytes) -> bytes:
        return data * 2 if number == Stream.CONTROL and way == "up" else data

    with apart(attack) as pair:
        pair.meshes[1].send(0, Kind.MESSAGE, [memoryview(b"pay 10 euros to me")], sequence=3)
        wait_for(lambda: pair.meshes[0].peers()[1].state is RankState.DEAD)
        assert "tag of this session" in pair.meshes[0].peers()[1].reason


def test_what_a_rank_said_is_not_taken_when_it_is_sent_back_to_it() -> None:
    with apart(unchanged) as pair:
        own: list[bytes] = []
        link = pair.meshes[0]._links[1]
        header = link._sealer  # what rank 0 would send next, reflected to rank 0
        own.append(bytes(32) + header.tag(bytes(32)))
        other = pair.meshes[1]._links[0]
        other.sock.setblocking(True)
        other.sock.sendall(own[0])
        wait_for(lambda: pair.meshes[0].peers()[1].state is RankState.DEAD)
