"""Results in memory that the caller passed: a tensor or an array is filled in place and returned.

A value that does not fit is refused after the call has ended on this rank: the group is whole, and the other
ranks have their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.core.wording import counted


def is_buffer(value: object) -> bool:
    """Return whether a value is memory that can be filled: a tensor, or an array of numbers."""
    return isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc")


def fits(target: Any, value: Any) -> bool:
    """Return whether `value` has the shape and dtype of `target`, whichever of tensor and array each is."""
    if not is_buffer(target) or not is_buffer(value):
        return False
    return tuple(target.shape) == tuple(value.shape) and _dtype(target) == _dtype(value)


def fill(operation: str, target: Any, value: Any, where: str = "") -> Any:
    """Return `value` in the buffer that the caller passed, or by itself if `target` is no buffer."""
    if not is_buffer(target) or value is target:
        return value
    check_fits(operation, target, value, where)
    if isinstance(target, Tensor):
        with torch.no_grad():
            target.copy_(value if isinstance(value, Tensor) else torch.from_numpy(value))
    else:
        np.copyto(target, value.numpy() if isinstance(value, Tensor) else value)
    return target


def fill_chunk(operation: str, target: Any, chunk: Any) -> Any:
    """Fill the buffer with a chunk; a chunk of one row also fits into a buffer of the row's shape."""
    if is_buffer(target) and is_buffer(chunk) and tuple(chunk.shape) == (1, *target.shape):
        chunk = chunk[0, ...]
    return fill(operation, target, chunk)


def fill_by_rank(operation: str, target: Any, values: Sequence[Any]) -> Any:
    """Fill one buffer with each rank's value: the elements of a list, or the parts of a tensor or array with
    one element per rank, or with the rows of all ranks."""
    if target is None:
        return values
    ranks = len(values)
    parts: Sequence[Any] = target if isinstance(target, list | tuple) else ()
    if is_buffer(target) and target.ndim and target.shape[0] % ranks == 0:
        each = target.shape[0] // ranks
        stacked = tuple(target.shape) == (ranks, *getattr(values[0], "shape", ()))
        parts = [
            target[rank, ...] if stacked else target[rank * each : (rank + 1) * each] for rank in range(ranks)
        ]
    if len(parts) != ranks or not all(map(is_buffer, parts)):
        given = counted(len(target), "output") if isinstance(target, list | tuple) else described(target)
        raise UsageError(
            f"{operation}: {given} for {counted(ranks, 'rank')}",
            remedy="pass a list with one tensor per rank to fill, or a tensor with a row for each rank",
        )
    for rank, (part, value) in enumerate(zip(parts, values, strict=True)):
        fill(operation, part, value, f": from rank {rank}")
    return target


def check_fits(operation: str, target: Any, value: Any, where: str = "") -> None:
    """Refuse a value of another shape or dtype than the buffer's, and a buffer that cannot be written to."""
    if isinstance(target, np.ndarray) and not target.flags.writeable:
        raise UsageError(f"{operation}{where}: the array is read-only", remedy="pass a copy of it to fill")
    if not fits(target, value):
        raise UsageError(
            f"{operation}{where}: {described(value)} does not fit into {described(target)}",
            remedy="pass a tensor of the same shape and dtype to fill, or none to get the value back",
        )


def described(value: Any) -> str:
    """Return dtype and shape of a tensor or array, the type of anything else."""
    return f"{_dtype(value)}{list(value.shape)}" if is_buffer(value) else type(value).__name__


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")
