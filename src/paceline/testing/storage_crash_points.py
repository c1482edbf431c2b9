"""End a process at any file-system call of `core.storage`, enumerated, not sampled.

A storage makes every call through one function; the functions here stand in for it and count. In one process:

    calls = CallRecorder()                  # run once, see which calls there are
    save(CheckpointStore(open_storage(url, call=calls)))
    for point in points(calls.made):        # before, in the middle of (writes) and after each of them
        run_forked(lambda: save(CheckpointStore(kill_at(url, point))))

For a whole run, `arm(point)` in the process that is killed (a function that builds the model runs there)
covers every storage opened in it later. When the run ends by itself, the point lies behind its last call.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar, final

from paceline.core import atomic_file
from paceline.core.atomic_file import Octets
from paceline.core.storage.open_storage import open_storage
from paceline.core.storage.storage import Storage

P = ParamSpec("P")
T = TypeVar("T")

When = Literal["before", "middle", "after"]


@dataclass(frozen=True)
class CrashPoint:
    """The moment before, in the middle of or after call `number`, counted from 1; `what` describes it."""

    number: int
    when: When = "before"
    what: str = ""

    def __str__(self) -> str:
        return f"{self.when} call {self.number}{f' ({self.what})' if self.what else ''}"


@dataclass(frozen=True)
class RecordedCall:
    """A call: its name, arguments and result; `failed` if it raised."""

    name: str
    arguments: tuple[Any, ...]
    result: Any
    failed: bool

    def __str__(self) -> str:
        shown = (f"{len(item)} bytes" if isinstance(item, Octets) else repr(item) for item in self.arguments)
        return f"{self.name}({', '.join(shown)})"


@final
class CallRecorder:
    """Recorder that makes every call and records it; data is copied, because buffers are reused."""

    def __init__(self) -> None:
        self.made: list[RecordedCall] = []
        self._lock = threading.Lock()

    def __call__(self, operation: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        kept = tuple(bytes(item) if isinstance(item, Octets) else item for item in args)
        result: T | None = None
        failed = True
        try:
            result = operation(*args, **kwargs)
            failed = False
            return result
        finally:
            with self._lock:
                self.made.append(RecordedCall(operation.__name__, kept, result, failed))


@final
class Killer:
    """Killer that makes every call up to a point, at which it kills the process as `kill -9` does."""

    def __init__(self, point: CrashPoint) -> None:
        self._point = point
        self._count = 0
        self._lock = threading.Lock()

    def __call__(self, operation: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            self._count += 1
            here = self._count == self._point.number
        if here and self._point.when == "before":
            kill_self()
        if here and self._point.when == "middle":
            # Half of the data arrives; a call without data is whole or not at all, and is left whole.
            half: Any = [item[: len(item) // 2] if isinstance(item, Octets) else item for item in args]
            operation(*half, **kwargs)
            kill_self()
        try:
            return operation(*args, **kwargs)
        finally:
            if here:
                kill_self()


def points(made: Sequence[RecordedCall]) -> list[CrashPoint]:
    """Return every point of a sequence of calls, in order."""
    found = []
    for number, call in enumerate(made, start=1):
        found.append(CrashPoint(number, "before", str(call)))
        if any(isinstance(item, Octets) and len(item) > 1 for item in call.arguments):
            found.append(CrashPoint(number, "middle", str(call)))
        found.append(CrashPoint(number, "after", str(call)))
    return found


def kill_at(url: str | os.PathLike[str], point: CrashPoint) -> Storage:
    """Return a storage that kills this process at `point` of its calls."""
    return open_storage(url, call=Killer(point))


def arm(point: CrashPoint) -> None:
    """End this process at `point` of the calls of all storages opened from now on, counted together.

    There is no way back: it is for a process that is meant to die.
    """
    atomic_file.direct = Killer(point)


def kill_self() -> NoReturn:
    """Kill this process as `kill -9` does: nothing is flushed, no handler runs."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("not reached")


def run_forked(function: Callable[[], object]) -> int:
    """Run in a forked child and wait: 0 when it returned, 1 when it raised (printed), -9 when killed."""
    with warnings.catch_warnings():
        # Threads do not survive into the child; it uses none of those that its parent has.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
