"""The all-reduce in shared memory: every rank reads its peers' memory and folds the slice it owns.

Three ways, chosen by size and by where the tensors live; all ranks choose alike, because they look at the
same published facts:

* small (up to one slot): each rank puts its data into its slot, signals one tick, and folds all slots. One
  barrier.
* in place (tensors that peers can reach): each rank folds its slice from all inputs and writes the result
  into all outputs, see `in_place.py`. Two barriers.
* staged: anything else goes through slots of the window in a pipeline of chunks, see `staged.py`.

Used by `direct` (one partial per rank, folded left to right) and by `canonical` (any partials, folded along
the tree).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from paceline.comm.algorithms.shm.checksums import ChecksumRequest, WindowChecksums, corrupt, digest
from paceline.comm.algorithms.shm.huge_pages import HugePages
from paceline.comm.algorithms.shm.in_place import ADDRESS, pieces as spread_pieces, reduce_in_place
from paceline.comm.algorithms.shm.staged import StagingSlots, reduce_staged
from paceline.comm.algorithms.shm.task import ReductionTask, mark_untouched
from paceline.comm.call_status import CollectiveCall
from paceline.comm.ops import ReduceOp, accumulator_dtype, kernel_of
from paceline.comm.reduction_order import NOTHING, Recipe
from paceline.comm.transport.base import Transport, Window, WindowMemory
from paceline.core.errors import PacelineError

_OFFERED: list[Tensor] = []


def reduce_in_window(task: ReductionTask) -> None:
    """Run a task whose transport has a window."""
    recipe, partials, out = task.recipe, task.partials, task.out
    dtype = partials[0].dtype if partials else accumulator_dtype(out.dtype)
    if out.numel() * dtype.itemsize * recipe.most_partials <= task.window.small.shape[2]:
        small = small_reduce(task.transport, task.window, recipe, dtype, out.shape)
        if task.checksum is not None:
            small.run_checked(task, task.checksum)
            return
        try:
            small.run(task.call, partials, out, task.deadline)
        except PacelineError as error:
            # Peers read this rank's slot, never its tensors, and it writes `out` only after its barrier.
            mark_untouched(error)
            raise
        return
    if task.checksum is not None:
        task.checksums = WindowChecksums(task.checksum, task.transport, task.window, task.call.text)
    _reduce_large(task)


def _reduce_large(task: ReductionTask) -> None:
    """Reduce more than a small slot holds, in the way that all ranks find in the published locations.

    Every decision below is taken from what all ranks see alike (the recipe, the published locations,
    `window.reachable`), never from what this rank alone knows: ranks that took different branches would wait
    for ticks that never come.
    """
    window, recipe, partials, out = task.window, task.recipe, task.partials, task.out
    # In place needs one input per rank. With several partials, or none, only slots will do.
    one_each = len(recipe.sources) == task.size and recipe.most_partials == 1
    reach = one_each and bool(window.reachable)
    source = _location(window, partials[0], reach) if one_each else 0
    target = _location(window, out, reach)
    # A rank without a location to publish cannot be served in place, so all ranks will go through slots. It
    # fills its first slot before its first tick: the others then need no further barrier to read it.
    slots = None if source and target else StagingSlots(task)
    if task.checksums is not None:
        read_by = partial(spread_pieces, task) if slots is None else slots.pieces
        task.checksums.publish(read_by, window.next_slot)
    if slots is not None:
        slots.fill(0)
    # One tick publishes: input ready, slot filled, addresses of input and output.
    tick = window.signal(task.call, source, target)
    try:
        try:
            task.wait(tick)
            sources, targets = window.locations(task.call, task.deadline)
        except PacelineError as error:
            # The caller may retry with the same memory only if no rank has written to it. A rank writes once
            # it is past this tick, and no rank gets past it if one never reaches it. Damaged data must not be
            # retried either: the next attempt would take a checksum that fits the damage.
            if window.is_unreachable(tick) and (task.checksums is None or task.checksums.intact()):
                mark_untouched(error)
            raise
        if all(sources) and all(targets):
            # Its last tick is the second barrier: no rank returns, and reuses its memory, before every rank
            # has written its slice everywhere.
            reduce_in_place(task, sources, targets)
            return
    except BaseException:
        # From the tick on peers may copy to and from the published addresses, also after this rank has given
        # up: this memory is never freed, or it could be reused for anything else. What lies in the window
        # stays with the segment, and a broken group hands none of it out again.
        if window.reachable:
            _OFFERED.extend(tensor for tensor in (*partials, out) if window.offset_of(tensor) is None)
        raise
    # A rank that published both locations expected to work in place and has filled no slot yet.
    late = any(source and target for source, target in zip(sources, targets, strict=True))
    if one_each and window.reachable is None:
        # Some tensor is not in the window, and all ranks see that: try now whether the kernel lets ranks
        # reach each other's ordinary memory. The answer holds for all later calls.
        if window.can_reach(task.call, task.deadline):
            # `reachable` is set now: every rank publishes addresses and none comes here again. The call is
            # announced a second time, by all ranks, with the other entry of `WindowTicks`.
            _reduce_large(task)
            return
        slots, late = None, True  # the trial used the staging area, so every rank fills its slot again
    if slots is None:
        slots = StagingSlots(task)
        if task.checksums is not None:
            task.checksums.publish(slots.pieces, task.checksums.slot)
        slots.fill(0)
    if late:
        task.wait(window.signal())  # for the ranks that have filled their slot only now
    reduce_staged(task, slots)


class SmallReduce:
    """A reduction of small tensors, prepared: the same views serve every call of one dtype and shape."""

    __slots__ = (
        "_divisor",
        "_kernel",
        "_mine",
        "_programs",
        "_slots",
        "_total",
        "_traffic",
        "_volume",
        "_window",
    )

    @torch.inference_mode(False)  # made once and used in any mode
    def __init__(
        self, transport: Transport, window: Window, recipe: Recipe, dtype: torch.dtype, shape: torch.Size
    ) -> None:
        self._window, self._traffic = window, transport.traffic
        self._kernel = kernel_of(recipe.op)
        self._divisor = recipe.contributions if recipe.op is ReduceOp.AVERAGE else 1
        size, others = shape.numel(), transport.world_size - 1

        def view(parity: int, rank: int, position: int) -> Tensor:
            start = position * size * dtype.itemsize
            return window.small[parity, rank, start : start + size * dtype.itemsize].view(dtype).view(shape)

        own = [source for source in recipe.sources if source[0] == transport.rank]
        wide = accumulator_dtype(dtype)
        # One call at a time: all prepared reductions can share their temporaries.
        pool = _scratch(window, recipe.order.temporaries + 1)
        scratch = [memory[: size * wide.itemsize].view(wide).view(shape) for memory in pool]
        self._total = scratch.pop()  # for results that are narrower than the sum
        self._mine = [[view(parity, *source) for source in own] for parity in (0, 1)]
        self._slots = [
            [
                [view(parity, *source).view(-1) for source in recipe.sources if source[0] == rank]
                for rank in range(transport.world_size)
            ]
            for parity in (0, 1)
        ]
        inputs = [[view(parity, *source) for source in recipe.sources] for parity in (0, 1)]
        self._programs = [recipe.order.bind(tensors, scratch, wide) for tensors in inputs]
        nbytes = size * dtype.itemsize
        self._volume = (len(own) * nbytes * others, (len(recipe.sources) - len(own)) * nbytes, others)

    def run(self, call: CollectiveCall, partials: Sequence[Tensor], out: Tensor, deadline: float) -> None:
        parity = self._fill(partials)
        self._window.barrier(call, deadline)
        self._fold(parity, out)

    def run_checked(self, task: ReductionTask, checksum: ChecksumRequest) -> None:
        """Reduce as `run` does, with a checksum of every slot and a second barrier: a rank that passes it
        knows that all ranks have read what was meant."""
        window, call, deadline = self._window, task.call, task.deadline
        # Of the tensors, before they are copied into the slots: damage of the copy is found, too.
        value = digest(task.partials)
        checksum.taken()
        parity = self._fill(task.partials)
        window.wait(window.signal(call, value), call, deadline)
        published, _ = window.locations(call, deadline)
        for rank, (slots, value) in enumerate(zip(self._slots[parity], published, strict=True)):
            if digest(slots) != value:
                raise corrupt(task.transport, rank, call.text)
        # A rank that found damage never gives this tick, so no rank returns with a sum that another rank
        # could not compute. The fold runs while slower ranks still check.
        tick = window.signal()
        self._fold(parity, task.out)
        window.wait(tick, call, deadline)

    def _fill(self, partials: Sequence[Tensor]) -> int:
        # No wait before the slot is overwritten, although peers read it two calls ago: this rank has seen the
        # tick of every rank in the call between, which a rank gives only after its fold of the one before.
        parity = self._window.next_slot
        slots = self._mine[parity]
        if len(slots) == 1:
            slots[0].copy_(partials[0])
        else:
            for slot, mine in zip(slots, partials, strict=True):
                slot.copy_(mine)
        return parity

    def _fold(self, parity: int, out: Tensor) -> None:
        total = out if out.dtype == self._total.dtype else self._total
        kernel = self._kernel
        for widened, left, right, target in self._programs[parity]:
            into = total if target is None else target
            if widened is not None:
                into.copy_(widened)
            if right is not NOTHING:
                kernel(total if left is None else left, total if right is None else right, out=into)
        if self._divisor != 1:
            total.div_(self._divisor)
        if total is not out:
            out.copy_(total)
        traffic = self._traffic
        sent, received, messages = self._volume
        traffic.sent += sent
        traffic.received += received
        traffic.messages += messages
        traffic.rounds += 1


def _scratch(window: WindowMemory, count: int) -> list[Tensor]:
    """Return `count` buffers, each for anything that fits a small slot, also in twice the width."""
    pool = cast("list[Tensor]", window.prepared.setdefault("scratch", []))
    while len(pool) < count:
        pool.append(torch.empty(2 * window.small.shape[2], dtype=torch.uint8, device="cpu"))
    return pool[:count]


def small_reduce(
    transport: Transport, window: Window, recipe: Recipe, dtype: torch.dtype, shape: torch.Size
) -> SmallReduce:
    key = (recipe, dtype, shape)
    prepared = window.prepared.get(key)
    if prepared is None:
        if len(window.prepared) >= 1024:  # shapes without end would hold memory without end
            window.prepared.clear()
        prepared = window.prepared[key] = SmallReduce(transport, window, recipe, dtype, shape)
    return cast(SmallReduce, prepared)


def _location(window: WindowMemory, tensor: Tensor, reach: bool) -> int:
    """Return a tensor's offset in the window (from 1), else its address if peers can reach it, else 0."""
    offset = window.offset_of(tensor)
    if offset is not None:
        return offset + 1
    if not reach:
        return 0
    pages = window.prepared.setdefault(HugePages, HugePages())
    cast(HugePages, pages).use(tensor)
    return tensor.data_ptr() | ADDRESS
