"""Several exchanges under way at once, finished in the order in which they were started.

For algorithms whose rounds depend on each other: cut into parts, one part can be folded while the others
travel, and no link idles between rounds. Messages of a pair still arrive in order, so an exchange takes
nothing from a peer before the earlier ones have all they expect from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from paceline.comm.calls import Call, Status
from paceline.comm.transport.exchange import Exchange
from paceline.comm.transport.progress import Work

Messages = Sequence[tuple[int, Tensor]]


class Pipeline(Protocol):
    """What algorithms see. `finish` ends the oldest exchange that was started."""

    def start(self, call: Call, sends: Messages, receives: Messages) -> None: ...
    def finish(self, deadline: float) -> None: ...


class Exchanges:
    """A pipeline over control and bulk connections; `begin` and `wait_for` are those of the transport."""

    def __init__(
        self, begin: Callable[[Call, Messages, Messages], Exchange], wait_for: Callable[[Work, float], None]
    ) -> None:
        self._begin = begin
        self._wait_for = wait_for
        self._under_way: deque[Exchange] = deque()

    def start(self, call: Call, sends: Messages, receives: Messages) -> None:
        self._under_way.append(self._begin(call, sends, receives))

    def finish(self, deadline: float) -> None:
        self._wait_for(self, deadline)
        self._under_way.popleft()

    def advance(self) -> tuple[bool, bool]:
        """Moves all of them; done when the oldest is."""
        expected: set[int] = set()
        first_done, moved = False, False
        for position, exchange in enumerate(self._under_way):
            done, some = exchange.advance(expected)
            first_done |= done and position == 0
            moved |= some
            expected |= exchange.expects()
        return first_done, moved

    def status(self) -> Status:
        return self._under_way[0].status()

    def underway_with(self) -> set[int]:
        return self._under_way[0].underway_with()


class Renumbered:
    """A pipeline for a part of the group that counts its ranks from 0."""

    def __init__(self, pipeline: Pipeline, ranks: Sequence[int]) -> None:
        self._pipeline = pipeline
        self._ranks = ranks

    def start(self, call: Call, sends: Messages, receives: Messages) -> None:
        self._pipeline.start(
            call,
            [(self._ranks[peer], tensor) for peer, tensor in sends],
            [(self._ranks[peer], tensor) for peer, tensor in receives],
        )

    def finish(self, deadline: float) -> None:
        self._pipeline.finish(deadline)
