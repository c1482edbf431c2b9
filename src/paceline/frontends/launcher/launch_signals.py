"""Signals that the launcher gets: collected in order, and told to its loop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""End the job; ranks get them too. SIGUSR1 and SIGUSR2 are only passed on."""
PASSED_ON: Final = (signal.SIGUSR1, signal.SIGUSR2)


@final
class SignalInbox:
    """Signals that this process got, in order, and a way to wake it from another thread."""

    def __init__(self) -> None:
        self.wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.received: list[int] = []

    def put(self, number: int, frame: object) -> None:
        self.received.append(number)
        self.wake()

    def wake(self) -> None:
        # A full pipe wakes as well.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"!")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_read, 4096)

    def take(self) -> list[int]:
        taken, self.received = self.received, []
        return taken

    def close(self) -> None:
        os.close(self.wake_read)
        os.close(self._wake_write)


@contextmanager
def listening() -> Iterator[SignalInbox]:
    """Collect signals inside the block; only the main thread can, others leave them as they are."""
    inbox = SignalInbox()
    previous: dict[int, object] = {}
    if threading.current_thread() is threading.main_thread():
        for number in map(int, (*STOP_SIGNALS, *PASSED_ON)):
            # What the launcher's caller ignores (nohup) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, inbox.put)
    try:
        yield inbox
    finally:
        for taken, handler in previous.items():
            signal.signal(taken, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        inbox.close()
