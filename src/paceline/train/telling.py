"""What a member tells for the journal: events, put together where they follow each other quickly.

Must not know what becomes of them.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, final

from paceline.core import events
from paceline.core.control.messages import Told

if TYPE_CHECKING:
    from paceline.core.control.member_link import MemberLink

# Longer than the time between two heartbeats: steps travel with them, and wake nobody of their own.
_TELL_SECONDS = 0.3
_TOGETHER = 256  # events in one message, which has a limit


@final
class Telling:
    """Events in their order. Filled by the main thread, sent by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._untold: list[str] = []  # as their lines
        self._told_at = 0.0

    def add(self, event: events.Event) -> bool:
        """Whether it is to be sent now, with all before it."""
        with self._lock:
            self._untold.append(events.to_json(event))
            soon = time.monotonic() - self._told_at < _TELL_SECONDS
            return not (soon and isinstance(event, events.StepCommitted))

    def send(self, link: MemberLink | None, generation: int) -> None:
        if link is None:
            return
        with self._lock:
            lines, self._untold = self._untold, []
            self._told_at = time.monotonic()
            # With the lock held: two threads send in the order in which the events came.
            for start in range(0, len(lines), _TOGETHER):
                link.send(Told(generation=generation, lines=tuple(lines[start : start + _TOGETHER])))
