"""Time as an argument: what waits or measures takes a Clock, so tests and simulations need not wait.

Must not know what is being timed.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol, final


class Clock(Protocol):
    """Seconds that never go back, and a way to let them pass."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


@final
class MonotonicClock:
    """The machine's own clock; its zero has no meaning."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


@final
class WallClock:
    """Seconds since 1970, for times that people read; it jumps when the machine's time is set."""

    def now(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


@final
class VirtualClock:
    """A clock that moves only when told to.

    `sleep` blocks its thread until `advance` has moved far enough. With `autojump=True` there is nobody to
    advance it: `sleep` itself moves the clock and returns at once (simulations in one thread).
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
        """Move the clock forward and wake whoever has slept long enough."""
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
