"""Strangers at the ports of ranks while a group forms and while it works, and a machine between two ranks."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.comm.transport.ranks import run_contexts, values
from tests.security.between import OFFERS, PATIENCE, SECRET, apart, flipped, forming, unchanged
from tests.security.strangers import KnockedAt, calling, dropped, knocking
from tests.waiting import wait_for

from paceline.comm.call_status import RankState
from paceline.comm.context import DistributedContext
from paceline.comm.transport.tcp.framed_socket import HEAD_BYTES, FrameKind
from paceline.comm.transport.tcp.mesh_handshake import ConnectionClaim, MeshStream, connect_all
from paceline.core.errors import RendezvousError
from paceline.core.handshake import MESH, Acceptor, Connector
from paceline.core.listen_address import ListenAddress
from paceline.core.mac_algorithms import offered


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


@pytest.mark.parametrize("said", [b"", MESH.magic, b"PLmesh2\0" + bytes(24)], ids=["silent", "slow", "old"])
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
        for stream in MeshStream:
            connector = Connector(
                MESH, b"x" * 32, ConnectionClaim(1, 0, stream, offered(), offered()).packed()
            )
            with calling(acceptor.port) as stranger:
                answer = b""
                while not answer:
                    answer = connector.feed(stranger.recv(connector.wanted))
                stranger.sendall(answer)
                assert dropped(stranger)
        join(acceptor.port)
        acceptor.thread.join()
    assert not acceptor.errors


def test_a_rank_of_another_version_is_refused_with_both_numbers() -> None:
    later = replace(MESH, number=MESH.number + 1)
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            caller, _ = other.accept()
            with caller:
                caller.sendall(Acceptor(later, SECRET).challenge)
                assert caller.recv(100) == Connector(MESH, SECRET, bytes(MESH.context_bytes)).head

        thread = threading.Thread(target=greet)
        thread.start()
        both = f"mesh protocol {later.number}, this end speaks {MESH.number}"
        with pytest.raises(RendezvousError, match=both), ListenAddress().open("127.0.0.1") as listener:
            connect_all(1, listener, {0: other.getsockname()}, SECRET, time.monotonic() + PATIENCE)
        thread.join()


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


# a machine between two ranks; what it does to bulk data is in test_bulk_attacks.py


@pytest.mark.parametrize(
    ("offset", "size", "kind"),
    [
        (2, 18, "gmac"),  # the head
        (36, 18, "gmac"),  # its tag
        (52, 18, "gmac"),  # the body
        (70, 18, "gmac"),  # its tag
        (52, 18, "sha256"),
        (HEAD_BYTES + 99_000, 100_000, "gmac"),
    ],
)
def test_a_frame_of_the_mesh_that_was_changed_ends_the_connection(offset: int, size: int, kind: str) -> None:
    with apart(flipped(MeshStream.CONTROL, offset), OFFERS[kind]) as pair:
        body = b"pay 10 euros to me".ljust(size)
        pair.meshes[1].send(0, FrameKind.MESSAGE, [memoryview(body[:5]), memoryview(body[5:])], sequence=3)
        wait_for(lambda: pair.meshes[0].peers()[1].state is RankState.DEAD)
        assert "tag of this session" in pair.meshes[0].peers()[1].reason
        assert pair.meshes[0].next_message(1, 3) is None


def test_a_frame_of_the_mesh_that_is_repeated_ends_the_connection() -> None:
    def attack(number: int, way: str, data: bytes) -> bytes:
        return data * 2 if number == MeshStream.CONTROL and way == "up" else data

    with apart(attack) as pair:
        pair.meshes[1].send(0, FrameKind.MESSAGE, [memoryview(b"pay 10 euros to me")], sequence=3)
        wait_for(lambda: pair.meshes[0].peers()[1].state is RankState.DEAD)
        assert "tag of this session" in pair.meshes[0].peers()[1].reason


def test_what_a_rank_said_is_not_taken_when_it_is_sent_back_to_it() -> None:
    with apart(unchanged) as pair:
        own: list[bytes] = []
        link = pair.meshes[0]._links[1]
        header = link._outgoing_tags  # what rank 0 would send next, reflected to rank 0
        own.append(bytes(32) + header.tag(bytes(32)))
        other = pair.meshes[1]._links[0]
        other.sock.setblocking(True)
        other.sock.sendall(own[0])
        wait_for(lambda: pair.meshes[0].peers()[1].state is RankState.DEAD)
