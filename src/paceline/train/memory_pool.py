"""Memory that is freed and allocated again by every step: keep it in the process instead of returning it.

A training step allocates and frees the same hundreds of megabytes again and again; getting them from the
kernel as fresh zeroed pages each time costs up to a fifth of the step on a CPU. A process that was started
for training keeps it for good; `paceline.memory_pool_scope` does it in a loop of the user's own.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

# From malloc.h of the GNU C library.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = (1 << 31) - 1
_LARGE_BLOCK = 1 << 30
_USUAL = 128 << 10  # both thresholds, as the library begins

_lock = threading.Lock()
_open_scopes = 0
_for_good = False


def keep_freed_memory() -> None:
    """Reuse freed memory in this process from now on; it is not undone."""
    global _for_good
    with _lock:
        _for_good = True
        _set_thresholds(_LARGE_BLOCK, _LARGEST)


@contextmanager
def memory_pool_scope() -> Iterator[None]:
    """Reuse memory that is freed inside the block instead of returning it, so that every step gets what the
    last one has freed; after the block it is returned.

    On a CPU this concerns the whole process. On a GPU, what this thread allocates inside the block comes
    from a separate pool. Numbers do not depend on it.
    """
    global _open_scopes
    pool: Any = nullcontext()
    if torch.cuda.is_available():
        pool = torch.cuda.use_mem_pool(torch.cuda.MemPool())
    with _lock:
        _open_scopes += 1
        if _open_scopes == 1 and not _for_good:
            _set_thresholds(_LARGE_BLOCK, _LARGEST)
    try:
        with pool:
            yield
    finally:
        with _lock:
            _open_scopes -= 1
            if _open_scopes == 0 and not _for_good:
                _set_thresholds(_USUAL, _USUAL)
                _give_back()


def _set_thresholds(mapped: int, trimmed: int) -> None:
    # Another C library than GNU's has no such function: training is as right there, and a little slower.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and mallopt(_MMAP_THRESHOLD, mapped):
        mallopt(_TRIM_THRESHOLD, trimmed)


def _give_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
