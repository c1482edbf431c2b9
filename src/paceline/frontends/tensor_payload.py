"""Tensors on their way to and from ranks without the copies that torch's own pickling makes.

A plain CPU tensor is one buffer and three facts; a 100 MB one costs a single copy into the memory file.
Everything else (other devices, gradients, strides, subclasses) is left to torch. Must not import torch
before it is needed: a process that has no torch has no tensors.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def reducers() -> dict[type, Callable[[Any], Any]]:
    """For the payloads of the local engine; empty while torch is not loaded."""
    if "torch" not in sys.modules:
        return {}
    import torch

    return {torch.Tensor: _reduce}


def _reduce(tensor: torch.Tensor) -> Any:
    import torch

    plain = (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
        # A part of a larger memory may share it with another tensor; torch keeps track of that.
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        and not tensor.__dict__
    )
    if not plain:
        return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]
    octets: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return _rebuild, (pickle.PickleBuffer(octets), tensor.dtype, tuple(tensor.shape))


def _rebuild(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    # A small buffer arrives as bytes, which nobody may write to.
    writable = bytearray(buffer) if memoryview(buffer).readonly else buffer
    return torch.frombuffer(writable, dtype=dtype).reshape(shape)
