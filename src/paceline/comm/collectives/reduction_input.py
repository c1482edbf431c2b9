"""Input of a reduction: the caller's data as one flat tensor, and back into the same kind of thing.

A tensor, a list or tuple of tensors, a NumPy array or a list of numbers becomes a `ReductionInput`: a flat,
contiguous CPU tensor plus the recipe that turns a flat result into the caller's kind again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.comm.ops import dtype_name
from paceline.core.errors import UsageError

KINDS = "a tensor, a list of tensors, a NumPy array, a number or a list of numbers"


@dataclass(frozen=True)
class ReductionInput:
    """One caller's data: `flat` is 1-D and contiguous; `restore(flat_result)` is of the caller's kind."""

    flat: Tensor
    shape: str
    restore: Callable[[Tensor], Any]
    parts: tuple[Tensor, ...] = ()


def open_input(data: Any, what: str, *, on_device: bool = False) -> ReductionInput:
    """Read the caller's data, not copied where its memory is flat; `on_device`: not moved to the CPU."""
    if isinstance(data, Tensor):
        return _from_tensor(data, what, on_device)
    if isinstance(data, np.ndarray | np.generic):
        return _from_array(data, what)
    if isinstance(data, bool | int | float | complex):
        flat = _tensor_from_numbers([data], what)
        return ReductionInput(flat, f"{dtype_name(flat.dtype)} number", lambda result: result.tolist()[0])
    if isinstance(data, list | tuple):
        if data and all(isinstance(part, Tensor) for part in data):
            return _from_tensors(data, what, on_device)
        flat = _tensor_from_numbers(data, what)
        kind = type(data)
        return ReductionInput(
            flat, f"{dtype_name(flat.dtype)}[{flat.numel()}] numbers", lambda result: kind(result.tolist())
        )
    raise UsageError(f"{what}: cannot reduce a {type(data).__name__}", remedy=f"pass {KINDS}")


def describe(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def to_flat(tensor: Tensor, on_device: bool = False) -> Tensor:
    """Return the values in logical order, 1-D and contiguous, on the CPU unless `on_device`.

    Peers read the memory itself, without torch: a lazily conjugated or negated view, whose memory holds
    something else than its values, is resolved into new memory.
    """
    values = tensor.detach()
    if not holds_values(values):
        values = values.resolve_conj().resolve_neg()
    return flatten((values if on_device else values.to("cpu")).contiguous())


def holds_values(tensor: Tensor) -> bool:
    """Return whether the memory holds the values, and not their conjugates or negatives (lazy views)."""
    return not (tensor.is_neg() or tensor.is_conj())


def flatten(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as 1-D with stride 1: torch calls one element contiguous with any stride."""
    flat = tensor.view(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided((flat.numel(),), (1,))


def check_dense(tensor: Tensor, what: str) -> None:
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"{what}: a tensor of layout {tensor.layout} cannot travel",
            remedy="call .to_dense() (or .coalesce() and send its parts)",
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"{what}: the tensor is on device {tensor.device}",
            remedy="move it to the CPU or to a CUDA device",
        )
    if tensor.is_quantized:
        raise UsageError(f"{what}: quantized tensors cannot travel", remedy="call .dequantize() first")


def _from_tensor(tensor: Tensor, what: str, on_device: bool) -> ReductionInput:
    check_dense(tensor, what)

    def restore(result: Tensor) -> Tensor:
        return result.view(tensor.shape).to(tensor.device)

    return ReductionInput(to_flat(tensor, on_device), describe(tensor), restore, (tensor,))


def _from_tensors(parts: Sequence[Tensor], what: str, on_device: bool) -> ReductionInput:
    for part in parts:
        check_dense(part, what)
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        names = ", ".join(sorted(dtype_name(dtype) for dtype in dtypes))
        raise UsageError(
            f"{what}: the list mixes dtypes ({names})",
            remedy="reduce tensors of each dtype in a call of its own",
        )
    flat = torch.cat([to_flat(part, on_device) for part in parts])
    kind = type(parts)

    def restore(result: Tensor) -> Any:
        chunks = torch.split(result, [part.numel() for part in parts])
        return kind(  # type: ignore[call-arg]
            chunk.view(part.shape).to(part.device) for chunk, part in zip(chunks, parts, strict=True)
        )

    return ReductionInput(flat, "+".join(describe(part) for part in parts), restore, tuple(parts))


def _from_array(array: np.ndarray[Any, Any] | np.generic, what: str) -> ReductionInput:
    values = np.ascontiguousarray(array)
    if not values.dtype.isnative:
        raise UsageError(
            f"{what}: the array has the byte order of another machine ({values.dtype.str})",
            remedy="convert it: array.astype(array.dtype.newbyteorder('='))",
        )
    try:
        flat = torch.from_numpy(values.reshape(-1) if values.flags.writeable else values.reshape(-1).copy())
    except TypeError as error:
        raise UsageError(
            f"{what}: an array of dtype {values.dtype} has no numbers in it", remedy=f"pass {KINDS}"
        ) from error
    shape = array.shape

    def restore(result: Tensor) -> Any:
        back = result.numpy().reshape(shape)
        return back if isinstance(array, np.ndarray) else back[()]

    return ReductionInput(flat, f"{dtype_name(flat.dtype)}{list(shape)}", restore)


def _tensor_from_numbers(numbers: Sequence[Any], what: str) -> Tensor:
    for index, number in enumerate(numbers):
        if not isinstance(number, bool | int | float | complex | np.generic):
            raise UsageError(
                f"{what}: element {index} of the list is a {type(number).__name__} ({number!r:.40})",
                remedy=f"pass {KINDS}",
            )
    # Python floats are doubles: float32 would change the numbers that come back.
    dtype = torch.float64 if not numbers or any(isinstance(number, float) for number in numbers) else None
    if any(isinstance(number, complex) for number in numbers):
        dtype = torch.complex128
    try:
        return torch.tensor(numbers, dtype=dtype, device="cpu")
    except (RuntimeError, OverflowError, ValueError, TypeError) as error:
        raise UsageError(
            f"{what}: these numbers do not fit a tensor: {error}",
            remedy="use integers within 64 bits, or floats",
        ) from error
