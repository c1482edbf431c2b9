"""Flat memory of the tensors that torch.distributed's calls are given: what travels, and where results go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.collectives.reduction_input import check_dense, flatten, holds_values, to_flat
from paceline.comm.ops import dtype_name
from paceline.core.errors import UsageError
from paceline.core.wording import counted


@dataclass(slots=True)
class FlatMemory:
    """A tensor's values as flat memory: its own where they lie in order, else a copy of them."""

    tensor: Tensor
    flat: Tensor

    @classmethod
    def of(cls, tensor: Tensor, what: str, *, values: bool = True) -> FlatMemory:
        """Open a tensor; without `values`, only to write to it."""
        if type(tensor) is not Tensor and type(tensor) is not Parameter:
            tensor = _result_of_functional(tensor)
        if tensor.layout is not torch.strided or tensor.is_quantized:
            check_dense(tensor, what)
        if tensor.device.type != "cpu":
            raise UsageError(
                f"{what}: a tensor on {tensor.device} beside tensors on the CPU",
                remedy="pass tensors of one device",
            )
        # `data` and not `detach()`: what a collective writes is no in-place change for autograd, as in Gloo.
        plain = tensor.data
        if plain.is_contiguous() and holds_values(plain):
            flat = flatten(_writable_anywhere(plain) if plain.is_inference() else plain)
            _check_has_memory(flat, what)
            return cls(plain, flat)
        with torch.inference_mode(False):
            if values:
                flat = to_flat(plain)
                _check_has_memory(flat, what)
                return cls(plain, flat)
            return cls(plain, torch.empty(plain.numel(), dtype=plain.dtype, device="cpu"))

    @property
    def bytes(self) -> Tensor:
        return self.flat.view(torch.uint8)

    def check_writable(self, what: str) -> None:
        """Refuse a result with one place in memory for several elements, as `expand` makes it."""
        if torch._debug_has_internal_overlap(self.tensor) == 1:  # torch's "yes"
            raise UsageError(
                f"{what}: several elements of {describe(self.tensor)}, into which the result goes, share one "
                "place in memory",
                remedy="pass tensor.contiguous()",
            )

    def write_back(self) -> None:
        if self.flat.data_ptr() != self.tensor.data_ptr():
            with torch.inference_mode(self.tensor.is_inference()):
                self.tensor.copy_(self.flat.view(self.tensor.shape))


def _writable_anywhere(tensor: Tensor) -> Tensor:
    """View an inference tensor's memory as an ordinary tensor: torch lets inference tensors be written in
    inference mode alone, while Gloo, which knows only the memory, reduces them outside of it too."""
    with torch.inference_mode(False):
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return view.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _check_has_memory(flat: Tensor, what: str) -> None:
    if flat.data_ptr() == 0 and flat.numel():
        raise UsageError(
            f"{what}: a {type(flat).__name__} of {counted(flat.numel(), 'element')} has no memory of its own",
            remedy="pass the tensor that holds the values: tensor.to_local() of a DTensor",
        )


def _result_of_functional(tensor: Tensor) -> Tensor:
    """Return what a functional collective's result wraps, once it is there; any other tensor as it is."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if not isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    inner: Tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
    return inner


def describe(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}[{tensor.numel()}]"
