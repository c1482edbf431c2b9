"""The all-reduce in shared memory for tensors that peers cannot reach: chunk by chunk through slots that
stay in the cache.

While a rank copies the peers' slices of chunk k+1 into its slot, it folds its own slice of chunk k from
the slots of all ranks into a result slot, and copies the peers' finished slices of chunk k-1 out. Its own
slice it reads from and writes to its own memory.
What travels: (N-1)/N of the message into slots, (N-1)/N out of them, and the fold in between. Handles any
number of partials per rank.
Reuse: a rank that fills slot k+1 has seen every rank's fold of chunk k-2, so slots are three deep. A rank
that folds chunk k has seen every rank's fill of chunk k, which comes after their taking of chunk k-3: results
are three deep as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.comm.algorithms.shm.task import CACHE_LINE, ReductionTask
from paceline.comm.ops import accumulator_dtype
from paceline.comm.reduction_order import cut


def reduce_staged(task: ReductionTask, slots: StagingSlots) -> None:
    """Run the pipeline; all ranks have signalled the call and filled slot 0."""
    window, out = task.window, task.out
    chunks = -(-out.numel() // slots.chunk)
    filled = folded = 0
    spare = [
        torch.empty(slots.chunk, dtype=accumulator_dtype(out.dtype), device="cpu")
        for _ in range(task.recipe.order.temporaries + 1)
    ]
    for chunk in range(chunks):
        next_filled = 0
        # Fill ahead before waiting: peers that are done with this chunk find the next one.
        if chunk + 1 < chunks:
            slots.fill(chunk + 1)
            next_filled = window.signal()
        if chunk > 0:  # the caller has awaited the fill of chunk 0
            task.wait(filled)
        slots.fold(chunk, spare)
        if task.checksums is not None and chunk + 1 == chunks:
            task.checksums.check()  # before the tick that lets the others end
        just_folded = window.signal()
        # Results are taken one chunk late: most peers have folded it by now, and the wait costs little.
        if chunk > 0:
            task.wait(folded)
            slots.take(chunk - 1)
        filled, folded = next_filled, just_folded
    task.wait(folded)
    slots.take(chunks - 1)
    share, others, own = out.numel() // task.size, task.size - 1, len(task.partials)
    task.count(share * (own + 1) * others, share * (len(task.recipe.sources) - own + others), 2 * chunks)


class StagingSlots:
    """The window's slots, for one reduction."""

    def __init__(self, task: ReductionTask) -> None:
        self._task = task
        self._dtype = task.partials[0].dtype if task.partials else accumulator_dtype(task.out.dtype)
        width = max(self._dtype.itemsize, task.out.element_size())
        slot = task.window.staging.shape[2] // task.recipe.most_partials
        room = min(slot, task.window.results.shape[1]) // width
        grain = CACHE_LINE * task.size
        self.chunk = room // grain * grain or room

    def pieces(self, reader: int) -> Iterator[Tensor]:
        """Yield what rank `reader` reads of this rank, in its order."""
        for chunk in range(-(-self._task.out.numel() // self.chunk)):
            _, start, stop, _ = self._bounds(chunk, reader)
            for partial in self._task.partials:
                yield partial[start:stop]

    def fill(self, chunk: int) -> None:
        """Copy the peers' slices of this rank's partials into its slot."""
        low, start, stop, high = self._bounds(chunk, self._task.rank)
        for position, partial in enumerate(self._task.partials):
            slot = self._slot(chunk, self._task.rank, position)
            for first, last in ((low, start), (stop, high)):
                if first < last:
                    slot[first - low : last - low].copy_(partial[first:last])

    def fold(self, chunk: int, spare: Sequence[Tensor]) -> None:
        """Fold this rank's slice into the result slot and into its own output."""
        low, start, stop, _ = self._bounds(chunk, self._task.rank)
        if start == stop:
            return
        task = self._task
        inputs = []
        for rank, position in task.recipe.sources:
            if rank == task.rank:
                inputs.append(task.partials[position][start:stop])
            else:
                inputs.append(self._slot(chunk, rank, position)[start - low : stop - low])
            if task.checksums is not None:
                task.checksums.read(rank, inputs[-1])
        result = self._result(chunk)[start - low : stop - low]
        task.fold(inputs, result, spare)
        task.out[start:stop].copy_(result)

    def take(self, chunk: int) -> None:
        """Copy the peers' finished slices into this rank's output."""
        low, start, stop, high = self._bounds(chunk, self._task.rank)
        result = self._result(chunk)
        for first, last in ((low, start), (stop, high)):
            if first < last:
                self._task.out[first:last].copy_(result[first - low : last - low])

    def _bounds(self, chunk: int, rank: int) -> tuple[int, int, int, int]:
        """Return where the chunk begins, where the rank's slice begins and ends, where the chunk ends."""
        low, high = chunk * self.chunk, min((chunk + 1) * self.chunk, self._task.out.numel())
        start, stop = cut(high - low, self._task.size, CACHE_LINE)[rank]
        return low, low + start, low + stop, high

    def _slot(self, chunk: int, rank: int, position: int) -> Tensor:
        item = self._dtype.itemsize
        start = position * self.chunk * item
        return self._task.window.staging[chunk % 3, rank, start : start + self.chunk * item].view(self._dtype)

    def _result(self, chunk: int) -> Tensor:
        out = self._task.out
        return self._task.window.results[chunk % 3, : self.chunk * out.element_size()].view(out.dtype)
