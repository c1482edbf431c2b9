"""Read the logs of all workers of a run as one: what is there in the order of its times, then what comes.

A line begins with the time of day (`core.log`). Lines without one, such as those of a traceback, belong to
the line before and stay behind it.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, final

from paceline.core import untrusted
from paceline.core.errors import PlatformError

_FILE: Final = re.compile(r"rank-(\d+)\.log")
_TIME: Final = re.compile(r"(\d\d):(\d\d):(\d\d)\.(\d{3}) ")
_DAY: Final = 86400.0
_AT_ONCE: Final = 1 << 20


@final
class WorkerLogReader:
    """The logs in a run's folder `logs/`; `read` returns lines with the rank that wrote each."""

    def __init__(self, folder: Path, ranks: Iterable[int] = (), *, tail_bytes: int | None = None) -> None:
        """`tail_bytes`: of each log that is longer, begin with the lines in its last bytes."""
        self._folder = folder
        self._tail_bytes = tail_bytes
        self._wanted = frozenset(ranks)
        self._offsets: dict[int, int] = {}
        self._times: dict[int, float] = {}

    def ranks(self) -> list[int]:
        """Return the ranks that have a log, and are wanted."""
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(self._folder, error) from error
        found = sorted(int(match[1]) for name in names if (match := _FILE.fullmatch(name)))
        return [rank for rank in found if not self._wanted or rank in self._wanted]

    def read(self) -> list[tuple[int, str]]:
        """Return the complete lines that came since the last call, those of all ranks in the order of their
        times."""
        timed = [self._timed(rank, self._new_lines(rank)) for rank in self.ranks()]
        return [(rank, line) for _, rank, _, line in heapq.merge(*timed)]

    def _new_lines(self, rank: int) -> list[str]:
        start = self._offsets.get(rank)
        pieces: list[bytes] = []
        try:
            path = self._folder / f"rank-{rank}.log"
            with os.fdopen(untrusted.open_regular(path), "rb") as file:
                if start is None:
                    size = file.seek(0, os.SEEK_END)
                    start = 0 if self._tail_bytes is None else max(0, size - self._tail_bytes)
                    file.seek(start)
                    # What stands before the next line's begin is the end of an older one.
                    start += len(file.readline()) if start else 0
                file.seek(start)
                while piece := file.read(_AT_ONCE):
                    pieces.append(piece)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(self._folder / f"rank-{rank}.log", error) from error
        # What follows the last line's end is still being written.
        data, newline, _ = b"".join(pieces).rpartition(b"\n")
        self._offsets[rank] = start + len(data) + len(newline)
        return data.decode("utf-8", "replace").split("\n") if newline else []

    def _timed(self, rank: int, lines: list[str]) -> Iterator[tuple[float, int, int, str]]:
        """Give each line its time in seconds; a time of day far before the last one is of the next day."""
        time = self._times.get(rank, 0.0)
        for number, line in enumerate(lines):
            if match := _TIME.match(line):
                hours, minutes, seconds, thousandths = map(int, match.groups())
                of_day = hours * 3600 + minutes * 60 + seconds + thousandths / 1000
                day = time // _DAY * _DAY
                time = max(time, day + of_day + (_DAY if time - (day + of_day) > _DAY / 2 else 0.0))
            yield time, rank, number, line
        self._times[rank] = time


def _unreadable(path: Path, error: OSError) -> PlatformError:
    return PlatformError(
        f"{path} cannot be read: {error.strerror}", remedy="run the command as the run's owner"
    )
