"""One connection in the loop: what its owner cannot handle ends it, and nothing else."""

from __future__ import annotations

import pytest
from tests.elastic.supervisor.shell_parts import Parts, Peer, heartbeat

from paceline.control.messages import ControlMessage, PayloadChunk, Stop
from paceline.core.errors import PlatformError, WireError
from paceline.elastic.supervisor.connection import Connection


class Owner:
    """Records what it gets; raises `error` for each message, if there is one."""

    def __init__(self) -> None:
        self.got: list[ControlMessage] = []
        self.lost: list[str] = []
        self.error: Exception | None = None

    def receive(self, connection: Connection, number: int, message: ControlMessage) -> None:
        self.got.append(message)
        if self.error is not None:
            raise self.error

    def disconnected(self, connection: Connection, reason: str) -> None:
        self.lost.append(reason)


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def invalid() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def ends(parts: Parts, owner: Owner, invalid: list[tuple[str, str]]):
    def report(host: str, what: str) -> None:
        invalid.append((host, what))

    connection, peer = parts.connect(owner, "10.0.0.1", report_invalid=report)
    yield connection, peer
    connection.close()


@pytest.mark.parametrize("error", [WireError("a strange value"), KeyError("step"), RecursionError()])
def test_a_message_that_cannot_be_handled_ends_its_connection(
    parts: Parts,
    owner: Owner,
    invalid: list[tuple[str, str]],
    ends: tuple[Connection, Peer],
    error: Exception,
):
    _, peer = ends
    owner.error = error
    peer.send(heartbeat(1))
    peer.send(heartbeat(2))
    parts.deliver()
    assert len(owner.got) == 1
    assert peer.is_cut
    ((host, what),) = invalid
    assert host == "10.0.0.1"
    assert "a Heartbeat message could not be handled" in what
    assert len(owner.lost) == 1


@pytest.mark.parametrize("error", [OSError("disk"), PlatformError("full")])
def test_what_a_message_cannot_have_caused_is_passed_on(
    parts: Parts, owner: Owner, ends: tuple[Connection, Peer], error: Exception
):
    owner.error = error
    ends[1].send(heartbeat(1))
    with pytest.raises(type(error)):
        parts.deliver()


def test_the_owner_hears_of_the_end_once_and_not_of_one_that_was_made_here(
    parts: Parts, owner: Owner, invalid: list[tuple[str, str]], ends: tuple[Connection, Peer]
):
    connection, peer = ends
    peer.channel.close()
    parts.deliver()
    connection.check()
    assert len(owner.lost) == 1
    assert not invalid
    other, _ = parts.connect(owner)
    other.close()
    other.close()
    other.send(Stop(reason="into the void"))
    assert len(owner.lost) == 1


def test_something_long_is_sent_in_chunks_as_there_is_room(parts: Parts, ends: tuple[Connection, Peer]):
    connection, peer = ends
    waiting = [PayloadChunk(offset=n, data=bytes(1 << 20)) for n in range(8)]
    received: list[ControlMessage] = []

    def refill() -> None:
        while waiting and not connection.channel.wants_write:
            connection.send(waiting.pop(0))
        if not waiting:
            connection.refill = None

    connection.refill = refill
    refill()
    assert waiting  # the socket's buffer is smaller than that
    while len(received) < 8:
        received += peer.received()
        for key, mask in parts.loop.selector.select(0):
            key.data(mask, parts.clock.now())
    assert [one.offset for one in received if isinstance(one, PayloadChunk)] == list(range(8))
    assert connection.refill is None


def test_what_the_machine_cannot_handle_ends_the_connection_too(
    owner: Owner, invalid: list[tuple[str, str]], ends: tuple[Connection, Peer]
):
    connection, _ = ends
    connection.reject("a report of no use")
    connection.check()
    assert owner.lost == ["a report of no use"]
    assert invalid == [("10.0.0.1", "a report of no use")]
