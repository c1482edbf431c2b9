"""A worker's own log file: the lines of its loggers and its warnings, for the time of a run.

The terminal is shared by all workers. Lines without a handler, which Python writes to the
terminal, come there from the first rank only; every rank's are in its file. Handlers that the program has set
up are left alone.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO, final

from paceline.core import log

_log = logging.getLogger(__name__)


def file_name(rank: int) -> str:
    return f"rank-{rank}.log"


@final
class WorkerLog:
    """The log of one rank, open until `close`. A run continues without it where it cannot be written."""

    def __init__(self, folder: Path, rank: int, workers: int) -> None:
        self._stack = ExitStack()
        self._rank = rank
        if log.position().rank is None:
            log.hold_process_rank(rank)
            self._stack.callback(log.release_process_rank)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: _RunLogHandler | None = _RunLogHandler(folder / file_name(rank), encoding="utf-8")
        except OSError as error:
            self._file = None
            _log.warning("rank %d keeps no log: %s cannot be written: %s", rank, folder, error.strerror)
            return
        self._stack.callback(self._file.close)
        self._file.setFormatter(log.PositionFormatter())
        # Ranks may be threads of one process.
        self._file.addFilter(lambda record: log.position_of(record).rank in (None, rank))
        self._attach(self._file)
        self._keep_warnings(self._file)
        self.say(logging.INFO, f"rank {rank} of {workers}: pid {os.getpid()} on {socket.gethostname()}")

    def say(self, level: int, text: str, error: BaseException | None = None) -> None:
        """Write a line, with the error's traceback if there is one, to this file alone."""
        if self._file is not None:
            trace = None if error is None else (type(error), error, error.__traceback__)
            self._file.handle(logging.LogRecord(__name__, level, __file__, 0, text, (), trace))

    def close(self) -> None:
        self._stack.close()

    def _attach(self, file: logging.Handler) -> None:
        root, ours = logging.getLogger(), logging.getLogger(log.LOGGER)
        alone = not root.handlers
        for logger in [root] if ours.propagate else [root, ours]:
            logger.addHandler(file)
            self._stack.callback(logger.removeHandler, file)
        if not alone:
            return
        # With a handler at the root, Python no longer writes what has none to the terminal.
        if self._rank == 0:
            terminal = _Terminal(file)
            root.addHandler(terminal)
            self._stack.callback(root.removeHandler, terminal)
        if ours.level == logging.NOTSET:
            ours.setLevel(logging.INFO)
            self._stack.callback(ours.setLevel, logging.NOTSET)

    def _keep_warnings(self, kept: logging.Handler) -> None:
        if getattr(logging, "_warnings_showwarning", None) is not None:
            return  # logging.captureWarnings is on: they come as log lines
        before = warnings.showwarning
        on_terminal, is_open = self._rank == 0, True

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if is_open:
                text = warnings.formatwarning(message, category, filename, lineno, line).rstrip()
                record = logging.LogRecord("py.warnings", logging.WARNING, filename, lineno, text, (), None)
                kept.handle(record)
            if on_terminal or not is_open:
                before(message, category, filename, lineno, file, line)

        def put_back() -> None:
            nonlocal is_open
            is_open = False
            if warnings.showwarning is show:
                warnings.showwarning = before

        warnings.showwarning = show
        self._stack.callback(put_back)


@final
class _RunLogHandler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Do nothing: a full disk must not fill the terminal with complaints about its log."""


@final
class _Terminal(logging.Handler):
    """Pass records that only the worker's file handler receives to `logging.lastResort`, as Python does
    without handlers."""

    def __init__(self, ours: logging.Handler) -> None:
        super().__init__(logging.WARNING)
        self._ours = ours

    def emit(self, record: logging.LogRecord) -> None:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler not in (self, self._ours) for handler in logger.handlers):
                return
            logger = logger.parent if logger.propagate else None
        if logging.lastResort is not None:
            logging.lastResort.handle(record)
