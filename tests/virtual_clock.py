"""A clock for tests of code that takes a `paceline.core.clock.Clock`."""

from __future__ import annotations

import threading
from typing import final


@final
class VirtualClock:
    """A clock that moves only by `advance`.

    `sleep` blocks its thread until `advance` has moved far enough. With `autojump=True`
    `sleep` itself moves the clock and returns at once (simulations in one thread).
    """

    def __init__(self, start: float = 0.0, *, autojump: bool = False) -> None:
        self._now = start
        self._autojump = autojump
        self._changed = threading.Condition()
        self._wakeups: list[float] = []

    def now(self) -> float:
        with self._changed:
            return self._now

    def sleep(self, seconds: float) -> None:
        with self._changed:
            until = self._now + max(0.0, seconds)
            if self._autojump:
                self._now = until
                return
            if until <= self._now:
                return
            self._wakeups.append(until)
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._now >= until)
            finally:
                self._wakeups.remove(until)

    def advance(self, seconds: float) -> None:
        """Move the clock forward and wake the threads that have slept long enough."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds})")
        with self._changed:
            self._now += seconds
            self._changed.notify_all()

    def wait_for_sleepers(self, count: int, timeout: float = 10.0) -> bool:
        """Block (in real time) until `count` threads still have to sleep; False when they never do."""
        with self._changed:
            return self._changed.wait_for(
                lambda: sum(wakeup > self._now for wakeup in self._wakeups) >= count, timeout
            )
