"""What this worker does right now, for heartbeats and verdicts; and where faults are injected on demand.

The loop says when it enters a phase; another thread may look at any time. Must not know what is done in a
phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from paceline.core.phase_page import PhasePage

START, DATA, FORWARD, BACKWARD = "start", "data", "forward", "backward"
COLLECTIVE, OPTIMIZER, CHECKPOINT, EVALUATION, WAIT = (
    "collective",
    "optimizer",
    "checkpoint",
    "evaluation",
    "wait",
)

UNEVEN = (CHECKPOINT, EVALUATION)  # phases that not every step has, and that have nothing to do with its time
APART = (START, WAIT)  # phases outside of a group: in all others a worker may wait for somebody in it

Inject = Callable[[str, int], None]
"""Called with the phase and the number that the step will have once it is committed."""


@final
class Phases:
    def __init__(self, inject: Inject | None = None, page: PhasePage | None = None) -> None:
        self._inject = inject
        self._page = page
        self.step = 0  # being computed: committed steps + 1
        self._now: tuple[str, float] = (START, time.monotonic())
        self._longest: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        (before, since), now = self._now, time.monotonic()
        # One that the group's trouble ended was not gone through to its end.
        if before in UNEVEN and phase != WAIT:
            self._longest[before] = max(self._longest.get(before, 0.0), now - since)
        self._now = (phase, now)
        if self._page is not None:
            self._page.write(phase, self.step)
        if self._inject is not None:
            self._inject(phase, self.step)

    def leave(self, step: int, value: int) -> None:
        """What this worker has after a committed step, for those who outlive it."""
        if self._page is not None:
            self._page.leave(step, value)

    @property
    def now(self) -> tuple[str, float]:
        """The phase, and for how many seconds already."""
        phase, since = self._now
        return phase, time.monotonic() - since

    def longest(self, phase: str) -> float:
        """The most seconds that such a phase has taken, of those that not every step has; 0: none yet."""
        return self._longest.get(phase, 0.0)

    @property
    def name(self) -> str:
        return self._now[0]
