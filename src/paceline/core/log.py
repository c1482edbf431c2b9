"""Log lines with rank and step: `time level [rank 2 step 41] message`.

Rank and step come from the context of the caller (`at`), with the process's own rank as a fallback, so that
ranks that are threads and ranks that are processes log alike. Importing configures nothing; `setup` does, for
the `paceline` logger only.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TextIO, final

LOGGER = "paceline"


@dataclass(frozen=True)
class LogPosition:
    """The rank and step that a line belongs to, as far as known."""

    rank: int | None = None
    step: int | None = None


_here: ContextVar[LogPosition | None] = ContextVar("paceline_log_position", default=None)
_process = [LogPosition()]


def position() -> LogPosition:
    """Return the position that a line logged here and now would carry."""
    return _here.get() or _process[0]


def set_process_rank(rank: int | None) -> None:
    """Set the rank of this process; threads started later have it too."""
    _process[0] = replace(_process[0], rank=rank)


@contextmanager
def at(rank: int | None = None, step: int | None = None) -> Iterator[None]:
    """Log with this rank and step inside the block; what is not given stays as it was."""
    now = position()
    token = _here.set(LogPosition(now.rank if rank is None else rank, now.step if step is None else step))
    try:
        yield
    finally:
        _here.reset(token)


@final
class PositionFormatter(logging.Formatter):
    """`time level [rank 2 step 41] message`; what is not known is left out."""

    def format(self, record: logging.LogRecord) -> str:
        known = {name: value for name, value in vars(position_of(record)).items() if value is not None}
        where = f" [{' '.join(f'{name} {value}' for name, value in known.items())}]" if known else ""
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if record.stack_info:
            text += "\n" + self.formatStack(record.stack_info)
        time = self.formatTime(record, "%H:%M:%S")
        return f"{time}.{int(record.msecs):03d} {record.levelname.lower()}{where} {text}"


def position_of(record: logging.LogRecord) -> LogPosition:
    """Return the record's own `rank` and `step` (given with `extra=`), else those of the context."""
    now = position()
    return LogPosition(getattr(record, "rank", now.rank), getattr(record, "step", now.step))


def setup(
    level: int | str = logging.INFO, *, stream: TextIO | None = None, rank: int | None = None
) -> logging.Handler:
    """Send Paceline's log lines to `stream` (stderr); a second call replaces the first. Undo with
    `teardown`."""
    teardown()
    if rank is not None:
        set_process_rank(rank)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(PositionFormatter())
    handler.set_name(LOGGER)
    logger = logging.getLogger(LOGGER)
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
    _process[0] = LogPosition()
