"""The store in which ranks meet: its operations, strangers, and its end."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest

from paceline.comm.rendezvous.key_value_store import StoreClient, StoreServer
from paceline.comm.transport.tcp.framed_socket import FrameKind
from paceline.core.errors import WireError


@pytest.fixture
def server() -> Iterator[tuple[StoreServer, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = StoreServer(listener)
    yield store, port
    store.close()


@pytest.fixture
def client(server: tuple[StoreServer, int]) -> Iterator[StoreClient]:
    found = StoreClient("127.0.0.1", server[1], 5.0)
    yield found
    found.close()


def test_values(client: StoreClient) -> None:
    assert client.get("a") is None
    assert not client.check(["a"])
    client.set("a", b"\0\xff")
    client.set("b", "text")
    assert client.check(["a", "b"])
    assert not client.check(["a", "c"])
    assert client.multi_get(["a", "c", "b"]) == [b"\0\xff", None, b"text"]


def test_counters_count_for_all_clients(server: tuple[StoreServer, int], client: StoreClient) -> None:
    other = StoreClient("127.0.0.1", server[1], 5.0)
    assert [client.add("n", 1), other.add("n", 1), client.add("n", 5)] == [1, 2, 7]
    other.close()


def test_a_key_that_the_end_of_a_connection_sets(
    server: tuple[StoreServer, int], client: StoreClient
) -> None:
    other = StoreClient("127.0.0.1", server[1], 5.0)
    other.set_at_end("gone")
    assert client.get("gone") is None
    other.close()
    assert client.await_keys(["gone"], 5.0)


def test_a_large_value(client: StoreClient) -> None:
    client.set("big", b"x" * 900_000)
    assert client.get("big") == b"x" * 900_000


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\nHost: here, and some more to fill a header\r\n\r\n",
        struct.pack("<QqQBxxxI", 1 << 40, 0, 0, FrameKind.MESSAGE, 0),
        struct.pack("<QqQBxxxI", 4, 0, 0, FrameKind.MESSAGE, 0) + b"abcd",
        b"",
    ],
)
def test_strangers_disturb_no_rank(
    server: tuple[StoreServer, int], client: StoreClient, nonsense: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server[1]), timeout=5) as stranger:
        stranger.sendall(nonsense)
        if nonsense:
            # Closed, or reset where some of it was not read.
            with suppress(ConnectionResetError):
                while stranger.recv(100):
                    pass  # the challenge, which says nothing
    client.set("still", "there")
    assert client.get("still") == b"there"


def test_the_end_of_the_server(server: tuple[StoreServer, int], client: StoreClient) -> None:
    server[0].close()
    server[0].close()
    with pytest.raises(OSError, match="closed"):
        client.get("a")
    with pytest.raises(ConnectionRefusedError):
        StoreClient("127.0.0.1", server[1], 1.0)


def test_another_program_at_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(WireError, match="no answer"):
        StoreClient("127.0.0.1", silent.getsockname()[1], 0.2)
