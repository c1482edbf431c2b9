"""Another version of Paceline at the control port: refused with both numbers, and ever more slowly."""

from __future__ import annotations

import struct
import threading
import time
from contextlib import closing
from typing import Any

import msgpack
import pytest
from tests.control.far_end import SECRET, FarEnd, hear
from tests.elastic.supervised_jobs import drop, running
from tests.waiting import wait_for

from paceline.control import message_codec, supervisor_address
from paceline.control.channel import Channel
from paceline.control.control_client import ControlClient
from paceline.control.message_codec import ForeignVersion
from paceline.control.messages import (
    AgentEnd,
    AgentHello,
    ControlMessage,
    Dismissed,
    Heartbeat,
    MemberHello,
    ToolReply,
    ToolRequest,
)
from paceline.core.errors import RendezvousError, WireError
from paceline.core.events import Note
from paceline.core.version import PROTOCOL, VERSION
from paceline.elastic.supervisor import tool_client
from paceline.elastic.supervisor.agent import Agent

HELLO = {"member": 1, "slot": 0, "pid": 1, "host": "h", "hostname": "n", "endpoint": ["", 0]}
OFFER: dict[str, Any] = {"workers": 1, "host": "h", "hostname": "n", "pid": 1}
LATER = {"protocol": PROTOCOL + 1, "version": "9.0.0", "a_field_of_the_future": {"more": 1}}


def say(channel: Channel, kind: str, fields: dict[str, Any]) -> None:
    """A frame as another version would write it."""
    body = msgpack.packb([0, kind, fields])
    channel.send_frame(struct.pack("<I", len(body)) + body)


@pytest.mark.parametrize(
    ("kind", "fields", "refusal"),
    [
        ("Hello", {**HELLO, **LATER}, Dismissed),
        ("Offer", {**OFFER, **LATER}, AgentEnd),
        ("Ask", {"what": "status", **LATER}, ToolReply),
        ("Offer", {**OFFER, "protocol": PROTOCOL, "version": "0.0.9"}, AgentEnd),
        ("Offer", OFFER, AgentEnd),
    ],
    ids=["worker", "machine", "tool", "another version", "before versions were told"],
)
def test_both_sides_read_both_numbers(tmp_path, kind, fields, refusal):
    with running(tmp_path, workers=1, steps=10**6) as run:
        run.until_step(3)
        secret = supervisor_address.read_secret(tmp_path)
        for _ in range(2):
            with closing(tool_client.open_channel(run.supervised.address, secret, None, 5.0)) as channel:
                say(channel, kind, fields)
                ((_, answer),) = hear(channel)
                assert isinstance(answer, refusal)
                text = answer.text if isinstance(answer, ToolReply) else answer.reason
                version = fields.get("version", "0.1.0 or earlier")
                assert f"Paceline {version} and speaks protocol {fields.get('protocol', 1)}" in text
                assert f"Paceline {VERSION} and speaks protocol {PROTOCOL}" in text
                assert getattr(answer, "code", 1) == 1
        run.until(lambda: run.of(Note))
        run.supervised.stop("seen")
        assert drop(run.finish()).ok
    (note,) = run.of(Note)  # once, however often it comes
    assert text in note.text


def test_a_tool_of_another_version_with_the_same_protocol_is_answered():
    plain = ["Ask", {"what": "status", "protocol": PROTOCOL, "version": "0.0.9"}]
    assert isinstance(message_codec.from_plain(plain), ToolRequest)


def test_of_this_version_an_unknown_field_is_damage():
    for message in (AgentHello(**OFFER), ToolRequest(what="status")):
        kind, fields = message_codec.to_plain(message)
        assert message_codec.from_plain([kind, fields]) == message
        with pytest.raises(WireError, match="'strange' is not known"):
            message_codec.from_plain([kind, {**fields, "strange": 1}])


@pytest.mark.parametrize("protocol", ["x", None, 3.5, [1]])
def test_nonsense_as_a_version_is_another_version(protocol):
    found = message_codec.from_plain(["Hello", {"protocol": protocol, "version": "\x1b[31m" * 99}])
    assert isinstance(found, ForeignVersion)
    assert found.text.isprintable()


class Dropping:
    """A supervisor that takes a connection, hears the first message, and closes it without a word."""

    def __init__(self, far: FarEnd) -> None:
        self.at: list[float] = []
        self._far = far
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            try:
                channel = self._far.accept()
            except OSError:
                return
            self.at.append(time.monotonic())
            hear(channel)
            channel.close()


def check_slower(dropping: Dropping, seconds: float) -> None:
    """The pauses between attempts grow: each is a good deal longer than the one two before it."""
    pauses = [after - before for before, after in zip(dropping.at, dropping.at[1:], strict=False)]
    assert len(pauses) >= 4
    assert pauses[3] > 1.5 * seconds


def test_an_agent_that_is_dropped_comes_back_ever_more_slowly_and_says_it_once():
    far = FarEnd()
    dropping = Dropping(far)
    said: list[str] = []
    agent = Agent(far.address, SECRET, 1, say=said.append)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(agent.run()))
    thread.start()
    wait_for(lambda: len(dropping.at) >= 5, "five attempts")
    agent.leave()
    thread.join()
    far.close()
    dropping.thread.join()
    check_slower(dropping, 0.2)
    assert len([text for text in said if "is cut" in text]) == 1
    assert not [text for text in said if "joined" in text or "is back" in text]


def test_a_worker_that_is_dropped_comes_back_ever_more_slowly():
    far = FarEnd()
    dropping = Dropping(far)

    class Unanswered:
        def hello(self) -> MemberHello:
            return MemberHello(member=1, slot=0, pid=1, host="h", hostname="n", endpoint=("", 0))

        def heartbeat(self) -> Heartbeat:
            return Heartbeat(phase="wait", seconds=0.0)

        def receive(self, message: ControlMessage) -> None:
            raise AssertionError(f"{message} was not sent")

        def supervisor_away(self) -> None:
            pass

    link = ControlClient(far.address, SECRET)

    def start() -> None:
        with pytest.raises(RendezvousError, match="seen enough"):
            link.start(Unanswered(), 600.0)

    starting = threading.Thread(target=start)
    starting.start()
    wait_for(lambda: len(dropping.at) >= 6, "six attempts")
    link.stop_reconnecting("seen enough")
    starting.join()
    far.close()
    dropping.thread.join()
    check_slower(dropping, 0.1)
