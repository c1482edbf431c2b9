"""The all-reduce in shared memory: every rank reads its peers' memory and folds the slice it owns.

Three ways, chosen by size and by where the tensors live; all ranks choose alike, because they look at the
same published facts:

* small (up to one slot): each rank puts its data into its slot, one tick, everybody folds everything. One
  barrier.
* spread (tensors that peers can reach): each rank folds its slice from all inputs and writes the result into
  all outputs, see `spread.py`. Two barriers.
* anything else goes through slots of the window in a pipeline of chunks, see `slots.py`.

Used by `direct` (one partial per rank, folded left to right) and by `canonical` (any partials, folded along
the tree).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from paceline.comm.algorithms.seals import Sealing, Seals, corrupt, digest
from paceline.comm.algorithms.slots import Slots, run
from paceline.comm.algorithms.spread import ADDRESS, pieces as spread_pieces, spread
from paceline.comm.algorithms.work import Recipe, Work, mark_untouched
from paceline.comm.calls import Call
from paceline.comm.fold import NOTHING
from paceline.comm.ops import ReduceOp, accumulator_dtype, kernel_of
from paceline.comm.transport.base import Transport, Window
from paceline.core.errors import PacelineError


def reduce_in_window(
    transport: Transport,
    window: Window,
    call: Call,
    recipe: Recipe,
    partials: Sequence[Tensor],
    out: Tensor,
    deadline: float,
    sealing: Sealing | None = None,
) -> None:
    """Folds everybody's partials (flat, one dtype, out's size) into `out` on every rank."""
    dtype = partials[0].dtype if partials else accumulator_dtype(out.dtype)
    if out.numel() * dtype.itemsize * recipe.most_partials <= window.small.shape[2]:
        small = small_reduce(transport, window, recipe, dtype, out.shape)
        if sealing is None:
            try:
                small.run(call, partials, out, deadline)
            except PacelineError as error:
                mark_untouched(error)
                raise
        else:
            small.run_sealed(call, partials, out, deadline, sealing)
        return
    rank, size = transport.rank, transport.world_size
    work = Work(rank, size, transport.traffic, window, call, recipe, partials, out, deadline)
    if sealing is not None:
        work.seals = Seals(sealing, window, rank, size, call.text)
    _reduce_large(work)


def _reduce_large(work: Work) -> None:
    window, recipe, partials, out = work.window, work.recipe, work.partials, work.out
    one_each = len(recipe.sources) == work.size and recipe.most_partials == 1
    reach = one_each and bool(window.reachable)
    source = _location(window, partials[0], reach) if one_each else 0
    target = _location(window, out, reach)
    slots = None if source and target else Slots(work)
    if work.seals is not None:
        work.seals.seal(partial(spread_pieces, work) if slots is None else slots.pieces, window.next_slot())
    if slots is not None:
        slots.fill(0)
    tick = window.tick(work.call, source, target)
    try:
        try:
            work.wait(tick)
            sources, targets = window.locations(work.call, work.deadline)
        except PacelineError as error:
            # A peer that got past this point writes into everybody's result. Data that is damaged already
            # would get a checksum that fits, the next time.
            if window.never_met(tick) and (work.seals is None or work.seals.intact()):
                mark_untouched(error)
            raise
        if all(sources) and all(targets):
            spread(work, sources, targets)
            return
    except BaseException:
        # From the tick on, peers may copy to and from what was published.
        window.keep_offered(*partials, out)
        raise
    late = any(source and target for source, target in zip(sources, targets, strict=True))
    if one_each and window.reachable is None:
        # Somebody's memory is not in the window, and all see it: now is the time to try the other way.
        if window.can_reach(work.call, work.deadline):
            _reduce_large(work)
            return
        slots, late = None, True  # the trial used the slots
    if slots is None:
        slots = Slots(work)
        if work.seals is not None:
            work.seals.seal(slots.pieces, work.seals.slot)
        slots.fill(0)
    if late:
        work.wait(window.tick())  # somebody has filled its slot only now
    run(work, slots)


class SmallReduce:
    """A reduction of small tensors, prepared: the same views serve every call of one dtype and shape."""

    __slots__ = (
        "_divisor",
        "_kernel",
        "_mine",
        "_programs",
        "_rank",
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
        pool = _scratch(window, recipe.fold.temporaries + 1)
        scratch = [memory[: size * wide.itemsize].view(wide).view(shape) for memory in pool]
        self._total = scratch.pop()  # for results that are narrower than the sum
        self._rank = transport.rank
        self._mine = [[view(parity, *source) for source in own] for parity in (0, 1)]
        self._slots = [
            [
                [view(parity, *source).view(-1) for source in recipe.sources if source[0] == rank]
                for rank in range(transport.world_size)
            ]
            for parity in (0, 1)
        ]
        inputs = [[view(parity, *source) for source in recipe.sources] for parity in (0, 1)]
        self._programs = [recipe.fold.bind(tensors, scratch, wide) for tensors in inputs]
        nbytes = size * dtype.itemsize
        self._volume = (len(own) * nbytes * others, (len(recipe.sources) - len(own)) * nbytes, others)

    def run(self, call: Call, partials: Sequence[Tensor], out: Tensor, deadline: float) -> None:
        parity = self._fill(partials)
        self._window.meet(call, deadline)
        self._fold(parity, out)

    def run_sealed(
        self, call: Call, partials: Sequence[Tensor], out: Tensor, deadline: float, sealing: Sealing
    ) -> None:
        """As `run`, with a checksum of every slot and a second barrier: who passes it knows that all ranks
        have read what was meant."""
        window = self._window
        value = digest(partials)
        sealing.taken()
        parity = self._fill(partials)
        window.wait(window.tick(call, value), call, deadline)
        told, _ = window.locations(call, deadline)
        for rank, (slots, value) in enumerate(zip(self._slots[parity], told, strict=True)):
            if digest(slots) != value:
                raise corrupt(rank, self._rank, call.text)
        tick = window.tick()
        self._fold(parity, out)
        window.wait(tick, call, deadline)

    def _fill(self, partials: Sequence[Tensor]) -> int:
        parity = self._window.next_slot()
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


def _scratch(window: Window, count: int) -> list[Tensor]:
    """`count` pieces of memory, each for anything that fits a small slot, also in twice the width."""
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


def _location(window: Window, tensor: Tensor, reach: bool) -> int:
    """What a rank publishes of a tensor: where it is in the window (from 1), else its address if peers can
    reach that, else 0."""
    offset = window.offset_of(tensor)
    if offset is not None:
        return offset + 1
    return tensor.data_ptr() | ADDRESS if reach else 0
