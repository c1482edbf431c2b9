"""Waiting on a 32-bit word of shared memory: a short spin, then the kernel's futex.

One writer per word. Publishing is a plain store (after a fence where the processor reorders stores) and a
wake-up call. Knows nothing of what the words mean or of who may have died; the caller gets control back
every few milliseconds to look.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading

_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_MACHINE = platform.machine()
_FUTEX = _FUTEX_NUMBERS.get(_MACHINE, -1)
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
)
_fence_lock = threading.Lock()


def available() -> bool:
    return _FUTEX >= 0 and hasattr(os, "memfd_create")


def wake(address: int) -> None:
    """Wakes everybody who waits on the word at `address`."""
    _syscall(_FUTEX, address, _WAKE, _EVERYBODY, None, None, 0)


def wait(address: int, value: int, seconds: float) -> None:
    """Returns when the word at `address` no longer holds `value`, when woken, or after `seconds`. May
    return early."""
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
    """x86 keeps stores in order."""


fence = _no_fence if _MACHINE in ("x86_64", "AMD64", "i686") else _fence_by_lock


def reached(word: int, target: int) -> bool:
    """Whether a 32-bit counter that wraps has come as far as `target`."""
    return (word - target) & 0xFFFFFFFF < 0x80000000
