"""Claims: a name that one process of this machine holds until it gives it up or ends.

A claim is an abstract socket of the kernel, which frees the name with its process however that ends, a kill
included: there is no file that a lost process leaves behind.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Final

GPU_CLAIMS_VARIABLE: Final = "PACELINE_GPU_CLAIMS"
"""Names the workers that share the GPUs of this machine: each of them takes one that no other has."""

_own_gpus: dict[tuple[int, str], tuple[int, socket.socket]] = {}  # of (process, scope)


def claim(name: str) -> socket.socket | None:
    """Return a socket that stands for the name until it is closed; None where another process has it."""
    held = socket.socket(socket.AF_UNIX)
    try:
        # The kernel takes names of 107 bytes at most.
        held.bind(b"\0paceline-" + hashlib.sha256(name.encode()).hexdigest().encode())
    except OSError:
        held.close()
        return None
    return held


def claimed_gpu(count: int, preferred: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return this process's GPU, a number below `count`: `preferred`, unless GPUs are shared by claims and
    another process has it. Where all are taken, GPUs are shared by `preferred` too."""
    scope = environment.get(GPU_CLAIMS_VARIABLE, "")
    if not scope:
        return preferred
    key = (os.getpid(), scope)
    if key not in _own_gpus:
        names = _names(count, environment)
        for index in (preferred, *(index for index in range(count) if index != preferred)):
            held = claim(f"gpu {scope} {names[index]}")
            if held is not None:
                _own_gpus[key] = (index, held)
                break
    return _own_gpus[key][0] if key in _own_gpus else preferred


def _names(count: int, environment: Mapping[str, str]) -> Sequence[str]:
    """Return what the visible GPUs are called on the machine: processes may see different ones of them."""
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return (
        visible[:count] if len(visible) >= count and all(visible[:count]) else [str(n) for n in range(count)]
    )
