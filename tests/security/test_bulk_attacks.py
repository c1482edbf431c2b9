"""Bulk data between two ranks: whatever a machine between them does to it is never taken, by every kind."""

from __future__ import annotations

import os
import sys
from functools import partial

import pytest
import torch
from tests.comm.transport.ranks import free_port, run_processes, values
from tests.security.between import BOTH, Attack, Pair, apart, by_every_kind, flipped, forming, unchanged
from tests.waiting import wait_for

from paceline.comm.context import DistributedContext
from paceline.comm.transport.tcp.bulk_transfer import CHUNK_BYTES, bulk_head
from paceline.comm.transport.tcp.framed_socket import FrameKind
from paceline.comm.transport.tcp.mesh_handshake import MeshStream
from paceline.core.errors import RendezvousError
from paceline.core.mac_algorithms import Mac, offered
from paceline.core.session_auth import TAG_BYTES

SIZE = 3 * CHUNK_BYTES - 1000
_HEAD = 32 + TAG_BYTES
_CHUNK = CHUNK_BYTES + TAG_BYTES


def transferred(pair: Pair, messages: int = 1) -> list[torch.Tensor | BaseException]:
    """Rank 1 sends messages of three chunks to rank 0: what arrived, or the error."""
    found: list[torch.Tensor | BaseException] = []
    for number in range(messages):
        head = bulk_head(SIZE, 1, 2, number)
        body, room = torch.full((SIZE,), number + 1, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
        transfer = pair.bulks[0].receive(room, 1, head)
        pair.bulks[1].send(body, 0, head)
        wait_for(partial(getattr, transfer, "done"), "the transfer did not end")
        found.append(room if transfer.error is None else transfer.error)
    return found


@by_every_kind
def test_an_honest_relay_is_not_noticed(offers: tuple[Mac, Mac]) -> None:
    with apart(unchanged, offers) as pair:
        found = transferred(pair, 3)
        assert [float(one.float().mean()) for one in found if isinstance(one, torch.Tensor)] == [1, 2, 3]
        pair.meshes[1].send(0, FrameKind.MESSAGE, [memoryview(b"hello")], sequence=3)
        wait_for(lambda: pair.meshes[0].next_message(1, 3))


@by_every_kind
@pytest.mark.parametrize(
    "offset",
    [3, 40, 50, _HEAD + CHUNK_BYTES + 3, _HEAD + _CHUNK + 5000, _HEAD + 2 * _CHUNK, SIZE + _HEAD],
    ids=["head", "its tag", "chunk", "its tag", "second chunk", "third chunk", "its end"],
)
def test_bulk_data_that_was_changed_on_the_way_is_never_taken(offset: int, offers: tuple[Mac, Mac]) -> None:
    with apart(flipped(MeshStream.BULK, offset), offers) as pair:
        (found,) = transferred(pair)
        assert isinstance(found, Exception)
        assert "tag of this session" in str(found)


def rearranged(order: tuple[int, ...]) -> Attack:
    """The chunks of the first bulk message, each with its tag, in another order, some twice or not at all."""
    got = bytearray()

    def attack(number: int, way: str, data: bytes) -> bytes:
        if number != MeshStream.BULK or way != "up":
            return data
        got.extend(data)
        if len(got) < SIZE + _HEAD + 3 * TAG_BYTES:
            return b""
        pieces = [bytes(got[_HEAD + place * _CHUNK :][:_CHUNK]) for place in range(3)]
        return bytes(got[:_HEAD]) + b"".join(pieces[place] for place in order)

    return attack


@by_every_kind
@pytest.mark.parametrize("order", [(1, 0, 2), (0, 0, 2), (1, 2), (0, 2, 1)], ids=str)
def test_chunks_that_are_reordered_repeated_or_left_out_are_never_taken(
    order: tuple[int, ...], offers: tuple[Mac, Mac]
) -> None:
    with apart(rearranged(order), offers) as pair:
        (found,) = transferred(pair)
        assert isinstance(found, Exception)
        assert "tag of this session" in str(found)


@by_every_kind
def test_a_message_that_is_cut_is_never_taken(offers: tuple[Mac, Mac]) -> None:
    """Two whole chunks come, then the connection ends."""

    def attack(number: int, way: str, data: bytes) -> bytes:
        if number == MeshStream.BULK and way == "up":
            start, seen[0] = seen[0], seen[0] + len(data)
            return data[: max(_HEAD + 2 * _CHUNK - start, 0)]
        return data

    seen = [0]
    with apart(attack, offers) as pair:
        head = bulk_head(SIZE, 1, 2, 0)
        room = torch.zeros(SIZE, dtype=torch.uint8)
        transfer = pair.bulks[0].receive(room, 1, head)
        pair.bulks[1].send(torch.ones(SIZE, dtype=torch.uint8), 0, head)
        wait_for(lambda: int(room[2 * CHUNK_BYTES - 1]) == 1)
        assert not transfer.done
        pair.bulks[1].close()
        wait_for(lambda: transfer.done)
        assert isinstance(transfer.error, ConnectionError)


@by_every_kind
def test_bulk_data_that_is_repeated_is_never_taken(offers: tuple[Mac, Mac]) -> None:
    first: list[bytes] = []

    def attack(number: int, way: str, data: bytes) -> bytes:
        if number == MeshStream.BULK and way == "up":
            first.append(data)
            # After the whole first message it comes again, instead of the second.
            if sum(map(len, first)) > SIZE + 1000:
                return b"".join(first)[: len(data)]
        return data

    with apart(attack, offers) as pair:
        found = transferred(pair, 2)
        assert isinstance(found[0], torch.Tensor)
        assert isinstance(found[1], Exception)


# how bulk data is authenticated is not for the path to choose


@pytest.mark.parametrize(
    ("told_first", "told_second"),
    [(Mac.SHA256, Mac.SHA256), (Mac.SHA256, BOTH), (BOTH, Mac.SHA256)],
    ids=["both", "acceptor", "connector"],
)
def test_who_changes_what_ranks_say_they_can_do_gets_no_other_kind(told_first: Mac, told_second: Mac) -> None:
    """Both ranks offer both kinds; what one or both were told of the other when they met was changed."""

    def look() -> None:
        if first.errors:
            raise InterruptedError("rank 0 says in the meeting that it failed")

    with (
        forming(0, {1: ("", 0)}, {0: BOTH, 1: told_first}) as first,
        forming(1, {0: ("127.0.0.1", first.port)}, {0: told_second, 1: BOTH}, look) as second,
    ):
        first.thread.join()
        second.thread.join()
        assert not first.connected
        assert not second.connected
        (error,) = first.errors
        assert isinstance(error, RendezvousError)
        assert "do not agree on how data between them is authenticated" in str(error)


def meeting_without(rank: int, world_size: int, address: str, without: tuple[int, ...]) -> list[float]:
    os.environ["PACELINE_HOST"] = f"host {rank}"
    if rank in without:
        for name in [*(name for name in sys.modules if name.startswith("cryptography")), "cryptography"]:
            sys.modules[name] = None  # type: ignore[assignment]  # as where it is not installed
    offered.cache_clear()
    assert (offered() == Mac.SHA256) == (rank in without)
    with DistributedContext(world_size, rank, address=address, timeout=60.0) as ctx:
        total = ctx.all_reduce(torch.arange(500_000, dtype=torch.float32) * (rank + 1), algorithm="ring")
        return [float(total[0]), float(total[499_999])]


@pytest.mark.parametrize("without", [(), (0,), (2,), (0, 1, 2)], ids=str)
def test_ranks_with_and_without_the_package_work_together(without: tuple[int, ...]) -> None:
    with free_port() as port:
        found = values(run_processes(3, meeting_without, f"127.0.0.1:{port}", without, timeout=120.0))
    assert found == [[0.0, 6 * 499_999.0]] * 3
