"""Time as an argument: what waits or measures takes a Clock, so tests and simulations need not wait."""

from __future__ import annotations

import time
from typing import Protocol, final


class Clock(Protocol):
    """Seconds that never go back, and a way to let them pass."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


@final
class MonotonicClock:
    """The machine's own clock; its zero has no meaning."""

    now = staticmethod(time.monotonic)  # the C function: a step calls it several times

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


@final
class WallClock:
    """Seconds since 1970, for times that people read; it jumps when the machine's time is set."""

    def now(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))
