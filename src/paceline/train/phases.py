"""Current phase of this worker, for heartbeats and verdicts; entering a phase injects faults on demand.

The loop calls `enter`; another thread may read `now` at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

from paceline.core.clock import Clock, MonotonicClock
from paceline.core.phase_page import PhasePage

START, DATA, FORWARD, BACKWARD = "start", "data", "forward", "backward"
COLLECTIVE, OPTIMIZER, WAIT = "collective", "optimizer", "wait"
CHECKPOINT, EVALUATION = "checkpoint", "evaluation"

OCCASIONAL = (CHECKPOINT, EVALUATION)  # not in every step; excluded from step-time limits
# In no group, so that no collective is pending. A member that was sent a view is in WAIT until the view's
# connections are made; what it then exchanges with the other members is in COLLECTIVE, visible to heartbeats.
OUTSIDE_GROUP = (START, WAIT)

_ALL = (START, DATA, FORWARD, BACKWARD, COLLECTIVE, OPTIMIZER, WAIT, CHECKPOINT, EVALUATION)

Inject = Callable[[str, int], None]
"""Called with the phase and the number that the step will have once it is committed."""


class StepTimes(NamedTuple):
    """Seconds of a step by what the rank did; on this process's clock, so that work of a GPU counts where the
    process waits for it."""

    communication: float = 0.0
    data: float = 0.0
    computing: float = 0.0


@final
class Phases:
    def __init__(
        self, inject: Inject | None = None, page: PhasePage | None = None, clock: Clock | None = None
    ) -> None:
        self._inject, self._page = inject, page
        self._clock: Clock = clock or MonotonicClock()
        self.step = 0  # being computed: committed steps + 1
        self.on_enter: Callable[[str], None] | None = None  # a profiler's, while it records
        self._now: tuple[str, float] = (START, self._clock.now())
        self._longest: dict[str, float] = {}
        self._counted_until = self._now[1]
        self._spent = dict.fromkeys(_ALL, 0.0)  # seconds by phase
        self._taken = StepTimes()  # of them, what `take_times` has returned

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
        self._spent[before] += now - self._counted_until
        self._now, self._counted_until = (phase, now), now
        if self.on_enter is not None:
            self.on_enter(phase)
        if self._page is not None:
            self._page.write(phase, self.step)
        if self._inject is not None and not in_view_change:
            self._inject(phase, self.step)

    def take_times(self) -> StepTimes:
        """Return the times since the last call."""
        now, spent, before = self._clock.now(), self._spent, self._taken
        spent[self._now[0]] += now - self._counted_until
        self._counted_until = now
        computing = spent[FORWARD] + spent[BACKWARD] + spent[OPTIMIZER]
        self._taken = StepTimes(spent[COLLECTIVE], spent[DATA], computing)
        return StepTimes(spent[COLLECTIVE] - before[0], spent[DATA] - before[1], computing - before[2])

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
