"""Journal lines and receipts: few messages, in the order of what happened, whichever thread sends them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paceline.comm.context import DistributedContext
from paceline.control.messages import ControlMessage, JournalLines, StepReceipt
from paceline.core import events
from paceline.train.member.outbox import Outbox
from paceline.train.team import Team


class SlowClient:
    """The first message stands at a gate when it is about to be sent."""

    def __init__(self, *, open: bool = True) -> None:
        self.arrived, self.gate = threading.Event(), threading.Event()
        self.sent: list[Any] = []
        if open:
            self.gate.set()

    def send(self, message: ControlMessage) -> None:
        if not self.arrived.is_set():
            self.arrived.set()
            assert self.gate.wait(60)
        self.sent.append(message)


@contextmanager
def outbox(client: SlowClient) -> Iterator[tuple[Outbox, Team]]:
    with DistributedContext(1, 0) as context:
        team = Team(context, 1)
        team.install(context, None, 1)
        yield Outbox(client, team), team


def committed(number: int, digest: str | None = None) -> events.StepCommitted:
    return events.StepCommitted(time=0.0, step=number, epoch=0, loss=1.0, samples=1, hash=digest)


def steps_in(messages: list[StepReceipt | JournalLines]) -> list[int]:
    found: list[int] = []
    for message in messages:
        if isinstance(message, StepReceipt):
            found += range(message.first, message.last + 1)
        else:
            found += [events.from_json(line).step for line in message.lines]  # type: ignore[attr-defined]
    return found


def receipt(box: Outbox, number: int) -> None:
    box.committed(committed(number), (0,), {})


def line(box: Outbox, number: int) -> None:
    box.tell(committed(number))


@pytest.mark.parametrize("add", [receipt, line])
def test_two_threads_that_send_keep_the_order(add: Callable[[Outbox, int], None]):
    client = SlowClient(open=False)
    with outbox(client) as (box, _):

        def goes_on() -> None:
            add(box, 2)
            box.flush()

        def begins() -> None:
            add(box, 1)
            box.flush()

        heartbeat, main = threading.Thread(target=begins), threading.Thread(target=goes_on)
        heartbeat.start()
        assert client.arrived.wait(60)
        main.start()
        main.join(0.2)  # it would be through by now if it could overtake
        client.gate.set()
        heartbeat.join(60)
        main.join(60)
    assert steps_in(client.sent) == [1, 2]


def test_steps_that_follow_each_other_quickly_are_sent_together():
    client = SlowClient()
    with outbox(client) as (box, _):
        box.tell(committed(1))
        box.tell(committed(2))
        assert len(client.sent) == 1
        box.tell(events.Note(time=0.0, text="not a step"))
        box.flush()
    assert [len(message.lines) for message in client.sent] == [1, 2]


def test_very_many_events_are_several_messages():
    """Each has to fit into a frame."""
    client = SlowClient()
    with outbox(client) as (box, _):
        for number in range(1, 1001):
            box.tell(committed(number))
        box.flush()
    assert steps_in(client.sent) == list(range(1, 1001))
    assert max(len(message.lines) for message in client.sent) <= 256


def test_steps_in_a_row_with_the_same_shards_are_one_receipt():
    client = SlowClient()
    with outbox(client) as (box, team):
        for number in (1, 2, 3):
            box.committed(committed(number), (0, 1), {})
        box.committed(committed(4), (0,), {})
        team.generation = 2
        box.committed(committed(5), (0,), {})
        box.send_receipts()
        box.send_receipts()
    assert [(one.generation, one.first, one.last, one.shards) for one in client.sent] == [
        (1, 1, 3, (0, 1)),
        (1, 4, 4, (0,)),
        (2, 5, 5, (0,)),
    ]


def test_a_gap_begins_another_receipt():
    client = SlowClient()
    with outbox(client) as (box, _):
        box.committed(committed(1), (0,), {})
        box.committed(committed(7), (0,), {})
        box.flush()
    assert [(one.first, one.last) for one in client.sent] == [(1, 1), (7, 7)]


def test_hashes_of_audited_steps_go_along():
    client = SlowClient()
    with outbox(client) as (box, _):
        box.committed(committed(1), (0, 2), {})
        box.committed(committed(2, "abc"), (0, 2), {0: "x", 2: "y"})
        box.flush()
    (one,) = client.sent
    assert one.hashes == {"2": "abc"}
    assert one.shard_hashes == ((2, 0, "x"), (2, 2, "y"))
