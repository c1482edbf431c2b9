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

from paceline.comm.algorithms.shm.task import (
    CACHE_LINE,
    LEAST_BLOCK,
    REACHED_BLOCK,
    ReductionTask,
    block_size,
    room_for,
)
from paceline.comm.ops import accumulator_dtype, finish, kernel_of
from paceline.comm.reduction_order import Recipe, ReductionOrder, cut

ADDRESS = 1 << 63
"""Marks a published location as an address in the rank's own memory; else it is an offset in the window,
from 1."""


def _view(task: ReductionTask, location: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Return elements [low, high) of a tensor in the window."""
    item = dtype.itemsize
    return task.window.at(location - 1 + low * item, (high - low) * item).view(dtype)


def _get(task: ReductionTask, peer: int, location: int, low: int, high: int, room: Tensor) -> Tensor:
    """Return a peer's elements [low, high): in place where they can be touched, else copied into `room`."""
    if location < ADDRESS:
        return _view(task, location, low, high, room.dtype)
    into, address = room[: high - low], (location ^ ADDRESS) + low * room.element_size()
    task.window.read(peer, address, into, task.call, task.deadline)
    return into


def _put(task: ReductionTask, peer: int, location: int, low: int, data: Tensor) -> None:
    """Write `data` into a peer's tensor, from element `low` on."""
    if location < ADDRESS:
        _view(task, location, low, low + data.numel(), data.dtype).copy_(data)
        return
    address = (location ^ ADDRESS) + low * data.element_size()
    task.window.write(peer, address, data, task.call, task.deadline)


def pieces(task: ReductionTask, reader: int) -> list[Tensor]:
    """Return what rank `reader` reads of this rank."""
    return [task.partials[0][slice(*cut(task.out.numel(), task.size, CACHE_LINE)[reader])]]


def reduce_in_place(task: ReductionTask, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Reduce tensors that all ranks reach: `sources` and `targets` are the locations that the ranks published
    of their inputs and outputs."""
    all_in_window = all(location < ADDRESS for location in sources)
    if all_in_window and sources == targets and task.out.dtype == accumulator_dtype(task.out.dtype):
        _in_place(task, sources)
    else:
        _by_blocks(task, sources, targets)
    start, stop = cut(task.out.numel(), task.size, CACHE_LINE)[task.rank]
    moved = 2 * (stop - start) * (task.size - 1)
    task.count(moved, moved, 2)


def _in_place(task: ReductionTask, locations: Sequence[int]) -> None:
    """Reduce tensors that all lie in the window, in place: their own memory is all the fold needs."""
    out, recipe = task.out, task.recipe
    start, stop = cut(out.numel(), task.size, CACHE_LINE)[task.rank]
    kernel, pairs, home = kernel_of(recipe.op), recipe.order.in_place, recipe.order.home
    block = block_size(out.element_size(), task.size)
    slices = [
        torch.split(_view(task, locations[rank], start, stop, out.dtype), block) for rank, _ in recipe.sources
    ]
    for views in zip(*slices, strict=True):
        if task.checksums is not None:
            for (rank, _), view in zip(recipe.sources, views, strict=True):
                task.checksums.read(rank, view)
        for left, right in pairs:
            kernel(views[left], views[right], out=views[left])
        result = views[home]
        finish(recipe.op, result, recipe.contributions)
        for view in views:
            if view is not result:
                view.copy_(result)
    task.end()


def _by_blocks(task: ReductionTask, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Reduce inputs and outputs that may lie anywhere, block by block through the cache."""
    out, own, order, rank, size = task.out, task.partials[0], task.recipe.order, task.rank, task.size
    start, stop = cut(out.numel(), size, CACHE_LINE)[rank]
    is_reached = any(location >= ADDRESS for location in (*sources, *targets))
    nbytes = REACHED_BLOCK if is_reached else max(2 * LEAST_BLOCK, 8 * LEAST_BLOCK // size)
    block = min(nbytes // own.element_size(), stop - start)
    rooms = room_for(task.window, "fetched", own.dtype, 2, block)
    spare = room_for(task.window, "folded", accumulator_dtype(out.dtype), order.temporaries + 1, block)
    for low in range(start, stop, block or 1):
        high = min(low + block, stop)
        mine = own[low:high]

        def fetch(index: int, room: Tensor, low: int = low, high: int = high, mine: Tensor = mine) -> Tensor:
            peer = task.recipe.sources[index][0]
            fetched = mine if peer == rank else _get(task, peer, sources[peer], low, high, room)
            if task.checksums is not None:
                task.checksums.read(peer, fetched)
            return fetched

        result = out[low:high]
        fold_beside(task.recipe, fetch, rooms, result, [tensor[: high - low] for tensor in spare])
        for step in range(1, size):
            peer = (rank + step) % size  # every rank starts at another peer
            _put(task, peer, targets[peer], low, result)
    task.end()


def fold_beside(
    recipe: Recipe,
    fetch: Callable[[int, Tensor], Tensor],
    rooms: Sequence[Tensor],
    out: Tensor,
    spare: Sequence[Tensor],
) -> None:
    """Fold inputs, fetched when they are needed, into memory that may be one of them: only the last step
    writes to it, and by then every input has been read."""
    order, kernel, total = recipe.order, kernel_of(recipe.op), spare[0]
    narrow = out.dtype != total.dtype
    if not order.steps:
        total.copy_(fetch(0, rooms[0]))
    for position, (target, left, right) in enumerate(order.steps):
        a = fetch(left, rooms[0]) if left < order.inputs else _register(order, left, spare)
        b = fetch(right, rooms[1]) if right < order.inputs else _register(order, right, spare)
        last = position == len(order.steps) - 1 and not narrow
        into = out if last else _register(order, target, spare)
        if a.dtype != into.dtype and b.dtype != into.dtype:
            # Two narrow operands would be added in their own dtype and rounded; a wide one widens the sum.
            into.copy_(a)
            a = into
        kernel(a, b, out=into)
    if narrow or not order.steps:
        finish(recipe.op, total, recipe.contributions)
        out.copy_(total)
    else:
        finish(recipe.op, out, recipe.contributions)


def _register(order: ReductionOrder, register: int, spare: Sequence[Tensor]) -> Tensor:
    """Return the tensor of a register: registers number the inputs, then the temporaries, then the result;
    `spare` has the result first."""
    index = register - order.inputs
    return spare[0] if index == order.temporaries else spare[1 + index]
