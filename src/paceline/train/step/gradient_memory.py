"""Gradients while shards are summed and exchanged: dense ones in flat memory, one piece per dtype with a view
of every parameter in it; of sparse embeddings rows and their values.

Behind the dense gradients follow the scalars, which every shard contributes to the step (loss, metrics,
movement of the model's buffers), and the counters, whole numbers that every rank contributes (samples,
requests, a sample of its weights), so that all are summed in one exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter

TensorAllocator = Callable[[int, torch.dtype, torch.device], Tensor]
"""Make an uninitialised flat tensor: number of elements, dtype, device."""

ALIGN = 64
"""In elements: every view starts on its own cache line, whatever its dtype."""


class GradientLayout:
    """Slices for parameters in a fixed order, then `scalars` and `counters` numbers in fp32."""

    def __init__(self, parameters: Mapping[str, Parameter], scalars: int, counters: int) -> None:
        sizes: dict[torch.dtype, int] = {torch.float32: 0}
        # Where each parameter lies in the flat memory of its dtype: dtype, start, elements, shape, stride.
        self.slices: list[tuple[torch.dtype, int, int, tuple[int, ...], tuple[int, ...]]] = []
        for parameter in parameters.values():
            real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            # 16-bit gradients are summed in fp32; complex ones as pairs of reals.
            double = parameter.dtype in (torch.float64, torch.complex128)
            dtype = torch.float64 if double else torch.float32
            start = sizes.setdefault(dtype, 0)
            dense = torch._prims_common.is_non_overlapping_and_dense_or_false(real)
            stride = tuple(real.stride()) if dense else tuple(torch.empty(real.shape, device="meta").stride())
            self.slices.append((dtype, start, real.numel(), tuple(real.shape), stride))
            sizes[dtype] = start + -(-real.numel() // ALIGN) * ALIGN
        self.scalars_start = sizes[torch.float32]
        self.counters_start = self.scalars_start + scalars
        sizes[torch.float32] = self.counters_start + counters
        self.sizes = sizes


class FlatGradients:
    """One set of gradients with scalars and counters in flat memory."""

    def __init__(self, layout: GradientLayout, memory: TensorAllocator, device: torch.device) -> None:
        self.layout = layout
        self.memory = {dtype: memory(size, dtype, device) for dtype, size in layout.sizes.items()}
        # Padding between views travels with them and must not hold what is no number.
        self.clear()
        self.views = [
            self.memory[dtype][start : start + numel].as_strided(shape, stride)
            for dtype, start, numel, shape, stride in layout.slices
        ]
        ends = {torch.float32: layout.scalars_start}
        self.gradients = {dtype: memory[: ends.get(dtype)] for dtype, memory in self.memory.items()}
        self.scalars = self.memory[torch.float32][layout.scalars_start : layout.counters_start]
        self.counters = self.memory[torch.float32][layout.counters_start :]

    def clear(self) -> None:
        """Set all memory to zero."""
        for tensor in self.memory.values():
            tensor.zero_()

    @property
    def without_counters(self) -> list[Tensor]:
        """Contribution of the shards: all memory but the counters."""
        ends = {torch.float32: self.layout.counters_start}
        return [memory[: ends.get(dtype)] for dtype, memory in self.memory.items()]

    def store(self, gradients: Sequence[Tensor | None], scalars: Tensor) -> None:
        """Overwrite gradients and scalars; a missing gradient is zero."""
        self.scalars.copy_(scalars)
        views, given, missing = self._sorted(gradients)
        if views:
            torch._foreach_copy_(views, given)
        if missing:
            torch._foreach_zero_(missing)

    def add(self, gradients: Sequence[Tensor | None], scalars: Tensor) -> None:
        """Add to gradients and scalars, as if a missing gradient were zeros."""
        self.scalars.add_(scalars)
        views, given, missing = self._sorted(gradients)
        if views:
            torch._foreach_add_(views, [g.to(v.dtype) for v, g in zip(views, given, strict=True)])
        if missing:
            # Not nothing: adding zero turns a negative zero into a positive one, and bits are the promise.
            torch._foreach_add_(missing, 0.0)

    def _sorted(self, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return the views that have a gradient, these gradients as real numbers, and the other views."""
        pairs = list(zip(self.views, gradients, strict=True))
        return (
            [view for view, gradient in pairs if gradient is not None],
            [real(gradient) for gradient in gradients if gradient is not None],
            [view for view, gradient in pairs if gradient is None],
        )

    def add_flat(self, other: FlatGradients) -> None:
        for dtype, tensor in self.memory.items():
            tensor.add_(other.memory[dtype])

    def copy_flat(self, other: FlatGradients) -> None:
        for dtype, tensor in self.memory.items():
            tensor.copy_(other.memory[dtype])


def real(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def clear_gradients(parameters: Iterable[Parameter]) -> None:
    """Leave the parameters without gradients."""
    for parameter in parameters:
        parameter.grad = None


def expose(parameters: Sequence[Parameter], flat: FlatGradients, used: Sequence[bool]) -> None:
    """Make the summed gradients the parameters' own, without a copy where the dtypes agree; a parameter that
    no shard used has none."""
    for parameter, view, is_used in zip(parameters, flat.views, used, strict=True):
        if not is_used:
            parameter.grad = None
            continue
        if parameter.is_complex():
            view = torch.view_as_complex(view)
        parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)


# rows of sparse embeddings

Rows = list[list[Any]]
"""As it travels: [shard, for each parameter the rows' indices and values, or None] of each shard."""


def sparse_parameters(module: nn.Module) -> set[str]:
    """Return the names of parameters whose modules ask for sparse gradients."""
    wanted = {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
    }
    return {name for name, parameter in module.named_parameters() if id(parameter) in wanted}


@final
class SparseGradients:
    """The sparse gradients of one step, summed in the order of the shards.

    Every rank gets every shard's rows and adds them up in the same order, so the bits do not depend on which
    rank computed which shard, and optimizers such as SparseAdam see the rows that were touched and no others.
    The rows travel before the step is decided and are applied after it: the exchange is repeatable.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters, self.used = dict(parameters), bool(parameters)
        self._held: dict[int, list[tuple[Tensor, Tensor] | None]] = {}

    def start(self) -> None:
        self._held = {}

    def collect(self, shard: int) -> None:
        """Keep what the shard computed and clear it from the parameters."""
        if not self._parameters:
            return
        held: list[tuple[Tensor, Tensor] | None] = []
        for parameter in self._parameters.values():
            gradient = parameter.grad
            if gradient is None:
                held.append(None)
                continue
            rows = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
            held.append((rows.indices(), rows.values()))
            parameter.grad = None
        self._held[shard] = held

    def values(self, shard: int) -> list[Tensor]:
        """Return the rows' values that a shard of this rank has collected."""
        return [pair[1] for pair in self._held.get(shard, ()) if pair is not None]

    def rows(self, shards: Sequence[int]) -> Rows:
        """Return what these shards of this rank have collected, as it travels."""
        return [
            [shard, [None if pair is None else [pair[0].cpu(), pair[1].cpu()] for pair in self._held[shard]]]
            for shard in shards
        ]

    def apply(self, gathered: Sequence[Rows]) -> None:
        """Set every parameter's gradient to the sum over the shards of all ranks; None where no shard has
        one. Of a shard that several ranks computed the bits are equal."""
        by_shard: dict[int, list[Any]] = {shard: pairs for rows in gathered for shard, pairs in rows}
        for position, parameter in enumerate(self._parameters.values()):
            pairs = [by_shard[shard][position] for shard in sorted(by_shard)]
            parts = [pair for pair in pairs if pair is not None]
            if not parts:
                parameter.grad = None
                continue
            where = parameter.device
            indices = torch.cat([torch.as_tensor(indices).to(where) for indices, _ in parts], 1)
            values = torch.cat([torch.as_tensor(values).to(where) for _, values in parts])
            summed = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
            parameter.grad = summed.coalesce()
