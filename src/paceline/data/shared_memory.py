"""Batches travel from the worker processes of a loader through files in /dev/shm: what is said when it is
full.

A container has 64 MB of it unless told otherwise. Must not know where batches come from.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import ResourceError

_FOLDER = "/dev/shm"
# How torch and the kernel put it: no room for a new file, or a page of one that could not be had.
_WORDS = ("shared memory(shm)", "insufficient shared memory", "Bus error")


def full(error: BaseException) -> ResourceError | None:
    """The error as one that says what to do, where it is for want of shared memory."""
    text = str(error)
    if not any(word in text for word in _WORDS):
        return None
    return ResourceError(
        f"{_FOLDER}{_size()} is full: the worker processes of a DataLoader hand their batches over there "
        f"({text})",
        remedy="make it larger (docker run --shm-size=2g, Kubernetes: an emptyDir with medium: Memory at "
        "/dev/shm), use fewer workers or a smaller prefetch_factor, or num_workers=0",
    )


def shared(data: Any) -> Any:
    """The same batch with its tensors in shared memory now, where an error can be told to the reader: later,
    on their way, torch drops the batch, and the reader waits for ever."""
    if isinstance(data, Tensor):
        if data.device.type == "cpu" and data.layout is torch.strided and not data.is_shared():  # type: ignore[no-untyped-call]
            data.share_memory_()  # type: ignore[no-untyped-call]
    elif isinstance(data, dict):
        for value in data.values():
            shared(value)
    elif isinstance(data, list | tuple):
        for value in data:
            shared(value)
    return data


def _size() -> str:
    try:
        found = os.statvfs(_FOLDER)
    except OSError:
        return ""
    return f" ({found.f_blocks * found.f_frsize / 2**20:.0f} MiB)"
