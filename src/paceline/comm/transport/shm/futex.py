"""Wait on a 32-bit word of shared memory by the kernel's futex.

One writer per word. Publishing is a plain store (after a fence where the processor reorders stores) and a
wake-up call. No wake-up is lost between a waiter's look at the word and its sleep: the kernel compares the
word with the value that the waiter saw, under its own lock, and does not sleep if they differ. A waiter
that dies holds nothing; a writer that dies is noticed by the caller, which gets control back every few
milliseconds to check for it. Shared, not FUTEX_PRIVATE: the waiters are other processes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from ctypes import c_int, c_long, c_uint32, c_void_p

_MACHINE = platform.machine()
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(_MACHINE, -1)
_WAIT, _WAKE = 0, 1
_ALL_WAITERS = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", c_long), ("nanoseconds", c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = c_long
_syscall.argtypes = (c_long, c_void_p, c_int, c_uint32, c_void_p, c_void_p, c_uint32)
_fence_lock = threading.Lock()


def available() -> bool:
    return _FUTEX >= 0 and hasattr(os, "memfd_create")


def wake(address: int) -> None:
    """Wake all processes that wait on the word at `address`."""
    _syscall(_FUTEX, address, _WAKE, _ALL_WAITERS, None, None, 0)


def wait(address: int, value: int, seconds: float) -> None:
    """Return when the word at `address` no longer holds `value`, when woken, or after `seconds`; may return
    early. Errors are ignored: each of them means that the word has to be looked at again."""
    # The kernel compares the word with `value` under the lock that `wake` takes, too. A writer that stores
    # before this comparison makes the call return at once; one that stores after it finds the sleeper queued
    # and wakes it. So `value` must be what the caller saw when it decided to sleep, never a fresh reading.
    # The timeout is not for lost wake-ups but for writers that die: they wake no sleeper.
    timeout = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _syscall(_FUTEX, address, _WAIT, value, ctypes.byref(timeout), None, 0)


def _fence_by_lock() -> None:
    # Two uncontended lock round trips order all earlier stores before all later ones on processors whose
    # atomics are sequentially consistent among themselves (ARMv8, POWER with sync): release, then acquire.
    with _fence_lock:
        pass
    with _fence_lock:
        pass


def _no_fence() -> None:
    """Do nothing: x86 keeps stores in order, and loads too."""


fence = _no_fence if _MACHINE in ("x86_64", "AMD64", "i686") else _fence_by_lock


def reached(word: int, target: int) -> bool:
    """Return whether a 32-bit counter that wraps has reached `target`: less than half its range beyond."""
    return (word - target) & 0xFFFFFFFF < 0x80000000
