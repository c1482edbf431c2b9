"""What a member tells by two threads, the heartbeats' and its own, arrives in the order of what happened."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.train.test_receipts import step

from paceline.core import events
from paceline.core.control.messages import Receipt, Told
from paceline.train.receipts import Receipts
from paceline.train.telling import Telling


class SlowLink:
    """The first message stands at a gate when it is about to be sent."""

    def __init__(self) -> None:
        self.arrived, self.gate = threading.Event(), threading.Event()
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        if not self.arrived.is_set():
            self.arrived.set()
            assert self.gate.wait(60)
        self.sent.append(message)


def committed(number: int) -> events.StepCommitted:
    return events.StepCommitted(time=0.0, step=number, epoch=0, loss=1.0, samples=1)


def receipts_by() -> tuple[Callable[[int], object], Callable[[Any], None]]:
    kept = Receipts()
    return lambda number: kept.add(1, step(number), (0,), {}), kept.send


def events_by() -> tuple[Callable[[int], object], Callable[[Any], None]]:
    kept = Telling()
    return lambda number: kept.add(committed(number)), lambda link: kept.send(link, 1)


def steps_in(messages: list[Receipt | Told]) -> list[int]:
    found: list[int] = []
    for message in messages:
        if isinstance(message, Receipt):
            found += range(message.first, message.last + 1)
        else:
            found += [events.from_json(line).step for line in message.lines]  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("parts", [receipts_by, events_by])
def test_two_threads_that_send_keep_the_order(parts):
    add, send = parts()
    link = SlowLink()

    def goes_on() -> None:
        add(2)
        send(link)

    add(1)
    heartbeat, main = threading.Thread(target=send, args=(link,)), threading.Thread(target=goes_on)
    heartbeat.start()
    assert link.arrived.wait(60)
    main.start()
    main.join(0.2)  # it would be through by now if it could overtake
    link.gate.set()
    heartbeat.join(60)
    main.join(60)
    assert steps_in(link.sent) == [1, 2]


def test_steps_that_follow_each_other_quickly_are_told_together():
    link: Any = SlowLink()
    telling = Telling()
    link.gate.set()
    assert telling.add(committed(1))
    telling.send(link, 1)
    assert not telling.add(committed(2))
    assert telling.add(events.Note(time=0.0, text="not a step"))
    telling.send(link, 1)
    telling.send(link, 1)
    assert [len(message.lines) for message in link.sent] == [1, 2]


def test_what_is_told_before_there_is_a_link_is_kept():
    link: Any = SlowLink()
    telling = Telling()
    link.gate.set()
    telling.add(committed(1))
    telling.send(None, 0)
    telling.send(link, 0)
    assert steps_in(link.sent) == [1]


def test_very_many_events_are_several_messages():
    """Each has to fit into a frame; told one by one they are no more than one by one."""
    link: Any = SlowLink()
    link.gate.set()
    telling = Telling()
    for number in range(1, 1001):
        telling.add(committed(number))
    telling.send(link, 1)
    assert steps_in(link.sent) == list(range(1, 1001))
    assert max(len(message.lines) for message in link.sent) <= 256
