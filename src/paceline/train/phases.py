"""Current phase of this worker, for heartbeats and verdicts; entering a phase injects faults on demand.

The loop calls `enter`; another thread may read `now` at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from paceline.core.clock import Clock, MonotonicClock
from paceline.core.phase_page import PhasePage

START, DATA, FORWARD, BACKWARD = "start", "data", "forward", "backward"
COLLECTIVE, OPTIMIZER, WAIT = "collective", "optimizer", "wait"
CHECKPOINT, EVALUATION = "checkpoint", "evaluation"

OCCASIONAL = (CHECKPOINT, EVALUATION)  # not in every step; excluded from step-time limits
# In no group, so that no collective is pending. A member that was sent a view is in WAIT until the view's
# connections are made; what it then exchanges with the other members is in COLLECTIVE, visible to heartbeats.
OUTSIDE_GROUP = (START, WAIT)

Inject = Callable[[str, int], None]
"""Called with the phase and the number that the step will have once it is committed."""


@final
class Phases:
    def __init__(
        self, inject: Inject | None = None, page: PhasePage | None = None, clock: Clock | None = None
    ) -> None:
        self._inject, self._page = inject, page
        self._clock: Clock = clock or MonotonicClock()
        self.step = 0  # being computed: committed steps + 1
        self._now: tuple[str, float] = (START, self._clock.now())
        self._longest: dict[str, float] = {}

    def enter(self, phase: str, *, in_view_change: bool = False) -> None:
        """Begin a phase, and inject the faults that are due in it.

        `in_view_change`: the member takes over a view. No fault is injected, because those of a phase are
        meant for the phase of a step; and no duration is remembered, because loading a checkpoint says
        nothing about how long saving one may take.
        """
        (before, since), now = self._now, self._clock.now()
        # A phase that ended in a group failure was not completed.
        if before in OCCASIONAL and phase != WAIT and not in_view_change:
            self._longest[before] = max(self._longest.get(before, 0.0), now - since)
        self._now = (phase, now)
        if self._page is not None:
            self._page.write(phase, self.step)
        if self._inject is not None and not in_view_change:
            self._inject(phase, self.step)

    def leave(self, step: int, value: int) -> None:
        """Publish a hash of the weights after a committed step, for ranks that outlive this one."""
        if self._page is not None:
            self._page.leave(step, value)

    @property
    def now(self) -> tuple[str, float]:
        """The phase, and the seconds since it began."""
        phase, since = self._now
        return phase, self._clock.now() - since

    def longest(self, phase: str) -> float:
        """Return the longest previous duration of an occasional phase, in seconds; 0: none yet."""
        return self._longest.get(phase, 0.0)

    @property
    def name(self) -> str:
        return self._now[0]
