"""The file of a study: the operations of Optuna's journal storage, one JSON line each, so that Optuna, its
dashboard and its plots read the file as their own.

One process writes it, under a lock of the study's folder. What belongs together is one write: a trial with
all of its parameters; the end of a trial with all that was reported in it. Between the two, what a trial
reports is only in memory. So the file holds a trial as asked for or as over, and nothing in between: a trial
whose process died is repeated as if it had never begun, in this process (`forget`) or in the next one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from optuna.storages.journal import BaseJournalBackend

from paceline.core.errors import PlatformError, ResourceError

Operation = dict[str, Any]

# In the first operation of a write: how many there are. Optuna leaves alone what it does not know.
_TOGETHER = "paceline_together"
# Optuna's number of the operation that makes a trial; those of what a trial has are larger.
_CREATE_TRIAL = 4


def read_operations(path: Path) -> tuple[list[Operation], int]:
    """Return the operations in a file, and where the last complete write ends. A writer that was killed, or a
    power cut, may leave a part of the last one."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlatformError(
            f"the study's file {path} cannot be read: {error.strerror}", remedy="give the study's folder"
        ) from error
    operations: list[Operation] = []
    begins: list[int] = []  # of each operation
    end = offset = 0
    complete = 0  # operations that a complete write has put there
    for line in data.split(b"\n")[:-1]:
        try:
            operations.append(json.loads(line))
        except ValueError as error:
            raise PlatformError(
                f"the study's file {path} is damaged at byte {offset}: {error}",
                remedy="restore it, or begin another study",
            ) from error
        begins.append(offset)
        offset += len(line) + 1
        number = len(operations)
        complete = max(complete, number - 1 + int(operations[-1].get(_TOGETHER, 1)))
        if complete == number:
            end = offset
    kept = sum(begin < end for begin in begins)
    return operations[:kept], end


@final
class ReadOnlyLog(BaseJournalBackend):
    """The operations in a file as they were at one moment."""

    def __init__(self, path: Path) -> None:
        self._operations, _ = read_operations(path)

    def read_logs(self, log_number_from: int) -> list[Operation]:
        return self._operations[log_number_from:]

    def append_logs(self, logs: list[Operation]) -> None:
        raise PlatformError("a study that is only looked at was about to be changed")


@final
class StudyLog(BaseJournalBackend):
    """The writing end. To be closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: list[Operation] = []
        self._pending: dict[int, list[Operation]] = {}  # of running trials, by Optuna's id
        self._together: list[Operation] | None = None
        try:
            self._file = os.open(
                path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
            )
        except OSError as error:
            raise PlatformError(
                f"the study's file {path} cannot be opened: {error.strerror}",
                remedy="check the path and its permissions",
            ) from error
        try:
            self._written, end = read_operations(path)
            os.ftruncate(self._file, end)
        except BaseException:
            os.close(self._file)
            raise
        self._visible = [*self._written]

    def read_logs(self, log_number_from: int) -> list[Operation]:
        return self._visible[log_number_from:]

    def append_logs(self, logs: list[Operation]) -> None:
        self._visible += logs
        if self._together is not None:
            self._together += logs
            return
        for one in logs:
            if "trial_id" in one:
                self._pending.setdefault(one["trial_id"], []).append(one)
            else:
                self._write([one])

    @contextmanager
    def one_write(self, ending: int | None = None) -> Iterator[None]:
        """Write what is appended inside the block at once when it ends; `ending`: the trial that is over,
        whose reports come first. An error inside leaves the file as it was."""
        self._together = [] if ending is None else self._pending.pop(ending, [])
        try:
            yield
            self._write(self._together)
        finally:
            self._together = None

    @property
    def has_trials(self) -> bool:
        """Whether there is a trial."""
        return any(one["op_code"] >= _CREATE_TRIAL for one in self._written)

    @property
    def is_empty(self) -> bool:
        """Whether there is not even a study."""
        return not self._written

    def clear(self) -> None:
        """Begin the file anew."""
        os.ftruncate(self._file, 0)
        self._written, self._visible = [], []
        self._pending.clear()

    def forget(self, trial: int) -> None:
        """Drop what a trial has reported. A storage that was made before does not notice: make another."""
        self._pending.pop(trial, None)
        self._visible = [*self._written, *(one for logs in self._pending.values() for one in logs)]

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, operations: list[Operation]) -> None:
        if not operations:
            return
        first, *rest = operations
        shown = [{**first, _TOGETHER: len(operations)}, *rest] if rest else [first]
        data = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in shown).encode()
        size = os.fstat(self._file).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
            os.fdatasync(self._file)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, size)
            raise ResourceError(
                f"the study's file {self.path} cannot be written: {error.strerror}",
                remedy="free space on its disk; then resume the study",
            ) from error
        self._written += operations
