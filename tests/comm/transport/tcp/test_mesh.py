"""The connections below torchdist: proof of the secret, frames, statuses, goodbyes."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256

import pytest
from tests.comm.transport.tcp.meshes import SECRET, meshes

from paceline.comm.call_status import RankState, Status
from paceline.comm.transport.base import HEADER_BYTES, ReceivedMessage
from paceline.comm.transport.tcp.framed_socket import INLINE_BYTES, FramedSocket, FrameKind
from paceline.comm.transport.tcp.mesh import Mesh
from paceline.comm.transport.tcp.mesh_handshake import PeerConnections, connect_all
from paceline.comm.transport.tcp.native_backend import _NoteStore
from paceline.core.authenticated_listener import AuthenticatedSocket
from paceline.core.errors import InternalError, RendezvousError, UsageError, WireError
from paceline.core.listen_address import ListenAddress
from paceline.core.session_auth import session_keys

listen = ListenAddress().open


def _soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def _eventually(condition: Callable[[], object], mesh: Mesh) -> None:
    end = _soon(5)
    while not condition():
        assert time.monotonic() < end, "it never happened"
        mesh.wait(mesh.version, 0.01)


def _message(mesh: Mesh, source: int, tag: int | None) -> ReceivedMessage:
    """The message from `source`, when it has arrived."""
    end = _soon(5)
    while (message := mesh.next_message(source, tag)) is None:
        assert time.monotonic() < end, "it never came"
        mesh.wait(mesh.version, 0.01)
    return message


def linked(left: socket.socket, right: socket.socket) -> tuple[FramedSocket, FramedSocket]:
    """The two ends of a connection whose handshake is done."""
    left.setblocking(False)
    right.setblocking(False)
    return (
        FramedSocket(AuthenticatedSocket(left, session_keys(SECRET, b"once", accepts=False))),
        FramedSocket(AuthenticatedSocket(right, session_keys(SECRET, b"once", accepts=True))),
    )


def tagged(link: FramedSocket, header: bytes, body: bytes = b"") -> bytes:
    """A frame of whatever content, with the tags of the link's session."""
    tags = link._outgoing_tags
    return header + tags.tag(header) + (body + tags.tag(sha256(body).digest()) if body else b"")


def test_frames_arrive_whole_and_in_order() -> None:
    with meshes(2) as (first, second):
        for number in range(50):
            first.send(
                1, FrameKind.DATA, [memoryview(bytes([number]) * number)], sequence=number, signature=7
            )
        frames: list = []
        _eventually(lambda: len(frames) == 50 or _collect(second, frames), second)
        assert [frame.sequence for frame in frames] == list(range(50))
        assert [bytes(frame.body) for frame in frames] == [bytes([number]) * number for number in range(50)]


def _collect(mesh: Mesh, frames: list) -> bool:
    while (frame := mesh.next_data(0)) is not None:
        frames.append(frame)
    return len(frames) == 50


def test_a_large_message_needs_no_reader_in_the_main_thread() -> None:
    with meshes(2) as (first, second):
        body = os.urandom(5_000_000)
        mark = first.send(1, FrameKind.MESSAGE, [memoryview(body)], sequence=4)
        _eventually(lambda: first.sent(1, mark), first)
        assert bytes(_message(second, 0, 4).body) == body


def test_settled_memory_may_change() -> None:
    left, right = socket.socketpair()
    with left, right:
        link, other = linked(left, right)
        body = bytearray(b"a" * 3_000_000)
        mark = link.put(FrameKind.MESSAGE, [memoryview(body)])
        assert link.waiting
        link.settle()
        body[:] = b"b" * len(body)
        frames: list = []
        end = _soon()
        while not frames and time.monotonic() < end:
            link.flush()
            frames += other.read()[0]
        assert link.sent_bytes == mark
        assert bytes(frames[0].body) == b"a" * 3_000_000


def test_statuses_are_seen_and_cleared() -> None:
    with meshes(3) as (first, second, third):
        status = Status("barrier()", "here:1", (1, 2), 5, 99)
        first.post("wait", status)
        _eventually(lambda: second.peers()[0].status == status, second)
        _eventually(lambda: third.peers()[0].status == status, third)
        assert first.peers()[0].status == status
        first.post("wait", None)
        _eventually(lambda: second.peers()[0].status is None, second)


def test_a_busy_rank_says_where_it_is() -> None:
    with meshes(2) as (first, second):
        assert second.peers()[0].status is None
        _eventually(lambda: second.peers()[0].reason, second)
        assert second.peers()[0].reason.startswith("at ")
        assert ".py:" in second.peers()[0].reason
        assert first.peers()[0].state is RankState.RUNNING


def test_goodbyes_failures_and_deaths_differ() -> None:
    with meshes(4) as (watcher, leaver, failer, dying):
        leaver.close()
        failer.close(ValueError("no beans"))
        dying._links[0].sock.shutdown(socket.SHUT_RDWR)
        _eventually(lambda: watcher.peers()[3].state is RankState.DEAD, watcher)
        peers = watcher.peers()
        assert [peers[rank].state for rank in (1, 2)] == [RankState.LEFT, RankState.FAILED]
        assert "no beans" in peers[2].reason
        assert "process 3" in peers[3].reason


def test_everything_sent_before_a_goodbye_arrives() -> None:
    with meshes(2) as (first, second):
        body = memoryview(bytes(20_000_000))
        first.send(1, FrameKind.MESSAGE, [body])
        first.close()
        assert second.next_message(0, 0) is not None
        assert second.peers()[0].state is RankState.LEFT


def test_a_closed_mesh_says_so() -> None:
    with meshes(2) as (first, _):
        first.close()
        with pytest.raises(UsageError, match="closed"):
            first.check_open()


def test_a_reading_thread_that_fails_logs_the_label_of_its_rank(caplog, monkeypatch) -> None:
    with meshes(2, labels=(4, 7)) as (_, second):

        def fail() -> None:
            raise OSError("no more descriptors")

        monkeypatch.setattr(second, "_turn", fail)
        os.eventfd_write(second._wake, 1)
        second._thread.join(5)
        with pytest.raises(InternalError, match="no more descriptors"):
            second.check_open()
    assert [record.getMessage() for record in caplog.records] == ["rank 7: the reading thread failed"]


def test_a_group_of_torch_that_does_not_come_up_names_labels() -> None:
    with meshes(3, labels=(4, 7, 9)) as (first, second, third):
        store = _NoteStore(first, _soon())
        second.close()
        third.close()
        with pytest.raises(TimeoutError, match=r"^address did not come: ranks 7\D+9 left$"):
            store.get("address")


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (struct.pack("<QqQBxxxI", 10, 0, 0, 77, 0), b""),
        (struct.pack("<QqQBxxxI", INLINE_BYTES + 1, 0, 0, FrameKind.DATA, 0), b""),
        (struct.pack("<QqQBxxxI", 3, 0, 0, FrameKind.STATUS, 0), b"{x}"),
        (struct.pack("<QqQBxxxI", 4, 0, 0, FrameKind.FAILURE, 0), b"1234"),
        (struct.pack("<QqQBxxxI", 200_000, 0, 0, FrameKind.STATUS, 0), b"[" * 200_000),  # a RecursionError
        (
            struct.pack("<QqQBxxxI", 1 << 40, 0, 0, FrameKind.MESSAGE, 0),
            b"",
        ),  # a MemoryError, on most machines
    ],
)
def test_garbage_ends_the_connection_and_nothing_else(header: bytes, body: bytes) -> None:
    with meshes(3) as (first, second, third):
        link = first._links[1]
        link.sock.setblocking(True)
        link.sock.sendall(tagged(link, header, body))
        if header == struct.pack("<QqQBxxxI", 1 << 40, 0, 0, FrameKind.MESSAGE, 0):
            # Where so much memory can be reserved, the receiver waits for the body. Where it cannot, the
            # receiver drops the link, and the sender's thread may have closed this socket already.
            with suppress(OSError):
                link.sock.shutdown(socket.SHUT_RDWR)
        _eventually(lambda: second.peers()[0].state is RankState.DEAD, second)
        assert "not a message of Paceline" in second.peers()[0].reason or len(body) == 0
        third.send(1, FrameKind.MESSAGE, [memoryview(b"still here")])
        assert bytes(_message(second, 2, None).body) == b"still here"


def test_a_frame_that_is_too_long_is_refused() -> None:
    left, right = socket.socketpair()
    with left, right:
        link, other = linked(left, right)
        left.sendall(tagged(link, struct.pack("<QqQBxxxI", 1 << 50, 0, 0, FrameKind.MESSAGE, 0)))
        with pytest.raises(WireError, match="at most"):
            other.read()


def test_a_frame_without_the_sessions_tag_is_refused() -> None:
    left, right = socket.socketpair()
    with left, right:
        _, other = linked(left, right)
        left.sendall(struct.pack("<QqQBxxxI", 0, 0, 0, FrameKind.BYE, 0) + bytes(16))
        with pytest.raises(WireError, match="tag of this session"):
            other.read()


# the handshake


@contextmanager
def _acceptor(peers: set[int]) -> Iterator[tuple[int, dict[int, PeerConnections], list[BaseException]]]:
    """Rank 0 waits for `peers`; its port, and, after the block, its connections and its error."""
    connected: dict[int, PeerConnections] = {}
    errors: list[BaseException] = []
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]

        def accept() -> None:
            try:
                connected.update(connect_all(0, listener, dict.fromkeys(peers, ("", 0)), SECRET, _soon(3)))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield port, connected, errors
        finally:
            thread.join()
            for pair in connected.values():
                pair.close()


def _join(rank: int, port: int, secret: bytes, seconds: float = 3) -> None:
    with listen("127.0.0.1") as listener:
        for pair in connect_all(rank, listener, {0: ("127.0.0.1", port)}, secret, _soon(seconds)).values():
            pair.close()


def test_who_does_not_know_the_secret_gets_nowhere() -> None:
    with _acceptor({1}) as (port, connected, errors):
        with pytest.raises(RendezvousError, match="did not take the connection"):
            _join(1, port, b"x" * 32, 0.5)
        assert not connected
        _join(1, port, SECRET)
    assert set(connected) == {1}
    assert not errors


def test_strangers_delay_no_rank() -> None:
    with _acceptor({1}) as (port, connected, _):
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * HEADER_BYTES)
        strangers[1].close()
        start = time.monotonic()
        _join(1, port, SECRET)
        assert time.monotonic() - start < 1.0
        for stranger in strangers:
            stranger.close()
    assert set(connected) == {1}


def test_a_rank_that_is_not_expected_is_refused() -> None:
    with _acceptor({1}) as (port, connected, _):
        with pytest.raises(RendezvousError, match="did not take the connection"):
            _join(2, port, SECRET, 0.5)
        _join(1, port, SECRET)
    assert set(connected) == {1}


def test_a_rank_that_never_comes_is_named() -> None:
    with (
        listen("127.0.0.1") as listener,
        pytest.raises(RendezvousError, match="waits for ranks 1 and 2 to connect"),
    ):
        connect_all(0, listener, {1: ("", 0), 2: ("", 0)}, SECRET, _soon(0.3))


def test_a_rank_that_cannot_be_reached_is_named() -> None:
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
    with (
        listen("127.0.0.1") as own,
        pytest.raises(RendezvousError, match=f"rank 1 cannot reach rank 0 at 127.0.0.1:{port}"),
    ):
        connect_all(1, own, {0: ("127.0.0.1", port)}, SECRET, _soon(2))
