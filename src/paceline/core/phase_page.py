"""The phase of a worker in a small file that outlives it: after a kill -9 the file still holds the phase and
the step that the worker was in.

The worker writes to a mapping of the file, which costs less than a microsecond and survives the process, not
the machine; the supervisor reads the file.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

_LAYOUT: Final = struct.Struct("<16sQddQQ")
_PHASE: Final = struct.Struct("<16sQd")
_TIME: Final = struct.Struct("<d")
_LEFT: Final = struct.Struct("<QQ")
_LEFT_AT: Final = _PHASE.size + _TIME.size


@dataclass(frozen=True)
class PhaseRecord:
    """The phase, the step that it belongs to, the machine's monotonic time at which it began, and that at
    which the thread that sends heartbeats last had the interpreter; 0.0: not yet."""

    phase: str
    step: int
    since: float
    ran: float = 0.0


def page_file(folder: Path, member: int) -> Path:
    """Return where the page of a member is, in a run's folder."""
    return folder / "logs" / f"phase-{member}"


@final
class PhasePage:
    """The writing end of a phase page."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Not ftruncate: on a full disk writing to a page that has no place would be a bus error.
            os.posix_fallocate(descriptor, 0, _LAYOUT.size)
            self._memory = mmap.mmap(descriptor, _LAYOUT.size)
            self._memory[:] = bytes(_LAYOUT.size)  # an earlier run may have left one of this name
        finally:
            os.close(descriptor)
        self._path = path

    def write(self, phase: str, step: int) -> None:
        """Record that the main thread enters a phase."""
        self._memory[: _PHASE.size] = _PHASE.pack(phase.encode(), step, time.monotonic())

    def tick(self) -> None:
        """Record that the heartbeat thread has the interpreter's lock, whether or not it can send."""
        if not self._memory.closed:
            self._memory[_PHASE.size : _LEFT_AT] = _TIME.pack(time.monotonic())

    def leave(self, step: int, value: int) -> None:
        """Record a number that stands for the worker's state after a step."""
        self._memory[_LEFT_AT:] = _LEFT.pack(step, value)

    def close(self) -> None:
        """Remove the page: the worker ends by itself."""
        self._memory.close()
        self._path.unlink(missing_ok=True)


def left(path: Path) -> tuple[int, int] | None:
    """Return the last step after which a worker left a number, and that number."""
    data = _data(path)
    step, value = (0, 0) if data is None else _LEFT.unpack(data[_LEFT_AT:])
    return (step, value) if step else None


def read(path: Path) -> PhaseRecord | None:
    """Return what a worker did last; None where none has written."""
    data = _data(path)
    if data is None:
        return None
    phase, step, since, ran, _, _ = _LAYOUT.unpack(data)
    name = phase.rstrip(b"\0").decode("ascii", "replace")
    return PhaseRecord(name, step, since, ran) if name else None


def _data(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data if len(data) == _LAYOUT.size else None
