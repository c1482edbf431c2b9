"""Strangers at a listening socket: few, for a short time, and none of them in the way of a member."""

from __future__ import annotations

import resource
import selectors
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.security.strangers import dropped

from paceline.core.authenticated_listener import (
    HANDSHAKE_SECONDS,
    MAX_UNAUTHENTICATED,
    AuthenticatedListener,
    AuthenticatedSocket,
)
from paceline.core.errors import PacelineError, ResourceError
from paceline.core.handshake import CONTROL, Connector, VersionError

SECRET = b"s" * 32


class Port:
    """An entrance whose loop the test turns, with the test's clock."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.selector = selectors.DefaultSelector()
        self.came: list[AuthenticatedSocket] = []
        self.complaints: list[PacelineError] = []
        self.trouble: Exception | None = None
        self.entrance = AuthenticatedListener(
            self.listener, CONTROL, SECRET, self.selector, self._let_in, on_problem=self.complaints.append
        )
        self.now = 100.0
        self.clients: list[socket.socket] = []

    def _let_in(self, context: bytes, proven: AuthenticatedSocket) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.came.append(proven)

    def call(self, host: str = "127.0.0.1") -> socket.socket:
        client = socket.create_connection(self.listener.getsockname(), timeout=10, source_address=(host, 0))
        self.clients.append(client)
        return client

    def turn(self, after: float = 0.0) -> None:
        """Do all that there is to do now."""
        self.now += after
        if self.now >= self.entrance.due:
            self.entrance.tick(self.now)
        while ready := self.selector.select(0):
            for key, mask in ready:
                key.data(mask, self.now)
            if self.entrance.due <= self.now:
                break

    def close(self) -> None:
        self.entrance.close()
        self.selector.close()
        for sock in [self.listener, *self.clients, *(proven.sock for proven in self.came)]:
            sock.close()


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    made.close()


def finish(client: socket.socket, port: Port, connector: Connector) -> None:
    """The rest of a handshake whose challenge waits to be read."""

    def send(data: bytes) -> None:
        client.sendall(data)
        while not client_has(client):
            port.turn()

    connector.run(client.recv, send)


def client_has(client: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ)
        return bool(selector.select(0.01))


def test_a_connector_that_proves_itself_is_let_in_with_the_keys_of_its_session(port: Port) -> None:
    client = port.call()
    port.turn()
    connector = Connector(CONTROL, SECRET)
    finish(client, port, connector)
    (proven,) = port.came
    assert proven.host == "127.0.0.1"
    proven.session.incoming.check(connector.session_keys().outgoing.tag(b"up"), b"up")
    assert (port.entrance.refused, port.entrance.due) == (0, float("inf"))


def test_a_flood_from_one_host_does_not_push_out_a_member_of_another(port: Port) -> None:
    member = port.call("127.0.0.2")
    port.turn()
    flood = [port.call() for _ in range(2 * MAX_UNAUTHENTICATED)]
    port.turn()
    assert port.entrance.refused == MAX_UNAUTHENTICATED + 1
    assert all(dropped(one) for one in flood[:MAX_UNAUTHENTICATED])
    finish(member, port, Connector(CONTROL, SECRET))
    assert [proven.host for proven in port.came] == ["127.0.0.2"]


def test_an_answer_that_is_here_is_read_before_its_place_is_taken(port: Port) -> None:
    client = port.call()
    port.turn()
    connector = Connector(CONTROL, SECRET)
    client.sendall(connector.feed(client.recv(connector.wanted)))
    for _ in range(MAX_UNAUTHENTICATED):
        port.call()
    # The flood is handled first, in one turn with the answer: the listener was ready before.
    (key,) = [key for key in port.selector.get_map().values() if key.fileobj is port.listener]
    for _ in range(2 + MAX_UNAUTHENTICATED // 64):
        key.data(selectors.EVENT_READ, port.now)
    assert len(port.came) == 1


def test_strangers_have_three_seconds_by_the_owners_clock(port: Port) -> None:
    silent, slow = port.call(), port.call()
    port.turn()
    slow.sendall(CONTROL.magic)
    port.turn(HANDSHAKE_SECONDS - 0.1)
    assert port.entrance.refused == 0
    assert port.entrance.due == 100.0 + HANDSHAKE_SECONDS
    port.turn(0.2)
    assert port.entrance.refused == 2
    assert dropped(silent)
    assert dropped(slow)


def test_another_version_is_told_once_for_each_host(port: Port) -> None:
    old = replace(CONTROL, number=CONTROL.number - 1)
    for host in ("127.0.0.1", "127.0.0.2", "127.0.0.1"):
        port.call(host).sendall(old.magic)
        port.turn()
        port.call(host).sendall(b"GET / HTTP/1.1\r\n")  # a stranger's mistake is nothing to tell
        port.turn()
    assert port.entrance.refused == 6
    assert [type(one) for one in port.complaints] == [VersionError] * 2
    both = f"control protocol {old.number}, this end speaks {CONTROL.number}"
    assert port.complaints[1].message == f"a connection from 127.0.0.2 was refused: it speaks {both}"
    assert "one version" in port.complaints[1].remedy


def test_an_owner_that_cannot_take_a_member_loses_that_member_only(port: Port) -> None:
    port.trouble = RuntimeError("no room")
    client = port.call()
    port.turn()
    connector = Connector(CONTROL, SECRET)
    finish(client, port, connector)
    assert dropped(client)
    port.trouble = None
    other = port.call()
    port.turn()
    finish(other, port, Connector(CONTROL, SECRET))
    assert len(port.came) == 1


def test_no_descriptor_left_is_a_pause_that_is_told_once_in_a_minute(port: Port) -> None:
    waiting = port.call()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name.name) for name in Path("/proc/self/fd").iterdir()) + 1
    for complaints, after in ((1, 0.0), (1, 1.0), (2, 60.0)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        try:
            filled = _fill()
            port.turn(after)
            assert port.entrance.due == port.now + 0.1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for one in filled:
                one.close()
        assert len(port.complaints) == complaints
    assert isinstance(port.complaints[0], ResourceError)
    assert "ulimit -n" in port.complaints[0].remedy
    port.turn(0.2)
    finish(waiting, port, Connector(CONTROL, SECRET))


def _fill() -> list[socket.socket]:
    filled = []
    try:
        while True:
            filled.append(socket.socket())
    except OSError:
        return filled


def test_a_listener_that_fails_is_asked_again_after_a_pause_and_not_at_once(port: Port) -> None:
    # Readable for ever, and accept fails with EINVAL.
    port.listener.shutdown(socket.SHUT_RD)
    port.turn()
    assert port.entrance.due == port.now + 0.1
    assert not port.selector.select(0)
    port.turn(0.2)
    assert port.entrance.due == port.now + 0.1
    assert not port.complaints


def test_the_listener_is_its_owners_after_the_end(port: Port) -> None:
    client = port.call()
    port.turn()
    port.entrance.close()
    assert dropped(client)
    late = port.call()
    port.entrance = AuthenticatedListener(port.listener, CONTROL, SECRET, port.selector, port._let_in)
    port.turn()
    thread = threading.Thread(target=Connector(CONTROL, SECRET).run, args=(late.recv, late.sendall))
    thread.start()
    while not port.came:
        port.turn()
    thread.join()
