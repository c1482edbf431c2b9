"""The run's journal: events appended to a file, one JSON line each, and read back while it grows.

A writer that dies in the middle of a line leaves a torn last line. Readers do not see it (its writer may not
be done); the next writer ends it, and from then on it is reported as damage.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Self, final

from paceline.core import events, untrusted
from paceline.core.errors import PlatformError, ResourceError, UsageError, WireError
from paceline.core.events import Event

_log = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 20
# Not through a link: a folder from elsewhere could have the events appended to any file.
_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
# Longer than anything that is ever appended: a message of the control connection has at most 8 MiB.
LONGEST_LINE = 16 << 20
_MOST_AT_ONCE = 64 << 10  # bytes: on a full disk, what waits for hours is not tried again as a whole


@dataclass(frozen=True)
class JournalDamage:
    """A complete line that is not an event."""

    offset: int
    text: str
    reason: str


@dataclass(frozen=True)
class Chunk:
    """Lines that were read: events, damaged lines, and the offset at which to continue."""

    events: tuple[Event, ...]
    damage: tuple[JournalDamage, ...]
    offset: int


@final
class Journal:
    """The writing end. Safe to share between threads; every event is in the file when `append` returns.

    With `fsync=True` it is also on the disk, which survives a crash of the machine and costs milliseconds.
    """

    def __init__(self, path: str | os.PathLike[str], *, fsync: bool = False) -> None:
        self.path = Path(path)
        self._fsync = fsync
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, _APPEND, 0o644)
        except OSError as error:
            raise PlatformError(
                f"the journal {self.path} cannot be opened: {error.strerror}",
                remedy="check that its folder exists and may be written to",
            ) from error
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def append(self, event: Event) -> None:
        """Write one event."""
        self.append_lines(encoded(event))

    def append_lines(self, lines: bytes) -> None:
        """Write what `encoded` made of one event or, joined, of several."""
        with self._lock:
            if self._fd < 0:
                raise UsageError(f"the journal {self.path} is closed", remedy="append before closing it")
            self._write(b"\n" + lines if self._torn else lines)
            if self._fsync:
                os.fsync(self._fd)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
                self._torn = bool(view)
        except OSError as error:
            raise ResourceError(
                f"the journal {self.path} cannot be written: {error.strerror}",
                remedy="free space on its disk or put the run's folder elsewhere",
            ) from error

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class PatientJournal:
    """A journal whose disk may be full for a while: what could not be written is written, in order, as soon
    as there is room. Logged once each time.

    `alone`: no other process writes to the file, so that half a line can be taken back instead of staying
    there as damage.
    """

    def __init__(self, journal: Journal, *, alone: bool = False) -> None:
        self._journal = journal
        self._alone = alone
        self._waiting: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._said = False

    @property
    def complete(self) -> bool:
        """Return whether all that was appended is in the file."""
        return not self._waiting

    def append(self, event: Event) -> None:
        """Write one event, now or as soon as there is room for it."""
        self.append_lines([encoded(event)])

    def append_lines(self, lines: Iterable[bytes]) -> None:
        """Write events that are encoded already."""
        self._waiting.extend(lines)
        self.retry()

    def retry(self) -> None:
        """Write what waits, as far as there is room. From any thread: a report of the user's may come from
        another one than the steps."""
        with self._lock:
            self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            size = None
            if self._alone:
                with contextlib.suppress(OSError):
                    size = os.stat(self._journal.path).st_size
            lines = self._next()
            try:
                self._journal.append_lines(b"".join(lines))
            except ResourceError as error:
                if size is not None:
                    with contextlib.suppress(OSError):
                        os.truncate(self._journal.path, size)
                if not self._said:
                    self._said = True
                    _log.error(
                        "%s; training continues, and the journal is completed when that works again", error
                    )
                return
            for _ in lines:
                self._waiting.popleft()
        self._said = False

    def _next(self) -> list[bytes]:
        """Return what is written at once: several lines only where all of them can be taken back."""
        lines: list[bytes] = []
        size = 0
        for line in self._waiting:
            size += len(line)
            if lines and (size > _MOST_AT_ONCE or not self._alone):
                break
            lines.append(line)
        return lines

    def close(self) -> None:
        self.retry()
        self._journal.close()


def encoded(event: Event) -> bytes:
    """Return the line of an event."""
    return events.to_json(event).encode() + b"\n"


def read(path: str | os.PathLike[str], from_offset: int = 0, *, max_bytes: int | None = None) -> Chunk:
    """Return every complete line from `from_offset` on; call again with the chunk's offset to follow a live
    journal.

    `max_bytes` bounds how much is read at once (a single longer line is still read whole, up to LONGEST_LINE:
    the file may come from elsewhere, and what is longer is damage, passed over without being kept).
    """
    try:
        with os.fdopen(untrusted.open_regular(path, links=True), "rb") as file:
            file.seek(from_offset)
            data = file.read(-1 if max_bytes is None else max_bytes)
            if max_bytes is not None and b"\n" not in data:
                data += file.readline(LONGEST_LINE)
                if len(data) >= LONGEST_LINE and not data.endswith(b"\n"):
                    return _passed_over(file, from_offset)
    except FileNotFoundError:
        raise UsageError(
            f"there is no journal at {path}", remedy="give the run's own folder or file"
        ) from None
    found: list[Event] = []
    damage: list[JournalDamage] = []
    offset = from_offset
    # What follows the last newline is torn, or not written to its end yet.
    for line in data.split(b"\n")[:-1]:
        if line.strip():
            try:
                found.append(events.from_json(line))
            except WireError as error:
                damage.append(JournalDamage(offset, line.decode("utf-8", "replace"), error.message))
        offset += len(line) + 1
    return Chunk(tuple(found), tuple(damage), offset)


def _passed_over(file: BufferedReader, offset: int) -> Chunk:
    """Return where the line ends that began at `offset` and is too long to be one; its end may be that of the
    file."""
    end = file.tell()
    piece = bytearray(1 << 20)
    while count := file.readinto(piece):
        newline = piece.find(b"\n", 0, count)
        end += newline + 1 if newline >= 0 else count
        if newline >= 0:
            break
    reason = f"a line of {end - offset} bytes is longer than any event"
    return Chunk((), (JournalDamage(offset, "", reason),), end)


def last_lines(path: str | os.PathLike[str]) -> list[str]:
    """Return the lines of the end of a journal, about a megabyte; what is torn, too, as the last of them."""
    try:
        with os.fdopen(untrusted.open_regular(path, links=True), "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(start)
            if start:
                file.readline()
            return file.read().decode("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return []


def last_events(path: str | os.PathLike[str]) -> Iterator[Event]:
    """Return the events of the end of a journal."""
    for line in last_lines(path):
        with contextlib.suppress(WireError):
            yield events.from_json(line)


def iterate(
    path: str | os.PathLike[str], *, on_damage: Callable[[JournalDamage], None] | None = None
) -> Iterator[Event]:
    """Return all events, never the whole file at once; damaged lines go to `on_damage`, else to the log."""
    offset = 0
    while True:
        chunk = read(path, offset, max_bytes=1 << 20)
        for damaged in chunk.damage:
            if on_damage is None:
                reason = untrusted.printable(damaged.reason)
                _log.warning("%s: byte %d: skipped a damaged line: %s", path, damaged.offset, reason)
            else:
                on_damage(damaged)
        yield from chunk.events
        if chunk.offset == offset:
            return
        offset = chunk.offset
