"""What ranks print, on its way to this process's output: whole lines, each with its rank in front.

Each rank has a pipe for standard output and one for standard error. One thread reads all of them and writes
every line at once, so that no line cuts another, however many ranks print. A carriage return ends a line too:
a progress bar that redraws itself is passed on as it moves.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, final

_READ_BYTES: Final = 64 * 1024
_LONGEST_LINE: Final = 1 << 20  # one without an end is passed on in pieces
_KEPT_LINES: Final = 20
_KEPT_BYTES: Final = 400  # of each of them
_LINE_END: Final = re.compile(rb"\r\n|\n|\r(?!\Z)")


@final
@dataclass(eq=False)
class RankOutput:
    """What one rank prints. `shown`: whether its lines are passed on, or only kept for a report."""

    rank: int
    shown: bool = True
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    def keep(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self.last_lines.append(text if len(text) <= _KEPT_BYTES else f"{text[:_KEPT_BYTES]}...")


@final
class OutputPipe:
    """The reading end of one stream of a rank; lines go to descriptor `target` of this process."""

    def __init__(self, output: RankOutput, target: int) -> None:
        self._output = output
        self._target = target
        self._prefix = f"[rank {output.rank}] ".encode()
        self._rest = b""
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reading, False)

    def fileno(self) -> int:
        return self._reading

    def close_writing(self) -> None:
        """Close this process's copy of the end that the rank writes to."""
        if self.writing >= 0:
            os.close(self.writing)
            self.writing = -1

    def relay(self) -> bool:
        """Pass on the lines that have come; False when there is no writer left."""
        data = self._read()
        if data:
            lines, self._rest = split_lines(self._rest + data)
            self._pass_on(lines)
        return data != b""

    def close(self) -> None:
        """Pass on what has come until now, an unfinished line too, and close the pipe."""
        self.close_writing()
        if self._reading < 0:
            return
        # A process that the rank left behind may hold the other end: what is there now is all of it.
        while data := self._read():
            lines, self._rest = split_lines(self._rest + data)
            self._pass_on(lines)
        self._pass_on([self._rest] if self._rest else [])
        os.close(self._reading)
        self._reading = -1

    def _read(self) -> bytes | None:
        """Return what has come; None for nothing yet, empty when there is no writer left."""
        try:
            return os.read(self._reading, _READ_BYTES)
        except BlockingIOError:
            return None

    def _pass_on(self, lines: list[bytes]) -> None:
        for line in lines:
            self._output.keep(line)
        if self._output.shown and lines:
            whole = [line if line.endswith((b"\n", b"\r")) else line + b"\n" for line in lines]
            write_all(self._target, b"".join(self._prefix + line for line in whole))


def split_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete lines, with their ends, and what is left. A carriage return at the very end may be
    the first half of a line end: it waits for the next bytes."""
    ends = [0, *(found.end() for found in _LINE_END.finditer(data))]
    lines, rest = [data[first:last] for first, last in pairwise(ends)], data[ends[-1] :]
    if len(rest) > _LONGEST_LINE:
        return [*lines, rest], b""
    return lines, rest


def write_all(descriptor: int, data: bytes) -> None:
    """Write to standard output or error of this process; nothing is lost where that is slow, and what has no
    reader is dropped."""
    view = memoryview(data)
    # A closed pipe, a full disk or a terminal that is gone is no reason to end the ranks.
    with contextlib.suppress(OSError):
        while view:
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:
                os.set_blocking(descriptor, True)
