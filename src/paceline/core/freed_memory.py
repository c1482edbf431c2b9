"""Memory that is freed and allocated again by every step: keep it in the process instead of returning it.

A training step allocates and frees the same hundreds of megabytes again and again; getting them from the
kernel as fresh zeroed pages each time costs up to a fifth of the step on a CPU. The thresholds of the C
library decide which blocks go back; they are the process's own, so what keeps memory says so here.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

# From malloc.h of the GNU C library.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST: Final = (1 << 31) - 1
_LARGE_BLOCK: Final = 1 << 30
_USUAL: Final = 128 << 10  # both thresholds, as the library begins
_VARIABLES: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")

_lock = threading.Lock()
_open_scopes = 0
_for_good = False


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> None:
    """Reuse freed memory in this process from now on; it is not undone. Thresholds that the user has set in
    the environment stay."""
    global _for_good
    if thresholds_are_set(environment):
        return
    with _lock:
        _for_good = True
        _set_thresholds(_LARGE_BLOCK, _LARGEST)


@contextmanager
def kept_freed_memory(environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Reuse memory that is freed inside the block, and return it after the block; scopes may overlap.
    Thresholds that the user has set in the environment stay."""
    global _open_scopes
    if thresholds_are_set(environment):
        yield
        return
    with _lock:
        _open_scopes += 1
        if _open_scopes == 1 and not _for_good:
            _set_thresholds(_LARGE_BLOCK, _LARGEST)
    try:
        yield
    finally:
        with _lock:
            _open_scopes -= 1
            if _open_scopes == 0 and not _for_good:
                _set_thresholds(_USUAL, _USUAL)
                _give_back()


def thresholds_are_set(environment: Mapping[str, str]) -> bool:
    """Return whether the user chose when the C library returns memory."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    return any(name in environment for name in _VARIABLES) or "glibc.malloc." in tunables


def _set_thresholds(mapped: int, trimmed: int) -> None:
    # Another C library than GNU's has no such function: training is as right there, and a little slower.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and mallopt(_MMAP_THRESHOLD, mapped):
        mallopt(_TRIM_THRESHOLD, trimmed)


def _give_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
