"""Faults on demand that have come in this run, so that none of them comes again in another life of its rank.

A worker says so before a fault acts and waits until it is heard; what came is told to each worker of that
rank when it joins, and is remembered for the next supervisor. Must not know what a fault is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from paceline.core.control.messages import Injected
from paceline.elastic.shell.seats import Seat

if TYPE_CHECKING:
    from paceline.elastic.supervisor import Supervisor

Came = tuple[int, int, int, int]
"""Rank, place in the chaos, member, and how often it had come in that member before."""


@final
class Injections:
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._came = set(supervisor.recalled.injected)

    @property
    def came(self) -> tuple[Came, ...]:
        return tuple(sorted(self._came))

    def of(self, slot: int) -> tuple[int, ...]:
        """What the rank has met, by its place in the chaos, each as often."""
        return tuple(sorted(index for rank, index, *_ in self._came if rank == slot))

    def hear(self, seat: Seat, injected: Injected) -> None:
        """A fault waits for our word that it is known, and then acts."""
        supervisor = self._supervisor
        one = (seat.slot, injected.index, seat.member, injected.before)
        # Said again to a supervisor that took over, or because our word did not arrive.
        if one not in self._came:
            self._came.add(one)
            supervisor.keep()
            supervisor.chronicle.tell((injected.line,))
        # What is confirmed is confirmed with all that was said before, its receipts too.
        supervisor.chronicle.flush(seat.pid)
        if supervisor.chronicle.complete and not supervisor.chronicle.holds_back(seat.pid):
            supervisor.staff.confirm_seat(seat)
