"""Which trial comes next, and whether a lost one is repeated. Pure: no clock, no processes, no Optuna.

A trial is asked for once, in the order of the numbers. It is over when it returned, was pruned or raised. A
trial whose process was lost is not over: it is repeated with the same parameters, ahead of new ones, up to
`max_attempts` times in all; then it counts as failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(frozen=True)
class StartTrial:
    """Start a trial; `is_new`: it has to be asked for first."""

    number: int
    slot: int
    is_new: bool


@final
@dataclass
class TrialSchedule:
    """Trials of one search.

    total      trials of the study when it is complete
    slots      trials that run at once
    asked      trials that the study holds already; those of `unfinished` are repeated
    needs      for a trial's number, how many of the first trials must be over before it is asked for
    """

    total: int
    slots: int
    asked: int = 0
    unfinished: Iterable[int] = ()
    needs: Callable[[int], int] = lambda number: 0
    max_attempts: int = 3
    _repeat: list[int] = field(init=False)
    _running: dict[int, int] = field(init=False, default_factory=dict)  # slot by number
    _lost: dict[int, int] = field(init=False, default_factory=dict)  # how often, by number
    _over: set[int] = field(init=False)
    _closed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._repeat = sorted(self.unfinished)
        self._over = set(range(self.asked)) - set(self._repeat)

    @property
    def is_done(self) -> bool:
        """Return whether nothing runs and nothing is left to start."""
        return not self._running and not self._repeat and not self._has_new

    @property
    def running(self) -> dict[int, int]:
        """The slot of each running trial, by its number."""
        return dict(self._running)

    def start_next(self) -> StartTrial | None:
        """Take a free slot for the next trial; None where there is none to start now."""
        free = sorted(set(range(self.slots)) - set(self._running.values()))
        if not free:
            return None
        if self._repeat:
            return self._start(self._repeat.pop(0), free[0], is_new=False)
        needed = self.needs(self.asked) if self._has_new else 0
        if not self._has_new or any(number not in self._over for number in range(needed)):
            return None
        self.asked += 1
        return self._start(self.asked - 1, free[0], is_new=True)

    def end(self, number: int) -> None:
        """Record that a trial is over."""
        del self._running[number]
        self._over.add(number)

    def lose(self, number: int) -> bool:
        """Record that a trial's process was lost; return whether the trial is repeated. One that is not is to
        be recorded as failed, and ended."""
        self._lost[number] = self._lost.get(number, 0) + 1
        if self._lost[number] >= self.max_attempts:
            return False
        del self._running[number]
        self._repeat = sorted([*self._repeat, number])
        return True

    def close(self) -> None:
        """Ask for no further trial: the sampler has none."""
        self._closed = True

    @property
    def _has_new(self) -> bool:
        return self.asked < self.total and not self._closed

    def _start(self, number: int, slot: int, *, is_new: bool) -> StartTrial:
        self._running[number] = slot
        return StartTrial(number, slot, is_new)
