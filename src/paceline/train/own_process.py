"""What a process that exists for training alone may change about itself; a user's own process is left alone.

A worker takes over how precise the caller wants fp32 products, and keeps memory that it frees: a training
step allocates and frees the same hundreds of megabytes again and again, and getting them from the kernel as
fresh zeroed pages each time costs up to a fifth of the step on a CPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

# From malloc.h of the GNU C library.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = (1 << 31) - 1
_LARGE_BLOCK = 1 << 30


@dataclass(frozen=True)
class OwnProcess:
    """The caller's settings that a worker takes over."""

    matmul_precision: str = "highest"

    @classmethod
    def like_this_one(cls) -> OwnProcess:
        return cls(torch.get_float32_matmul_precision())

    def settle(self) -> None:
        """Changes the calling process, for good."""
        torch.set_float32_matmul_precision(self.matmul_precision)
        keep_freed_memory()


def keep_freed_memory() -> bool:
    """Asks the C library to reuse freed memory instead of returning it; whether it understood."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        # Another C library than GNU's: training is as right, and a little slower.
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK) and mallopt(_TRIM_THRESHOLD, _LARGEST))
