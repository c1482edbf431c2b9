"""Batch plan of a run: positions in it, slices of a batch, blocks of shards for workers. Pure arithmetic.

A run is defined by samples. A step takes the next `global_batch` positions of its epoch, shard j takes slice
j of them, and a worker computes a contiguous block of shards. None of it depends on the number of workers,
except the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from paceline.core.errors import UsageError
from paceline.core.wording import counted


@dataclass(frozen=True)
class DataPosition:
    """Position of a run in the data: what was committed, and where the next step reads."""

    epoch: int = 0
    offset: int = 0  # positions of this epoch that committed steps have taken
    step: int = 0  # committed steps since the start of the run
    samples: int = 0  # samples applied since the start of the run

    def after(self, taken: int, applied: int) -> DataPosition:
        """Return where a run is after a step that took `taken` positions and applied `applied` samples."""
        return DataPosition(self.epoch, self.offset + taken, self.step + 1, self.samples + applied)

    @property
    def epoch_of_last_step(self) -> int:
        """The epoch of the last committed step; 0 before the first."""
        return max(0, self.epoch - 1) if self.offset == 0 else self.epoch

    def next_epoch(self) -> DataPosition:
        return DataPosition(self.epoch + 1, 0, self.step, self.samples)


@dataclass(frozen=True)
class ShardSlice:
    """One shard's part of a step, as positions in the epoch's order."""

    shard: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def pieces(self, micro_batch: int | None) -> list[tuple[int, int]]:
        """Return the slice in pieces of at most `micro_batch`; an empty slice has none."""
        size = micro_batch or max(self.count, 1)
        return [(start, min(start + size, self.stop)) for start in range(self.start, self.stop, size)]


def split_evenly(count: int, parts: int) -> list[tuple[int, int]]:
    """Cut range(count) into `parts` runs, in order, whose lengths differ by one at most."""
    return [(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


# Loop, feed and reader of a worker ask for the same step, and a step has as many slices as the whole job has
# shards.
@lru_cache(maxsize=8)
def slices_of_step(offset: int, count: int, batch: int, shards: int) -> tuple[ShardSlice, ...]:
    """Return the shards of a step that takes `count` positions from `offset` on, of the `batch` of a full
    step.

    A short step fills the first shards as a full one does and leaves the last ones without samples: a shard
    of its usual size is what BatchNorm and compiled kernels expect.
    """
    return tuple(
        ShardSlice(shard, offset + min(start, count), offset + min(stop, count))
        for shard, (start, stop) in enumerate(split_evenly(batch, shards))
    )


def assign(shards: int, workers: int) -> list[range]:
    """Return the block of shards that each worker computes; workers beyond the number of shards get none."""
    if shards < 1 or workers < 1:
        raise UsageError(
            f"{counted(shards, 'shard')} for {counted(workers, 'worker')}",
            remedy="both are whole numbers from 1 up",
        )
    # The longer blocks come first: they start at even shards more often, so more of a block is one subtree of
    # the canonical sum and fewer partials travel.
    each, longer = divmod(shards, workers)
    starts = [each * rank + min(rank, longer) for rank in range(workers + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
