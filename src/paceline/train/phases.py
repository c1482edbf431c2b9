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

TOGETHER = (COLLECTIVE, EVALUATION, CHECKPOINT)  # phases in which a worker may wait for others

Inject = Callable[[str, int], None]
"""Called with the phase and the number that the step will have once it is committed."""


@final
class Phases:
    def __init__(self, inject: Inject | None = None, page: PhasePage | None = None) -> None:
        self._inject = inject
        self._page = page
        self.step = 0  # being computed: committed steps + 1
        self._now: tuple[str, float] = (START, time.monotonic())

    def enter(self, phase: str) -> None:
        self._now = (phase, time.monotonic())
        if self._page is not None:
            self._page.write(phase, self.step)
        if self._inject is not None:
            self._inject(phase, self.step)

    @property
    def now(self) -> tuple[str, float]:
        """The phase, and for how many seconds already."""
        phase, since = self._now
        return phase, time.monotonic() - since

    @property
    def name(self) -> str:
        return self._now[0]
