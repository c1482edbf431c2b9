"""A time at which the kernel ends this process, whatever it does then: it needs neither a thread nor a lock.

For a process that must not stay behind when all that would have ended it are gone. Armed and disarmed from
any thread; not inherited by forked processes. Linux only. Must not know why it is armed.
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


class _Event(ctypes.Structure):
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
class LastResort:
    """One timer of the kernel. Where there is none to be had (seccomp) a warning says so."""

    def __init__(self) -> None:
        self._libc = _library()
        self._timer = ctypes.c_void_p()
        self._is_there = False

    def arm(self, seconds: float) -> None:
        """End this process in so many seconds; the last call counts."""
        self._set(max(seconds, 0.001))  # 0 would disarm it

    def disarm(self) -> None:
        """Not any longer."""
        if self._is_there:
            self._set(0.0)

    def close(self) -> None:
        """Give the timer back."""
        if self._is_there:
            self._is_there = False
            self._libc.timer_delete(self._timer)

    def _set(self, seconds: float) -> None:
        if not self._is_there and not self._create():
            return
        whole, rest = divmod(int(seconds * 1e9), 10**9)
        times = _Times(0, 0, whole, rest)
        if self._libc.timer_settime(self._timer, 0, ctypes.byref(times), None) != 0:
            self._complain()

    def _create(self) -> bool:
        event = _Event(None, signal.SIGKILL, _BY_SIGNAL, b"")
        clock, event_at, timer_at = time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)
        made = self._libc.timer_create(clock, event_at, timer_at)
        self._is_there = made == 0
        if not self._is_there:
            self._complain()
        return self._is_there

    def _complain(self) -> None:
        code = ctypes.get_errno()
        _log.warning("no timer ends this worker should it be forgotten: %s", os.strerror(code))


def _library() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    # Before glibc 2.34 timers were in a library of their own.
    return libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)
