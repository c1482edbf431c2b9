"""The first message of a connection decides what it is; a refused peer hears why; silence has an end."""

from __future__ import annotations

import dataclasses

import pytest
from tests.elastic.supervisor.shell_parts import Parts, Peer, hello

from paceline.control.messages import (
    AgentEnd,
    AgentHello,
    ControlMessage,
    Dismissed,
    MemberHello,
    Stop,
    ToolReply,
    ToolRequest,
)
from paceline.core.errors import PacelineError
from paceline.core.version import PROTOCOL
from paceline.elastic.supervisor.connection import Connection, InvalidPeers
from paceline.elastic.supervisor.control_port import HELLO_SECONDS, PendingHellos, RefusedPeers

OFFER = AgentHello(workers=1, host="g", hostname="far", pid=9)


class Door:
    """Handshakes, and what they were handed on to."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.accepted: list[ControlMessage] = []
        self.reported: list[PacelineError] = []
        self.refused = RefusedPeers(parts.clock)
        self.handshakes = PendingHellos(
            parts.clock, self.refused, self.accept, self.accept, self.answer, self.reported.append
        )

    def accept(self, connection: Connection, message: ControlMessage) -> None:
        self.accepted.append(message)

    def answer(self, request: ToolRequest) -> ToolReply:
        self.accepted.append(request)
        return ToolReply(done=True, text="done")

    def connect(self, host: str = "10.0.0.1") -> Peer:
        connection, peer = self.parts.connect(self.handshakes, host)
        self.handshakes.add(connection)
        return peer

    def pass_time(self, seconds: float) -> None:
        self.parts.clock.advance(seconds)
        for owner in (self.handshakes, self.refused):
            if owner.due <= self.parts.clock.now():
                owner.tick(self.parts.clock.now())


@pytest.fixture
def door(parts: Parts):
    made = Door(parts)
    yield made
    made.handshakes.close()
    made.refused.close()


@pytest.mark.parametrize("first", [hello(7, 2), OFFER])
def test_the_first_message_ends_the_handshake(door: Door, first: ControlMessage):
    peer = door.connect()
    peer.send(first)
    door.parts.deliver()
    assert door.accepted == [first]
    door.pass_time(HELLO_SECONDS + 1)
    assert not peer.is_cut


def test_a_tool_may_ask_again_and_again_until_its_time_is_over(door: Door):
    peer = door.connect()
    for _ in range(3):
        peer.send(ToolRequest(what="status"))
    door.parts.deliver()
    assert len(door.accepted) == 3
    door.pass_time(HELLO_SECONDS + 0.1)
    assert peer.is_cut


def test_a_silent_peer_is_closed_after_its_own_time(door: Door):
    first = door.connect()
    door.pass_time(3.0)
    second = door.connect()
    door.pass_time(HELLO_SECONDS - 2.9)
    assert first.is_cut
    assert not second.is_cut
    second.channel.close()
    door.parts.deliver()
    assert door.handshakes.due == float("inf")


def test_anything_else_first_ends_the_connection(door: Door):
    peer = door.connect()
    peer.send(Stop(reason="now"))
    door.parts.deliver()
    assert peer.is_cut
    assert not door.accepted


@pytest.mark.parametrize(
    ("first", "reply"), [(hello(7, 2), Dismissed), (OFFER, AgentEnd), (ToolRequest(what="status"), ToolReply)]
)
def test_another_version_hears_so_in_words_that_it_knows(
    door: Door, first: MemberHello | AgentHello | ToolRequest, reply: type
):
    peers = [door.connect(), door.connect(), door.connect("10.0.0.2")]
    for peer in peers:
        peer.send(dataclasses.replace(first, protocol=PROTOCOL + 1))
    door.parts.deliver()
    for peer in peers:
        (refusal,) = peer.received()
        assert type(refusal) is reply
        assert not peer.is_cut
    # Each host once: a peer that is refused tries again and again.
    assert [error.message.split(":")[0] for error in door.reported] == ["10.0.0.1", "10.0.0.2"]
    assert not door.accepted
    peers[0].send(Stop(reason="ignored"))
    door.parts.deliver()
    door.pass_time(HELLO_SECONDS + 0.1)
    assert all(peer.is_cut for peer in peers)


def test_a_refused_peer_that_leaves_is_forgotten(door: Door):
    connection, peer = door.parts.connect(door.handshakes)
    door.refused.refuse(connection, Dismissed(reason="no"))
    assert peer.received() == [Dismissed(reason="no")]
    peer.channel.close()
    door.parts.deliver()
    assert door.refused.due == float("inf")
    assert not connection.is_open


def test_invalid_peers_are_counted_and_reported_once_a_second(parts: Parts):
    reported: list[PacelineError] = []
    invalid = InvalidPeers(parts.clock, reported.append)
    for _ in range(10):
        invalid.add("10.0.0.9", "nonsense " * 200)
    parts.clock.advance(1.5)
    invalid.add("10.0.0.9", "nonsense")
    assert invalid.dropped == 11
    assert len(reported) == 2
    assert len(reported[0].message) < 700
    assert "(11 in all)" in reported[1].message
