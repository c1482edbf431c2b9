"""Read a journal as it grows, event by event; nothing is read twice and nothing whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from paceline.core import journal
from paceline.core.events import Event

_AT_ONCE: Final = 1 << 20


@final
class JournalFollower:
    """The reading end of a run's journal, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_into(self, take: Callable[[Event], object]) -> None:
        """Pass on every event that has come since the last call."""
        if not self._path.exists():
            return
        while True:
            chunk = journal.read(self._path, self._offset, max_bytes=_AT_ONCE)
            for event in chunk.events:
                take(event)
            if chunk.offset == self._offset:
                return
            self._offset = chunk.offset
