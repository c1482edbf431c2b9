"""The all-reduce in memory that every rank can reach: the owner of a slice reads it from all inputs and
writes it into all outputs.

A tensor from `ctx.empty` lies in the window and is read and written in place: nothing is copied in or out.
An ordinary tensor is reached through the kernel, which copies each block once on its way to the owner's
cache and once back. Between the first barrier (inputs are ready) and the second (outputs are written) only
the owner touches a slice, so inputs and outputs may be the same memory.
What travels: each rank reads the peers' (N-1) parts of its slice and writes as many: 2(N-1)/N of the
message. No rank touches a byte twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.algorithms.hops import cut
from paceline.comm.algorithms.work import CACHE_LINE, Recipe, Work, block_size
from paceline.comm.fold import NOTHING
from paceline.comm.ops import accumulator_dtype, finish, kernel_of
from paceline.comm.transport.base import Window

ADDRESS = 1 << 63
"""Marks a published location as an address in the rank's own memory; else it is an offset in the window,
from 1."""


class Place:
    """Where one rank's tensor is: in the window, or at an address in that rank's memory."""

    __slots__ = ("_offset", "_window", "address")

    def __init__(self, window: Window, location: int) -> None:
        self._window = window
        self.address = location ^ ADDRESS if location & ADDRESS else None
        self._offset = location - 1

    def views(self, start: int, stop: int, dtype: torch.dtype, block: int) -> Sequence[Tensor] | None:
        """Elements [start, stop) in blocks, where they can be touched directly."""
        if self.address is not None:
            return None
        item = dtype.itemsize
        return torch.split(
            self._window.at(self._offset + start * item, (stop - start) * item).view(dtype), block
        )


def spread(work: Work, sources: Sequence[Place], targets: Sequence[Place]) -> None:
    out, own, recipe, rank = work.out, work.partials[0], work.recipe, work.rank
    start, stop = cut(out.numel(), work.size, CACHE_LINE)[rank]
    block = block_size(own.element_size(), work.size + 1 + recipe.fold.temporaries)
    inputs = [
        torch.split(own[start:stop], block) if peer == rank else place.views(start, stop, own.dtype, block)
        for peer, place in enumerate(sources)
    ]
    outputs = [
        torch.split(out[start:stop], block) if peer == rank else place.views(start, stop, out.dtype, block)
        for peer, place in enumerate(targets)
    ]
    size = min(block, stop - start)
    room = [torch.empty(0 if views is not None else size, dtype=own.dtype) for views in inputs]
    wide = accumulator_dtype(out.dtype)
    spare = [torch.empty(size, dtype=wide) for _ in range(recipe.fold.temporaries + 1)]
    for position, low in enumerate(range(start, stop, block)):
        high = min(low + block, stop)
        tensors: list[Tensor] = []
        for peer, _ in recipe.sources:
            views, address = inputs[peer], sources[peer].address
            if views is not None:
                tensors.append(views[position])
                continue
            assert address is not None
            into = room[peer][: high - low]
            work.window.read(peer, address + low * own.element_size(), into, work.call, work.deadline)
            tensors.append(into)
        mine = out[low:high]
        _fold_beside(recipe, tensors, mine, [tensor[: high - low] for tensor in spare])
        for peer, views in enumerate(outputs):
            if peer == rank:
                continue
            if views is not None:
                views[position].copy_(mine)
                continue
            address = targets[peer].address
            assert address is not None
            work.window.write(peer, address + low * out.element_size(), mine, work.call, work.deadline)
    work.wait(work.window.tick())
    moved = 2 * (stop - start) * (work.size - 1)
    work.count(moved, moved, 2)


def _fold_beside(recipe: Recipe, inputs: Sequence[Tensor], out: Tensor, spare: Sequence[Tensor]) -> None:
    """Folds into memory that may be one of the inputs: only the last step, which has read every input,
    writes to it."""
    kernel, total = kernel_of(recipe.op), spare[0]
    steps = recipe.fold.bind(inputs, spare[1:], total.dtype)
    narrow = out.dtype != total.dtype
    for position, (widened, left, right, target) in enumerate(steps):
        last = position == len(steps) - 1
        into = (total if narrow else out) if last else total if target is None else target
        if widened is not None:
            into.copy_(widened)
            left = into
        if right is not NOTHING:
            kernel(total if left is None else left, total if right is None else right, out=into)
    if narrow:
        finish(recipe.op, total, recipe.contributions)
        out.copy_(total)
    else:
        finish(recipe.op, out, recipe.contributions)
