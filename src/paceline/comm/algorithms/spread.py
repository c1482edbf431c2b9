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

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.algorithms.hops import cut
from paceline.comm.algorithms.work import CACHE_LINE, LEAST_BLOCK, Recipe, Work, block_size
from paceline.comm.fold import Fold
from paceline.comm.ops import accumulator_dtype, finish, kernel_of

ADDRESS = 1 << 63
"""Marks a published location as an address in the rank's own memory; else it is an offset in the window,
from 1."""


class Place:
    """Where one rank's tensor is: in the window, or at an address in that rank's memory."""

    __slots__ = ("_address", "_offset", "_peer", "_work")

    def __init__(self, work: Work, peer: int, location: int) -> None:
        self._work, self._peer = work, peer
        self._address = location ^ ADDRESS if location & ADDRESS else None
        self._offset = location - 1

    def get(self, low: int, high: int, room: Tensor) -> Tensor:
        """Elements [low, high): in place where they can be touched, else copied into `room`."""
        item = room.element_size()
        if self._address is None:
            return self._view(low, high, room.dtype)
        into = room[: high - low]
        work = self._work
        work.window.read(self._peer, self._address + low * item, into, work.call, work.deadline)
        return into

    def put(self, low: int, data: Tensor) -> None:
        """Writes `data` from element `low` on."""
        if self._address is None:
            self._view(low, low + data.numel(), data.dtype).copy_(data)
            return
        work = self._work
        work.window.write(
            self._peer, self._address + low * data.element_size(), data, work.call, work.deadline
        )

    def _view(self, low: int, high: int, dtype: torch.dtype) -> Tensor:
        item = dtype.itemsize
        return self._work.window.at(self._offset + low * item, (high - low) * item).view(dtype)


def pieces(work: Work, reader: int) -> list[Tensor]:
    """What rank `reader` reads of this rank."""
    return [work.partials[0][slice(*cut(work.out.numel(), work.size, CACHE_LINE)[reader])]]


def spread(work: Work, sources: Sequence[int], targets: Sequence[int]) -> None:
    """`sources` and `targets` are the ranks' published locations of their inputs and outputs."""
    all_in_window = all(location < ADDRESS for location in sources)
    if all_in_window and sources == targets and work.out.dtype == accumulator_dtype(work.out.dtype):
        _in_place(work, sources)
    else:
        _by_blocks(work, sources, targets)
    start, stop = cut(work.out.numel(), work.size, CACHE_LINE)[work.rank]
    moved = 2 * (stop - start) * (work.size - 1)
    work.count(moved, moved, 2)


def _in_place(work: Work, locations: Sequence[int]) -> None:
    """All tensors lie in the window and are reduced in place: their own memory is all the fold needs."""
    out, recipe = work.out, work.recipe
    item = out.element_size()
    start, stop = cut(out.numel(), work.size, CACHE_LINE)[work.rank]
    kernel, pairs, home = kernel_of(recipe.op), recipe.fold.in_place, recipe.fold.home
    block = block_size(item, work.size)
    slices = [
        torch.split(work.window.at(location - 1 + start * item, (stop - start) * item).view(out.dtype), block)
        for location in (locations[rank] for rank, _ in recipe.sources)
    ]
    ranks = [rank for rank, _ in recipe.sources]
    for views in zip(*slices, strict=True):
        if work.seals is not None:
            for rank, view in zip(ranks, views, strict=True):
                work.seals.read(rank, view)
        for left, right in pairs:
            kernel(views[left], views[right], out=views[left])
        result = views[home]
        finish(recipe.op, result, recipe.contributions)
        for view in views:
            if view is not result:
                view.copy_(result)
    work.end()


def _by_blocks(work: Work, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Inputs and outputs anywhere: block by block through the cache."""
    out, own, fold, rank, size = work.out, work.partials[0], work.recipe.fold, work.rank, work.size
    inputs = [Place(work, peer, location) for peer, location in enumerate(sources)]
    outputs = [Place(work, peer, location) for peer, location in enumerate(targets)]
    start, stop = cut(out.numel(), size, CACHE_LINE)[rank]
    # What is fetched is used at once and the kernel copies page by page: small blocks cost nothing and
    # stay in the cache.
    least = LEAST_BLOCK if any(place >= ADDRESS for place in (*sources, *targets)) else 2 * LEAST_BLOCK
    block = min(max(least, 4 * least // size) // own.element_size(), stop - start)
    rooms = [torch.empty(block, dtype=own.dtype, device="cpu") for _ in range(2)]
    spare = [
        torch.empty(block, dtype=accumulator_dtype(out.dtype), device="cpu")
        for _ in range(fold.temporaries + 1)
    ]
    for low in range(start, stop, block or 1):
        high = min(low + block, stop)
        mine = own[low:high]

        def fetch(index: int, room: Tensor, low: int = low, high: int = high, mine: Tensor = mine) -> Tensor:
            peer = work.recipe.sources[index][0]
            fetched = mine if peer == rank else inputs[peer].get(low, high, room)
            if work.seals is not None:
                work.seals.read(peer, fetched)
            return fetched

        result = out[low:high]
        _fold_beside(work.recipe, fetch, rooms, result, [tensor[: high - low] for tensor in spare])
        for step in range(1, size):
            outputs[(rank + step) % size].put(low, result)  # everybody starts at another peer
    work.end()


def _fold_beside(
    recipe: Recipe,
    fetch: Callable[[int, Tensor], Tensor],
    rooms: Sequence[Tensor],
    out: Tensor,
    spare: Sequence[Tensor],
) -> None:
    """Folds inputs, fetched when they are needed, into memory that may be one of them: only the last step
    writes to it, and by then every input has been read."""
    fold, kernel, total = recipe.fold, kernel_of(recipe.op), spare[0]
    narrow = out.dtype != total.dtype
    if not fold.steps:
        total.copy_(fetch(0, rooms[0]))
    for position, (target, left, right) in enumerate(fold.steps):
        a = fetch(left, rooms[0]) if left < fold.inputs else _register(fold, left, spare)
        b = fetch(right, rooms[1]) if right < fold.inputs else _register(fold, right, spare)
        last = position == len(fold.steps) - 1 and not narrow
        into = out if last else _register(fold, target, spare)
        if a.dtype != into.dtype and b.dtype != into.dtype:
            # Two narrow operands would be added in their own dtype and rounded; a wide one widens the sum.
            into.copy_(a)
            a = into
        kernel(a, b, out=into)
    if narrow or not fold.steps:
        finish(recipe.op, total, recipe.contributions)
        out.copy_(total)
    else:
        finish(recipe.op, out, recipe.contributions)


def _register(fold: Fold, register: int, spare: Sequence[Tensor]) -> Tensor:
    """Temporaries follow the inputs, the result follows the temporaries; `spare` has the result first."""
    index = register - fold.inputs
    return spare[0] if index == fold.temporaries else spare[1 + index]
