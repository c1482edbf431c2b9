"""One exchange, with a bulk transfer that completes at an awkward moment."""

from __future__ import annotations

from typing import Any

import torch
from tests.comm.transport.tcp.meshes import meshes
from tests.waiting import wait_for

from paceline.comm.call_status import CollectiveCall
from paceline.comm.transport.base import Topology, Traffic
from paceline.comm.transport.tcp.exchange import Exchange, MessageNumbers, SentCounter
from paceline.comm.transport.tcp.framed_socket import FrameKind

SIZE = 100_000


class BetweenTwoLooks:
    """A transfer that another thread completes just after the second look at it."""

    peer = 1
    error = None

    def __init__(self) -> None:
        self._looks = 0

    @property
    def done(self) -> bool:
        self._looks += 1
        return self._looks > 2


class AwkwardBulk:
    def receive(self, *_: object) -> BetweenTwoLooks:
        return BetweenTwoLooks()


def test_a_receipt_is_told_also_if_the_message_completes_between_two_looks() -> None:
    with meshes(2) as (first, second):
        call = CollectiveCall(5, "all_reduce()", 7)
        bulk: Any = AwkwardBulk()
        room = torch.zeros(SIZE, dtype=torch.uint8)
        tally = SentCounter(0, Topology((0, 1)), Traffic())
        exchange = Exchange(first, bulk, MessageNumbers(2), tally, call, [], [(1, room)])
        second.send(0, FrameKind.BULK, length=SIZE, sequence=5, signature=7, number=1)
        wait_for(lambda: exchange.advance()[0], "the exchange did not end")
        # Without it the sender waits for ever.
        wait_for(lambda: second.confirmed(FrameKind.DONE, 0, 1), "the sender gets no confirmation", 20.0)
        wait_for(lambda: second.confirmed(FrameKind.ACCEPT, 0, 1))
