"""Looks at the processes of workers that do not beat, where they run: nothing is done to them.

The interpreter of such a worker may be held by a call, so it cannot be asked. The kernel says whether it lets
the process run, and the page that the worker wrote when it entered its phase says how long it is in it. Must
not judge anybody.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, final

from paceline.core import phase_page
from paceline.core.control.messages import Seen
from paceline.elastic.model import HOME, Probed
from paceline.elastic.shell.seats import is_stopped

if TYPE_CHECKING:
    from paceline.elastic.supervisor import Supervisor


@final
class Probing:
    """Of the workers of this machine at once; other machines are asked, and may not answer."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def look(self, members: Iterable[int]) -> None:
        """Feed what is found of each."""
        for member in members:
            seat = self._supervisor.staff.seats.get(member)
            if seat is None:
                continue
            if seat.place != HOME:
                self._supervisor.places.probe(seat.place, member)
            elif seat.worker is not None and seat.worker.pid and not seat.worker.has_ended:
                stopped = is_stopped(seat.worker.pid)
                if stopped is not None:
                    self._supervisor.feed(self._probed(member, stopped))

    def seen(self, seen: Seen) -> None:
        """The answer of another machine."""
        if seen.stopped is not None:
            self._supervisor.feed(Probed(seen.member, seen.stopped))

    def _probed(self, member: int, stopped: bool) -> Probed:
        page = phase_page.read(phase_page.page_file(Path(self._supervisor.folder), member))
        if page is None:
            return Probed(member, stopped)
        # Both clocks are the machine's, which stands still with it.
        now = time.monotonic()
        ran = max(0.0, now - page.ran) if page.ran else -1.0
        return Probed(member, stopped, page.phase, max(0.0, now - page.since), ran)
