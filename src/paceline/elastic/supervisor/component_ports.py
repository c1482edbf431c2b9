"""What the supervisor's components may use of its loop: the clock, the selector, and a queue of events.

The loop itself is in supervisor.py. A component registers its sockets with the selector (the key's data is a
function of the mask and the time), and gives the loop a `due` time and a `tick`. What happened is emitted as
an event for the machine, which decides after the component has returned: components never call the machine.
"""

from __future__ import annotations

import selectors
from collections import deque
from typing import Protocol, final

from paceline.core.clock import Clock
from paceline.elastic.machine.machine_events import Event


class Component(Protocol):
    """A part of the supervisor with work at times of its choice; `due` is infinite while there is none."""

    @property
    def due(self) -> float: ...

    def tick(self, now: float) -> None: ...


@final
class Loop:
    """`kill_reason` is why the job ends at once, without saving; empty: it does not."""

    def __init__(self, clock: Clock, selector: selectors.BaseSelector) -> None:
        self.clock = clock
        self.selector = selector
        self.events: deque[Event] = deque()
        self.kill_reason = ""

    def emit(self, event: Event) -> None:
        """Queue an event for the machine, behind those that were emitted before it."""
        self.events.append(event)

    def kill(self, reason: str) -> None:
        """End the job at once; the first reason counts."""
        self.kill_reason = self.kill_reason or reason
