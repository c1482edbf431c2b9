"""Pickle tensors that travel to and from ranks, without the copies that torch's own pickling makes; and
modules that torch does not pickle at all.

A plain CPU tensor is one buffer and three facts; a 100 MB one costs a single copy into the memory file.
Everything else (other devices, gradients, strides, subclasses) is left to torch. A parametrized module
(torch.nn.utils.parametrize) is of a class that was made for it alone: what it holds travels, and the class is
made again. Must not import torch before it is needed: a process that has no torch has no tensors.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def reducers() -> dict[type, Callable[[Any], Any]]:
    """Return the reducers that the local engine pickles its payloads with; none while torch is not loaded."""
    if "torch" not in sys.modules:
        return {}
    import torch

    return _TensorReducers({torch.Tensor: _reduce})


class _TensorReducers(dict[type, Callable[[Any], Any]]):
    """Reducers by class. Classes of parametrized modules are recognised by their name, which is all that they
    have in common."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        if kind.__name__.startswith("Parametrized") and hasattr(kind, "named_parameters"):
            return _reduce_module
        raise KeyError(kind)


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

    # A small buffer arrives as bytes, which are read-only.
    writable = bytearray(buffer) if memoryview(buffer).readonly else buffer
    return torch.frombuffer(writable, dtype=dtype).reshape(shape)


def _reduce_module(module: Any) -> Any:
    from torch.nn.utils import parametrize

    if not parametrize.is_parametrized(module):
        return module.__reduce_ex__(2)
    names = list(module.parametrizations)
    kind = parametrize.type_before_parametrizations(module)
    # The state as a separate argument, so that modules may refer to each other.
    return _blank, (kind,), (module.__dict__.copy(), names), None, None, _parametrize_again


def _blank(kind: type) -> Any:
    return object.__new__(kind)


def _parametrize_again(module: Any, state: tuple[dict[str, Any], list[str]]) -> None:
    from torch.nn.utils import parametrize

    module.__dict__.update(state[0])
    parametrize._inject_new_class(module)
    for name in state[1]:
        parametrize._inject_property(module, name)
