"""Where gradients lie while shards are folded and exchanged: flat memory, one piece per dtype, with a view of
every parameter in it.

Behind the gradients follow the tail, numbers that every shard contributes to the step (loss, metrics, buffers
of the model), and the ballot, whole numbers that every rank contributes (counts, wishes), so that all are
summed in one exchange. Knows parameters and memory; must not know shards, ranks or optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

Memory = Callable[[int, torch.dtype, torch.device], Tensor]
"""Makes an uninitialised flat tensor of so many elements."""

ALIGN = 64
"""Elements: every view starts on a cache line of its own, whatever its dtype."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """16-bit gradients are summed in fp32; complex ones as pairs of reals."""
    if dtype in (torch.float64, torch.complex128):
        return torch.float64
    return torch.float32


@dataclass(frozen=True)
class Place:
    """A parameter's place in the flat memory of its dtype."""

    name: str
    dtype: torch.dtype
    start: int
    numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Layout:
    """Places for parameters in a fixed order, then `tail` and `ballot` numbers in fp32."""

    def __init__(self, parameters: Mapping[str, Parameter], tail: int, ballot: int) -> None:
        sizes: dict[torch.dtype, int] = {torch.float32: 0}
        self.places: list[Place] = []
        for name, parameter in parameters.items():
            real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            dtype = sum_dtype(parameter.dtype)
            start = sizes.setdefault(dtype, 0)
            dense = torch._prims_common.is_non_overlapping_and_dense_or_false(real)
            stride = tuple(real.stride()) if dense else tuple(torch.empty(real.shape, device="meta").stride())
            self.places.append(Place(name, dtype, start, real.numel(), tuple(real.shape), stride))
            sizes[dtype] = start + -(-real.numel() // ALIGN) * ALIGN
        self.tail_start = sizes[torch.float32]
        self.ballot_start = self.tail_start + tail
        sizes[torch.float32] = self.ballot_start + ballot
        self.sizes = sizes


class Flat:
    """One set of gradients with tail and ballot in flat memory."""

    def __init__(self, layout: Layout, memory: Memory, device: torch.device) -> None:
        self.layout = layout
        self.memory = {dtype: memory(size, dtype, device) for dtype, size in layout.sizes.items()}
        # Padding between views travels with them and must not hold what is no number.
        self.clear()
        self.views = [
            self.memory[place.dtype][place.start : place.start + place.numel].as_strided(
                place.shape, place.stride
            )
            for place in layout.places
        ]
        self.tail = self.memory[torch.float32][layout.tail_start : layout.ballot_start]
        self.ballot = self.memory[torch.float32][layout.ballot_start :]

    def clear(self) -> None:
        """Zeros everywhere."""
        for tensor in self.memory.values():
            tensor.zero_()

    @property
    def given(self) -> list[Tensor]:
        """What the shards contribute: all memory but the ballot."""
        ends = {torch.float32: self.layout.ballot_start}
        return [memory[: ends.get(dtype)] for dtype, memory in self.memory.items()]

    def store(self, gradients: Sequence[Tensor | None], tail: Tensor) -> None:
        """Overwrites gradients and tail; a missing gradient is zero."""
        self.tail.copy_(tail)
        present = [
            (view, real(grad)) for view, grad in zip(self.views, gradients, strict=True) if grad is not None
        ]
        if present:
            torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
        missing = [view for view, grad in zip(self.views, gradients, strict=True) if grad is None]
        if missing:
            torch._foreach_zero_(missing)

    def add(self, gradients: Sequence[Tensor | None], tail: Tensor) -> None:
        """Adds to gradients and tail, as if a missing gradient were zeros."""
        self.tail.add_(tail)
        present = [
            (view, real(grad)) for view, grad in zip(self.views, gradients, strict=True) if grad is not None
        ]
        if present:
            same = [grad if grad.dtype == view.dtype else grad.to(view.dtype) for view, grad in present]
            torch._foreach_add_([view for view, _ in present], same)
        missing = [view for view, grad in zip(self.views, gradients, strict=True) if grad is None]
        if missing:
            # Not nothing: adding zero turns a negative zero into a positive one, and bits are the promise.
            torch._foreach_add_(missing, 0.0)

    def add_flat(self, other: Flat) -> None:
        for dtype, tensor in self.memory.items():
            tensor.add_(other.memory[dtype])

    def copy_flat(self, other: Flat) -> None:
        for dtype, tensor in self.memory.items():
            tensor.copy_(other.memory[dtype])


def real(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def expose(parameters: Sequence[Parameter], flat: Flat, used: Sequence[bool]) -> None:
    """The summed gradients become the parameters' own, without a copy where the dtypes agree; a parameter
    that no shard used has none."""
    for parameter, view, is_used in zip(parameters, flat.views, used, strict=True):
        if not is_used:
            parameter.grad = None
            continue
        if parameter.is_complex():
            view = torch.view_as_complex(view)
        parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
