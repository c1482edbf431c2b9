"""The all-reduce in shared memory for tensors that peers cannot reach: chunk by chunk through slots that
stay in the cache.

While a rank copies the peers' slices of chunk k+1 into its slot, it folds its own slice of chunk k from
everybody's slots into a result slot, and copies the peers' finished slices of chunk k-1 out. Its own slice
it reads from and writes to its own memory.
What travels: (N-1)/N of the message into slots, (N-1)/N out of them, and the fold in between. Handles any
number of partials per rank.
Reuse: a rank that fills slot k+1 has seen everybody's fold of chunk k-2, so slots are three deep. A rank
that folds chunk k has seen everybody's fill of chunk k, which comes after their taking of chunk k-3: results
are three deep as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.comm.algorithms.hops import cut
from paceline.comm.algorithms.work import CACHE_LINE, Work
from paceline.comm.ops import accumulator_dtype


def run(work: Work, slots: Slots) -> None:
    """Everybody has shown the call and filled slot 0."""
    window, out = work.window, work.out
    chunks = -(-out.numel() // slots.chunk)
    filled = folded = 0
    spare = [
        torch.empty(slots.chunk, dtype=accumulator_dtype(out.dtype), device="cpu")
        for _ in range(work.recipe.fold.temporaries + 1)
    ]
    for chunk in range(chunks):
        next_filled = 0
        if chunk + 1 < chunks:
            slots.fill(chunk + 1)
            next_filled = window.tick()
        if chunk > 0:
            work.wait(filled)
        slots.fold(chunk, spare)
        if work.seals is not None and chunk + 1 == chunks:
            work.seals.check()  # before the tick that lets the others end
        just_folded = window.tick()
        if chunk > 0:
            work.wait(folded)
            slots.take(chunk - 1)
        filled, folded = next_filled, just_folded
    work.wait(folded)
    slots.take(chunks - 1)
    share, others, own = out.numel() // work.size, work.size - 1, len(work.partials)
    work.count(share * (own + 1) * others, share * (len(work.recipe.sources) - own + others), 2 * chunks)


class Slots:
    """The window's slots, for one reduction."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._dtype = work.partials[0].dtype if work.partials else accumulator_dtype(work.out.dtype)
        width = max(self._dtype.itemsize, work.out.element_size())
        room = (
            min(work.window.staging.shape[2] // work.recipe.most_partials, work.window.results.shape[1])
            // width
        )
        grain = CACHE_LINE * work.size
        self.chunk = room // grain * grain or room

    def pieces(self, reader: int) -> Iterator[Tensor]:
        """What rank `reader` reads of this rank, in its order."""
        for chunk in range(-(-self._work.out.numel() // self.chunk)):
            low, high = chunk * self.chunk, min((chunk + 1) * self.chunk, self._work.out.numel())
            start, stop = cut(high - low, self._work.size, CACHE_LINE)[reader]
            for partial in self._work.partials:
                yield partial[low + start : low + stop]

    def fill(self, chunk: int) -> None:
        """Copies the peers' slices of this rank's partials into its slot."""
        low, start, stop, high = self._bounds(chunk)
        for position, partial in enumerate(self._work.partials):
            slot = self._slot(chunk, self._work.rank, position)
            for first, last in ((low, start), (stop, high)):
                if first < last:
                    slot[first - low : last - low].copy_(partial[first:last])

    def fold(self, chunk: int, spare: Sequence[Tensor]) -> None:
        """Folds this rank's slice into the result slot and into its own output."""
        low, start, stop, _ = self._bounds(chunk)
        if start == stop:
            return
        work = self._work
        inputs = []
        for rank, position in work.recipe.sources:
            if rank == work.rank:
                inputs.append(work.partials[position][start:stop])
            else:
                inputs.append(self._slot(chunk, rank, position)[start - low : stop - low])
            if work.seals is not None:
                work.seals.read(rank, inputs[-1])
        result = self._result(chunk)[start - low : stop - low]
        work.fold(inputs, result, spare)
        work.out[start:stop].copy_(result)

    def take(self, chunk: int) -> None:
        """Copies the peers' finished slices into this rank's output."""
        low, start, stop, high = self._bounds(chunk)
        result = self._result(chunk)
        for first, last in ((low, start), (stop, high)):
            if first < last:
                self._work.out[first:last].copy_(result[first - low : last - low])

    def _bounds(self, chunk: int) -> tuple[int, int, int, int]:
        """Where the chunk begins, where this rank's slice begins and ends, where the chunk ends."""
        low, high = chunk * self.chunk, min((chunk + 1) * self.chunk, self._work.out.numel())
        start, stop = cut(high - low, self._work.size, CACHE_LINE)[self._work.rank]
        return low, low + start, low + stop, high

    def _slot(self, chunk: int, rank: int, position: int) -> Tensor:
        item = self._dtype.itemsize
        start = position * self.chunk * item
        return self._work.window.staging[chunk % 3, rank, start : start + self.chunk * item].view(self._dtype)

    def _result(self, chunk: int) -> Tensor:
        out = self._work.out
        return self._work.window.results[chunk % 3, : self.chunk * out.element_size()].view(out.dtype)
