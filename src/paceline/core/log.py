"""Log lines with rank and step: `time level [rank 2 step 41] message`.

Rank and step come from the context of the caller (`at`), with the process's own as a fallback, so that
ranks that are threads and ranks that are processes log alike. Importing configures nothing; `setup` does, for
the `paceline` logger only. `label_records` gives the records of every logger of the process a `rank` and a
`step`, for formats of the user's own: `%(rank)d`.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TextIO, final

LOGGER = "paceline"


@dataclass(frozen=True)
class LogPosition:
    """The rank and step that a line belongs to, as far as known."""

    rank: int | None = None
    step: int | None = None


_here: ContextVar[LogPosition | None] = ContextVar("paceline_log_position", default=None)
_process = [LogPosition()]
_steps: list[Callable[[], int]] = []  # of the runs that this process is in: each says which step it computes
_lock = threading.Lock()


def position() -> LogPosition:
    """Return the position that a line logged here and now would carry."""
    where = _here.get() or _process[0]
    return where if where.step is not None or not _steps else replace(where, step=_steps[-1]())


def set_process_rank(rank: int | None) -> None:
    """Set the rank of this process; threads started later have it too."""
    _process[0] = replace(_process[0], rank=rank)


@dataclass
class _Holders:
    count: int = 0
    outside: LogPosition = LogPosition()  # the process's own position before the first of them


_holders = _Holders()


def hold_process_rank(rank: int) -> None:
    """Give this process a rank, unless it has one, until `release_process_rank` was called as often. Its runs
    may begin and end in any order: after the last one the position is that before the first."""
    with _lock:
        if not _holders.count:
            _holders.outside = _process[0]
        if _process[0].rank is None:
            set_process_rank(rank)
        _holders.count += 1


def release_process_rank() -> None:
    """Take back one call of `hold_process_rank`."""
    with _lock:
        _holders.count -= 1
        if not _holders.count:
            _process[0] = _holders.outside


def set_process_step(step: int | None) -> None:
    """Set the step of this process, for loops of the user's own, while its records are labelled."""
    if _labels.users:
        _process[0] = replace(_process[0], step=step)


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
        if known.get("step") == 0:
            del known["step"]  # before the first one
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


# every logger's records


@final
class _LabelledFields(dict[str, Any]):
    """A record's fields. `rank` and `step` count as absent where logging asks whether a field would be
    overwritten: `extra={"rank": 3}` stays possible, and wins."""

    def __contains__(self, name: object) -> bool:
        return name not in ("rank", "step") and super().__contains__(name)


@dataclass
class _Labels:
    users: int = 0
    inner: Callable[..., logging.LogRecord] | None = None  # the factory before ours; None: ours is not in use


_labels = _Labels()


def label_records(rank: int) -> None:
    """Give the log records of every logger of this process the fields `rank` and `step` (0 before the first
    step), until `unlabel_records` was called as often. A factory of the user's own is still called."""
    hold_process_rank(rank)
    with _lock:
        _labels.users += 1
        if _labels.inner is None:
            _labels.inner = logging.getLogRecordFactory()
            logging.setLogRecordFactory(_labelled_record)


def unlabel_records() -> None:
    """Take back one call of `label_records`; after the last one records are as they were before the first."""
    release_process_rank()
    with _lock:
        _labels.users -= 1
        if _labels.users:
            return
        if _labels.inner is not None and logging.getLogRecordFactory() is _labelled_record:
            logging.setLogRecordFactory(_labels.inner)
            _labels.inner = None
        # Else another factory was put over ours, and calls it: without users it adds nothing.


def _labelled_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    make = _labels.inner
    record = (make or logging.LogRecord)(*args, **kwargs)
    if _labels.users:
        where = position()
        record.__dict__ = _LabelledFields(record.__dict__, rank=where.rank or 0, step=where.step or 0)
    return record


@contextmanager
def labelled(rank: int, step: Callable[[], int]) -> Iterator[None]:
    """Label the records of this process with a rank and the step that a run computes, inside the block."""
    label_records(rank)
    _steps.append(step)
    try:
        yield
    finally:
        _steps.remove(step)
        unlabel_records()


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
