"""Buckets: the gradients of neighbouring parameters in one flat piece of memory that is reduced as a whole.

Parameters are taken in reverse order, because backward reaches the last ones first; a bucket holds one
dtype on one device and at most the given number of bytes (a larger parameter has one to itself). On the CPU
the memory is the group's shared memory, so that reducing it copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from paceline.comm.collectives.reduction_input import describe
from paceline.comm.context import DistributedContext
from paceline.core.errors import UsageError


@final
@dataclass(frozen=True)
class BucketSlot:
    """One parameter and its place in a bucket: `view` has the parameter's shape and strides."""

    name: str
    parameter: nn.Parameter
    bucket: int
    view: Tensor

    def attach(self) -> None:
        """Bring the gradient into the bucket, if it is elsewhere, and keep it there."""
        grad = self.parameter.grad
        if grad is self.view:
            return
        if grad is None:
            raise UsageError(
                f"the gradient of parameter {self.name!r} was removed before it was averaged",
                remedy="do not set .grad to None in hooks; call optimizer.zero_grad() after the step",
            )
        self._check(grad)
        self.view.copy_(grad)
        self.parameter.grad = self.view

    def fill(self) -> None:
        """Contribute for a parameter that backward did not reach: what it accumulated before, else zero."""
        grad = self.parameter.grad
        if grad is None:
            self.view.zero_()
        elif grad is not self.view:
            self._check(grad)
            self.view.copy_(grad)

    def _check(self, grad: Tensor) -> None:
        if grad.layout is not torch.strided:
            raise UsageError(
                f"parameter {self.name!r} has a gradient of layout {grad.layout}; buckets hold dense ones",
                remedy="use dense gradients, for example nn.Embedding(..., sparse=False)",
            )
        if (grad.dtype, grad.device, grad.shape) != (self.view.dtype, self.view.device, self.view.shape):
            raise UsageError(
                f"parameter {self.name!r} was {describe(self.view)} on {self.view.device} when the model was "
                f"wrapped; its gradient is {describe(grad)} on {grad.device}",
                remedy="move or convert the model first, then wrap it in DistributedDataParallel",
            )


@final
@dataclass(frozen=True)
class Bucket:
    """One bucket. `grads` is the memory behind the slots' views, `wire` what the ranks exchange: on the CPU
    the same."""

    index: int
    slots: tuple[int, ...]
    grads: Tensor
    wire: Tensor

    @property
    def name(self) -> str:
        return f"ddp.bucket{self.index}"

    def load(self) -> None:
        if self.wire is not self.grads:
            self.wire.copy_(self.grads)

    def store(self) -> None:
        if self.wire is not self.grads:
            self.grads.copy_(self.wire)


def plan(kinds: Sequence[tuple[object, int]], limit: int) -> list[list[int]]:
    """Return which tensors share a bucket, by position.

    `kinds` has for each tensor what may not be mixed (dtype, device) and its bytes. Buckets come in the order
    in which backward is expected to complete them.
    """
    filling: dict[object, tuple[list[int], int]] = {}
    buckets: list[list[int]] = []
    for position in reversed(range(len(kinds))):
        kind, nbytes = kinds[position]
        members, filled = filling.get(kind, ([], 0))
        if members and filled + nbytes > limit:
            buckets.append(members)
            members, filled = [], 0
        members.append(position)
        filling[kind] = (members, filled + nbytes)
    buckets += [members for members, _ in filling.values()]
    return sorted(buckets, key=lambda members: -members[-1])


def build(
    parameters: Iterable[tuple[str, nn.Parameter]], limit: int, context: DistributedContext
) -> tuple[list[BucketSlot], list[Bucket]]:
    """Make buckets with memory for the given parameters, and every parameter's slot."""
    named = list(parameters)
    kinds = [((p.dtype, p.device), p.numel() * p.element_size()) for _, p in named]
    slots: list[BucketSlot] = []
    buckets: list[Bucket] = []
    for index, members in enumerate(plan(kinds, limit)):
        first = named[members[0]][1]
        sizes = [named[position][1].numel() for position in members]
        wire = context.empty(sum(sizes), dtype=first.dtype)
        on_host = first.device.type == "cpu"
        grads = wire if on_host else torch.empty(wire.shape, dtype=first.dtype, device=first.device)
        start = len(slots)
        for position, piece in zip(members, torch.split(grads, sizes), strict=True):
            name, parameter = named[position]
            # Laid out as the parameter is (channels last, say): accumulation and optimizers are faster so.
            strides = torch.empty_like(parameter, device="meta").stride()
            slots.append(BucketSlot(name, parameter, index, piece.as_strided(parameter.shape, strides)))
        buckets.append(Bucket(index, tuple(range(start, len(slots))), grads, wire))
    return slots, buckets
