"""A time at which the kernel ends this process, whatever it does then: it needs neither a thread nor a lock.

For a process that must not stay behind when all that would have ended it are gone. Armed and disarmed from
any thread; not inherited by forked processes. Linux only.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from typing import Final, final

_log = logging.getLogger(__name__)

_BY_SIGNAL: Final = 0


class _SignalEvent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("padding", ctypes.c_char * 48),
    )


class _Times(ctypes.Structure):
    _fields_ = (
        ("every_seconds", ctypes.c_long),
        ("every_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


@final
class KernelDeadline:
    """One timer of the kernel. Where the kernel grants none (seccomp), log a warning."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        # Before glibc 2.34 timers were in a separate library.
        separate = not hasattr(libc, "timer_create")
        self._libc = ctypes.CDLL("librt.so.1", use_errno=True) if separate else libc
        self._timer = ctypes.c_void_p()
        self._is_there = False

    def arm(self, seconds: float) -> None:
        """End this process after `seconds`; the last call counts."""
        self._set(max(seconds, 0.001))  # 0 would disarm it

    def disarm(self) -> None:
        """Cancel the deadline."""
        if self._is_there:
            self._set(0.0)

    def close(self) -> None:
        """Give the timer back."""
        if self._is_there:
            self._is_there = False
            self._libc.timer_delete(self._timer)

    def _set(self, seconds: float) -> None:
        failed = 0
        if not self._is_there:
            event = _SignalEvent(None, signal.SIGKILL, _BY_SIGNAL, b"")
            clock, event_at, timer_at = time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)
            failed = self._libc.timer_create(clock, event_at, timer_at)
            self._is_there = not failed
        if not failed:
            times = _Times(0, 0, *divmod(int(seconds * 1e9), 10**9))
            failed = self._libc.timer_settime(self._timer, 0, ctypes.byref(times), None)
        if failed:
            reason = os.strerror(ctypes.get_errno())
            _log.warning("no timer ends this worker should it be forgotten: %s", reason)
