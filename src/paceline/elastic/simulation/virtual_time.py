"""Virtual time: a heap of future events. Events of one time happen in the order they were asked for."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, final


@final
class VirtualTime:
    """Virtual clock: `now` moves only when the next event happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self._halted = False
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, when: float, act: Callable[..., None], *args: Any) -> None:
        """Schedule a call of `act` at `when`, or now if that is over."""
        self._asked += 1
        heappush(self._heap, (when if when > self.now else self.now, self._asked, act, args))

    def after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        self._asked += 1
        heappush(self._heap, (self.now + seconds, self._asked, act, args))

    @property
    def happened(self) -> int:
        """Number of events that were run."""
        return self._asked - len(self._heap)

    def run(self, limit: int) -> bool:
        """Run events until `halt`, until none is left, or up to a limit; return whether it was `halt`."""
        heap = self._heap
        for _ in range(limit):
            if self._halted or not heap:
                break
            self.now, _, act, args = heappop(heap)
            act(*args)
        return self._halted

    def halt(self) -> None:
        """Let no further event happen."""
        self._halted = True

    def suspend(self, seconds: float) -> None:
        """Suspend the whole host: everything happens later."""
        self.now += seconds
        # The order stays, so the heap stays one.
        self._heap[:] = [(when + seconds, order, act, args) for when, order, act, args in self._heap]
