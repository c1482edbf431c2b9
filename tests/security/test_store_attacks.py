"""Strangers at the store in which ranks meet, clients of it that send nonsense, and a machine on the path."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from hashlib import sha256
from pathlib import Path

import pytest
from tests.security.strangers import HUGE_ARRAY, INFINITE, calling, dropped, frame_of, knocking, message_of

from paceline.comm.rendezvous.key_value_store import StoreClient, StoreServer
from paceline.comm.transport.tcp.framed_socket import FrameKind
from paceline.core.authenticated_listener import HANDSHAKE_SECONDS, MAX_UNAUTHENTICATED
from paceline.core.errors import WireError
from paceline.core.handshake import STORE

SECRET = b"s" * 32


@pytest.fixture
def port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    found = listener.getsockname()[1]
    server = StoreServer(listener, SECRET)
    yield found
    server.close()


def client(port: int, secret: bytes = SECRET, seconds: float = 60.0) -> StoreClient:
    return StoreClient("127.0.0.1", port, seconds, secret=secret)


def serves(port: int) -> bool:
    found = client(port)
    try:
        return found.add("served", 1) > 0
    finally:
        found.close()


@pytest.mark.parametrize(
    "said",
    [
        INFINITE,
        HUGE_ARRAY,
        frame_of(message_of(b"\xdd\xff\xff\xff\xff")),  # a list of four billion things
        frame_of(message_of(b"\x91" * 5000)),  # lists in lists
        frame_of(b"\0" * (1 << 20)),
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"\0",
        STORE.magic + b"\x01" + bytes(64),
    ],
    ids=["infinite", "huge array", "long list", "deep", "large", "http", "zero", "no proof"],
)
def test_what_a_stranger_says_ends_the_stranger_and_nothing_else(port: int, said: bytes) -> None:
    with calling(port, said) as stranger:
        assert dropped(stranger)
        assert serves(port)
    assert serves(port)


def test_frames_that_wait_in_the_queue_when_the_store_begins() -> None:
    # Said before there is a server: a scanner leaves such frames at ports that a later view uses.
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener, ExitStack() as stack:
        port = listener.getsockname()[1]
        for _ in range(100):
            stack.enter_context(calling(port, INFINITE))
        server = StoreServer(listener.dup(), SECRET)
        try:
            assert serves(port)
        finally:
            server.close()


def test_strangers_are_few_and_for_a_short_time(port: int) -> None:
    before = _memory()
    with ExitStack() as stack:
        strangers = [stack.enter_context(calling(port, INFINITE[:8])) for _ in range(300)]
        strangers += [
            stack.enter_context(calling(port, frame_of(b"\0" * (1 << 20))[:32])) for _ in range(300)
        ]
        assert serves(port)
        assert _memory() - before < 64 << 20
        # They say nothing more and do not leave: the store ends it.
        assert all(dropped(one) for one in strangers)
    assert serves(port)


def test_the_newest_strangers_take_the_place_of_the_oldest(port: int) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(calling(port))
        for _ in range(MAX_UNAUTHENTICATED + 1):
            stack.enter_context(calling(port))
        assert dropped(first)
        assert serves(port)


def test_a_stranger_who_is_slow_is_dropped_in_time(port: int) -> None:
    with calling(port) as stranger:
        begun = time.monotonic()
        stop = threading.Event()

        def trickle() -> None:
            for byte in STORE.magic + b"\x01" + bytes(60):
                try:
                    stranger.sendall(bytes([byte]))
                except OSError:
                    return
                if stop.wait(0.2):
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        assert dropped(stranger)
        stop.set()
        thread.join()
        assert time.monotonic() - begun >= HANDSHAKE_SECONDS * 0.9
        assert serves(port)


def test_knocking_delays_no_rank(port: int) -> None:
    found = client(port)
    with knocking(port, INFINITE):
        for turn in range(50):
            found.set("key", b"%d" % turn)
            assert found.get("key") == b"%d" % turn
        assert serves(port)
    found.close()


def test_no_descriptor_left_is_a_pause_and_not_an_end(port: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = client(port)
    used = max(int(name.name) for name in Path("/proc/self/fd").iterdir()) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
    try:
        strangers: list[socket.socket] = []
        try:
            # These are descriptors of this process too: the server's accept finds none.
            while True:
                strangers.append(socket.create_connection(("127.0.0.1", port), timeout=5))
        except OSError:
            found.set("still", "there")
            assert found.get("still") == b"there"
        for one in strangers:
            one.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert serves(port)
    found.close()


# who has the secret and sends nonsense


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"[1]",
        b"[1,[]]",
        b'["1",["get",["a"]]]',
        b"[1e999,[]]",
        b'[1,["set","a","not base64!"]]',
        b'[1,["add","a",1e999]]',
        b'[1,["get",[{"a":1}]]]',
        b'[1,["await","abc","def"]]',
        b'[1,["explode"]]',
    ],
)
def test_nonsense_with_the_secret_ends_that_client_only(port: int, said: bytes) -> None:
    other, bad = client(port), client(port)
    bad._link.put(FrameKind.MESSAGE, [memoryview(said)])
    with pytest.raises(OSError, match="closed"):
        bad._ask(["has", ["a"]])
    bad.close()
    other.set("a", "1")
    assert other.get("a") == b"1"
    other.close()


def test_a_store_cannot_be_filled(port: int) -> None:
    found = client(port)
    with pytest.raises(OSError, match="closed"):
        found.set("k" * 2000, b"")
    found.close()
    found = client(port)
    with pytest.raises(OSError, match="closed"):
        found.set("k", bytes((1 << 20) + 1))
    found.close()
    assert serves(port)


def test_an_answer_cannot_be_made_endless(port: int) -> None:
    """One value of a megabyte, asked for 60,000 times in one question."""
    with closing(client(port)) as good, closing(client(port)) as greedy:
        good.set("a", b"x" * (1 << 20))
        with pytest.raises(OSError, match="closed"):
            greedy.multi_get(["a"] * 60_000)
        assert good.multi_get(["a", "a"]) == [b"x" * (1 << 20)] * 2


def test_a_client_with_another_secret_is_refused(port: int) -> None:
    with pytest.raises(WireError, match="no answer"):
        client(port, b"x" * 32)
    with pytest.raises(WireError, match="asks for a secret"):
        client(port, b"")
    assert serves(port)


# a machine on the path


def test_a_frame_that_was_changed_or_repeated_on_the_way_is_refused(port: int) -> None:
    for attack in ("change", "repeat", "own"):
        found = client(port)
        sealed = _recorded(found)
        found.set("key", "first")
        link = found._link
        frame = sealed[-1]
        if attack == "repeat":
            data = frame
        elif attack == "change":
            found_tag = bytearray(frame)
            found_tag[40] ^= 1
            data = bytes(found_tag)
        else:
            body = b'[9,["set","key","ZXZpbA=="]]'
            header = bytes(8)
            data = header + bytes(24) + bytes(16) + body + sha256(body).digest()[:16]
        link.sock.setblocking(True)
        link.sock.sendall(data)
        link.sock.setblocking(False)
        with pytest.raises(OSError, match="closed"):
            found.get("key")
        found.close()
        other = client(port)
        assert other.get("key") == b"first"
        other.close()


def _recorded(found: StoreClient) -> list[bytes]:
    """What this client sends from now on, frame by frame, as a machine on the path sees it."""
    frames: list[bytes] = []
    sock = found._link.sock

    class Recording:
        def sendmsg(self, pieces: list[memoryview]) -> int:
            frames.append(b"".join(pieces))
            return sock.sendmsg(pieces)

        def __getattr__(self, name: str) -> object:
            return getattr(sock, name)

    found._link.sock = Recording()  # type: ignore[assignment]
    return frames


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_links_do_not_share_keys(port: int) -> None:
    first, second = client(port), client(port)
    frames = _recorded(first)
    first.set("key", "first")
    link = second._link
    link.sock.setblocking(True)
    link.sock.sendall(frames[-1])
    link.sock.setblocking(False)
    with pytest.raises(OSError, match="closed"):
        second.get("key")
    first.close()
    second.close()
