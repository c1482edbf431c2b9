"""Log lines that say who speaks: `time level [rank 2 step 41] message`.

Rank and step come from the context of the caller (`at`, `set_step`), with the process's own rank as a
fallback, so that ranks that are threads and ranks that are processes log alike. Importing configures nothing;
`setup` does, for the `paceline` logger only. Must not know where rank and step come from.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TextIO, final

from paceline.core.clock import Clock, MonotonicClock
from paceline.core.fold import Folded, Folder, format_ranks

LOGGER = "paceline"


@dataclass(frozen=True)
class Position:
    """Who is speaking, as far as known."""

    rank: int | None = None
    step: int | None = None


_here: ContextVar[Position | None] = ContextVar("paceline_log_position", default=None)
_process = [Position()]


def position() -> Position:
    """The position that a line logged here and now would carry."""
    return _here.get() or _process[0]


def set_process_rank(rank: int | None) -> None:
    """Say once which rank this process is; threads started later have it too."""
    _process[0] = replace(_process[0], rank=rank)


def set_step(step: int | None) -> None:
    """Say which step the calling thread or task is in, until told otherwise."""
    _here.set(replace(position(), step=step))


@contextmanager
def at(rank: int | None = None, step: int | None = None) -> Iterator[None]:
    """Everything logged inside carries this rank and step; what is not given stays as it was."""
    now = position()
    token = _here.set(Position(now.rank if rank is None else rank, now.step if step is None else step))
    try:
        yield
    finally:
        _here.reset(token)


@final
class PositionFormatter(logging.Formatter):
    """`time level [rank 2 step 41] message`; what is not known is left out."""

    def format(self, record: logging.LogRecord) -> str:
        where = position_of(record)
        ranks = () if where.rank is None else (where.rank,)
        return _head(self, record, ranks, where.step) + _body(self, record)


def position_of(record: logging.LogRecord) -> Position:
    """The record's own `rank` and `step` (given with `extra=`), else those of the context."""
    now = position()
    return Position(getattr(record, "rank", now.rank), getattr(record, "step", now.step))


def setup(
    level: int | str = logging.INFO,
    *,
    stream: TextIO | None = None,
    rank: int | None = None,
    handler: logging.Handler | None = None,
) -> logging.Handler:
    """Send Paceline's log lines to `stream` (stderr) or to `handler`; a second call replaces the first.

    Undo with `teardown`.
    """
    teardown()
    if rank is not None:
        set_process_rank(rank)
    if handler is None:
        handler = logging.StreamHandler(stream or sys.stderr)
        handler.setFormatter(PositionFormatter())
    logger = logging.getLogger(LOGGER)
    handler.set_name(LOGGER)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return handler


def teardown() -> None:
    """Take back what `setup` did."""
    logger = logging.getLogger(LOGGER)
    for handler in [handler for handler in logger.handlers if handler.get_name() == LOGGER]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    _process[0] = Position()


@dataclass(frozen=True)
class _Line:
    """What must be equal for two ranks' lines to become one; the record only lends its time and level."""

    level: int
    step: int | None
    message: str
    record: logging.LogRecord = field(compare=False)


@final
class FoldingHandler(logging.Handler):
    """For one process that hears many ranks: equal lines within `window` seconds become one, `[ranks 0-3]`.

    A thread writes out what has waited long enough; it starts with the first line and ends with `close`.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        window: float = 0.2,
        world_size: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__()
        self._stream = stream or sys.stderr
        self._clock = clock or MonotonicClock()
        self._folder: Folder[_Line] = Folder(window=window, world_size=world_size)
        self._wake = threading.Condition()
        self._flusher: threading.Thread | None = None
        self._closed = False
        self.setFormatter(logging.Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        where = position_of(record)
        formatter = self.formatter or logging.Formatter()
        line = _Line(record.levelno, where.step, _body(formatter, record), record)
        with self._wake:
            if where.rank is None:
                # Nobody to fold with; what was said before it must still come before it.
                self._write(self._folder.flush())
                self._write([Folded(line=line, ranks=(), first=0.0)])
                return
            self._write(self._folder.feed(where.rank, line, self._clock.now()))
            if self._flusher is None and not self._closed:
                self._flusher = threading.Thread(target=self._flush_late, name="paceline-log", daemon=True)
                self._flusher.start()
            self._wake.notify()

    def _write(self, folded: list[Folded[_Line]]) -> None:
        formatter = self.formatter or logging.Formatter()
        for item in folded:
            head = _head(formatter, item.line.record, item.ranks, item.line.step)
            self._stream.write(f"{head}{item.line.message}\n")
        if folded:
            self._stream.flush()

    def _flush_late(self) -> None:
        with self._wake:
            while not self._closed:
                deadline = self._folder.deadline
                now = self._clock.now()
                if deadline is None:
                    self._wake.wait()
                elif deadline > now:
                    self._wake.wait(deadline - now)
                else:
                    self._write(self._folder.poll(now))

    def flush(self) -> None:
        with self._wake:
            self._write(self._folder.flush())

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._write(self._folder.flush())
            self._wake.notify()
        if self._flusher is not None:
            self._flusher.join()
            self._flusher = None
        super().close()


def _head(
    formatter: logging.Formatter, record: logging.LogRecord, ranks: tuple[int, ...], step: int | None
) -> str:
    parts = ([format_ranks(ranks)] if ranks else []) + ([f"step {step}"] if step is not None else [])
    where = f" [{' '.join(parts)}]" if parts else ""
    time = formatter.formatTime(record, "%H:%M:%S")
    return f"{time}.{int(record.msecs):03d} {record.levelname.lower()}{where} "


def _body(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info:
        text += "\n" + formatter.formatException(record.exc_info)
    if record.stack_info:
        text += "\n" + formatter.formatStack(record.stack_info)
    return text
