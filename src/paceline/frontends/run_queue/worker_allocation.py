"""Which run has how many workers. Pure: no clock, no files, no processes; equal input gives equal output.

Runs stand in one order: the higher priority first, and within a priority the one that was added first.

1. Admission. In that order, a run is admitted if its least number of workers still fits. A run that does not
   fit is passed over, so that workers are not idle while a smaller one behind it could use them.
2. Sizes. What is left goes to the highest priority that can use it, evenly among the runs of a priority.
3. Actions. A run that is not admitted any longer is stopped (it saves, and waits), one that has too many
   workers shrinks. Starts and growth use only workers that no run has at this moment; what is being given
   back is used at the next decision.

So the first run of the order always runs, whatever stands behind it: a run that was passed over takes its
workers back from those that passed it as soon as it fits, and none is overtaken for ever by later runs of its
own priority. Lower priorities may wait as long as higher ones have work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, TypeAlias, final

from paceline.core.wording import counted

_FIXED: Final = "its size cannot change"


@final
@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A run as the decision sees it.

    unit        workers that come and go together, those of a node: `least`, `most` and every size are
                multiples of it
    workers     granted to it; 0: it does not run
    reserved    that it may have right now: more than `workers` until a shrink is done
    is_fixed    it runs, and its size cannot change: it has what is reserved, whatever was granted since
    is_leaving  it was told to stop, and is not done yet
    """

    id: int
    priority: int = 0
    least: int = 1
    most: int = 1
    unit: int = 1
    workers: int = 0
    reserved: int = 0
    is_fixed: bool = False
    is_leaving: bool = False

    @property
    def floor(self) -> int:
        """The fewest workers with which it can go on as it is."""
        return self.held if self.is_fixed and self.workers else self.least

    @property
    def held(self) -> int:
        """The workers that no other run can have now."""
        return self.reserved if self.is_fixed and self.reserved else max(self.workers, self.reserved)


@final
@dataclass(frozen=True)
class Start:
    id: int
    workers: int


@final
@dataclass(frozen=True)
class Resize:
    id: int
    workers: int
    reason: str


@final
@dataclass(frozen=True)
class StopRun:
    id: int
    reason: str


QueueAction: TypeAlias = Start | Resize | StopRun


def decide(candidates: Iterable[Candidate], capacity: int) -> list[QueueAction]:
    """Return what is to be done now: stops and shrinks first, then starts and growth, each in the order
    of runs. Call it again whenever something has changed; nothing to do is an empty list."""
    ordered = sorted(candidates, key=lambda one: (-one.priority, one.id))
    sizes = target_sizes(ordered, capacity)
    why = _cause(ordered, sizes, capacity)
    actions: list[QueueAction] = []
    for one in ordered:
        if not one.workers or one.is_leaving:
            continue
        size = sizes.get(one.id, 0)
        if not size:
            actions.append(StopRun(one.id, why))
        elif size < one.workers:
            actions.append(Resize(one.id, size, _FIXED if one.is_fixed else why))
    free = capacity - sum(one.held for one in ordered)
    for one in ordered:
        size = sizes.get(one.id, 0)
        if one.is_leaving or size <= one.workers:
            continue
        possible = min(size, one.held + max(0, free)) // one.unit * one.unit
        if not one.workers and possible >= one.least:
            actions.append(Start(one.id, possible))
        elif one.workers and possible > one.workers:
            why = _FIXED if one.is_fixed else f"{counted(free, 'worker', 'is', 'are')} free"
            actions.append(Resize(one.id, possible, why))
        else:
            continue
        free -= max(0, possible - one.held)
    return actions


def target_sizes(ordered: Sequence[Candidate], capacity: int) -> dict[int, int]:
    """Return how many workers each run is to have in the end; runs that are to wait are not in it."""
    sizes: dict[int, int] = {}
    left = capacity
    for one in ordered:
        if not one.is_leaving and one.floor <= left:
            sizes[one.id] = one.floor
            left -= one.floor
    for _, equals in groupby(ordered, key=lambda one: one.priority):
        members = [one for one in equals if one.id in sizes]
        while growing := [one for one in members if one.unit <= min(left, _most(one) - sizes[one.id])]:
            smallest = min(growing, key=lambda one: sizes[one.id])  # the first of them in the order
            sizes[smallest.id] += smallest.unit
            left -= smallest.unit
    return sizes


def _most(one: Candidate) -> int:
    return one.floor if one.is_fixed and one.workers else max(one.least, one.most)


def _cause(ordered: Sequence[Candidate], sizes: dict[int, int], capacity: int) -> str:
    """Return for whom workers are taken away."""
    for one in ordered:
        if not one.workers and not one.is_leaving and one.id in sizes:
            return f"run {one.id} of priority {one.priority} gets workers"
    return f"the {counted(capacity, 'worker')} of the queue are shared anew"
