"""Signals that ask a run to stop: finish the step, save, exit; the second one exits at once.

SIGTERM and SIGUSR1 ask, and so does Ctrl-C (SIGINT) where it would interrupt the program. A run that stopped
ends its process with code 75 (EX_TEMPFAIL: saved, start it again with resume="auto"), after Ctrl-C with a
KeyboardInterrupt; a worker whose supervisor stayed away saves and ends with code 76. Handlers are installed
for the time of a run only, and only in the main thread; the ones of before come back.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, final

from paceline.control.spool import (
    STOPPED_EXIT_CODE as STOPPED_EXIT_CODE,
    SUPERVISOR_LOST_EXIT_CODE as SUPERVISOR_LOST_EXIT_CODE,
)
from paceline.core import atomic_file
from paceline.core.errors import PlatformError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
CTRL_C = "Ctrl-C"
OTHER_RANK = "a signal to another rank"
SAME_SIGNAL_SECONDS = 5.0
"""Within which a second signal is no second request: a scheduler signals every process of its job, and a
launcher or an agent among them passes the same signal on."""


@final
class StopRequest:
    """Request to stop, and its `reason`: a signal to this process, or one to its starter, which then leaves a
    file."""

    def __init__(self, file: Path | None = None) -> None:
        self.reason: str | None = None
        self._file = file

    @property
    def from_launcher(self) -> bool:
        """Whether the process that started this one handles signals too, and holds the run's lock."""
        return self._file is not None

    def ask(self, reason: str) -> None:
        self.reason = self.reason or reason

    def asked(self) -> bool:
        if self.reason is None and self._file is not None and os.path.exists(self._file):
            self.reason = self._file.read_text() or "a request"
        return self.reason is not None


def write_stop_file(file: Path, reason: str) -> None:
    """Ask the run that polls this file to stop."""
    try:
        try:
            atomic_file.replace(file, [reason.encode()], durable=False)
        except OSError:
            # A full disk has no room for a word, and mostly for an empty file.
            file.touch()
    except OSError as error:
        raise PlatformError(
            f"{reason} asked the run to stop, and its workers cannot be notified: {file}: {error.strerror}",
            remedy="see what became of the run's folder; send the signal to a worker to stop it as well",
        ) from error


NOTHING_KEPT = "nothing is kept, because run_dir=False"


def saved_sentence(version: int, step: int) -> str:
    """Return a sentence on the version that an ended run can be resumed from."""
    return f'version {version} of step {step} is saved: start again with resume="auto" to continue from there'


class Stopped(SystemExit):
    """Raised by `fit` after a run stopped on request and saved: ends the process with STOPPED_EXIT_CODE.

    `history` is how far it came: to the end, if the signal came too late to change that; None where nothing
    had begun. Catch it to do something else than exit.
    """

    def __init__(self, reason: str, history: Any) -> None:
        super().__init__(STOPPED_EXIT_CODE)
        self.reason = reason
        self.history = history

    def __str__(self) -> str:
        return f"stopped ({self.reason}): start again with resume='auto' to continue"


def interrupted(message: str, history: Any = None) -> KeyboardInterrupt:
    """Return what `fit` raises after Ctrl-C; its `history` is as in Stopped. A KeyboardInterrupt itself:
    Python ends a process by SIGINT, which shells look for, only for this very class."""
    error = KeyboardInterrupt(message)
    error.history = history  # type: ignore[attr-defined]
    return error


def ending(reason: str, history: Any, saved: str = "") -> BaseException:
    """Return what to raise after a run that was asked to stop."""
    # Who asked kills the process after a while. Most of the time that Python takes to exit goes into
    # collecting torch's objects one by one, for nothing: with this they are left to the kernel.
    atexit.register(gc.freeze)
    if reason != CTRL_C:
        return Stopped(reason, history)
    step = history.steps[-1].step if history is not None and history.steps else 0
    after = f"stopped by Ctrl-C after step {step}" if step else "stopped by Ctrl-C before the first step"
    return interrupted(f"{after}; {saved}" if saved else after, history)


@contextmanager
def listening(
    on_first: Callable[[str], None],
    *,
    to_the_end: bool = False,
    ctrl_c: bool = False,
    same_seconds: float = 0.0,
) -> Iterator[None]:
    """Call `on_first` with the signal's name at the first one; ends the process at the second. One that
    comes within `same_seconds` of the first is the same request.

    With `to_the_end` the process has nothing to do afterwards but to hand over its result, and signals that
    come then are ignored, instead of killing it. With `ctrl_c` the first Ctrl-C asks too, and the next is a
    KeyboardInterrupt as ever; one that is ignored, or that the program handles itself, is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked, asked_at = False, 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked, asked_at
        if asked and time.monotonic() - asked_at < same_seconds:
            return
        if asked:
            # Not sys.exit: whatever this process is doing right now may never return to Python code that
            # lets an exception through.
            os._exit(128 + number)
        asked, asked_at = True, time.monotonic()
        on_first(signal.Signals(number).name)

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if asked:
            raise KeyboardInterrupt
        asked = True
        on_first(CTRL_C)

    previous = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    if ctrl_c and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        previous[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            kept = signal.SIG_DFL if handler is None else handler
            ignored = to_the_end and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if ignored else kept)
