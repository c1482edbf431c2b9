"""A feed whose batches the caller brings: in each step the samples of this rank's shards as one piece, which
the caller has cut out itself.

Which samples these are is a function of the step's size, the shards and this rank's block of them (`dealt`):
the shards are those of every other run, and a rank that gets another block is dealt another piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.core.wording import counted
from paceline.data.batch_plan import DataPosition, ShardSlice, slices_of_step
from paceline.data.containers import map_leaves
from paceline.data.source_interface import Batch, Indices
from paceline.train.step.batch_feed import BatchFeed


@final
class CountedSamples:
    """The data of such a run: its size is known, and no process can read it. A Source."""

    def __init__(self, size: int) -> None:
        self.size: int | None = size

    def fetch(self, indices: Indices) -> Batch:
        raise UsageError(
            f"{counted(len(indices), 'sample')} cannot be read: the caller brings the samples of every step",
            remedy="pass them to the step",
        )


@final
class GivenBatches(BatchFeed):
    """`micro_batch`: samples of a forward pass at most; `full`: samples of a full step."""

    def __init__(self, full: int, micro_batch: int | None) -> None:
        self._full, self._micro_batch = full, micro_batch
        self._data: Any = None
        self._slices: Sequence[ShardSlice] = ()
        self._first = self._total = 0

    def slices(self, total: int, shards: int) -> Sequence[ShardSlice]:
        """Return the shards of a step of `total` samples. A short step fills the first ones as a full step
        does; one that has more than a full step is cut evenly."""
        return slices_of_step(0, total, max(total, self._full), shards)

    def dealt(self, total: int, shards: int, block: Sequence[int]) -> tuple[int, int]:
        """Return the samples, from the first to the one behind the last, of a rank with this block."""
        slices = self.slices(total, shards)
        return (slices[block[0]].start, slices[block[-1]].stop) if block else (total, total)

    def give(self, data: Any, total: int, shards: int, block: Sequence[int]) -> None:
        """Take this rank's piece of the next step."""
        first, behind = self.dealt(total, shards, block)
        _check_length(data, first, behind)
        self._data, self._first, self._total = data, first, total
        self._slices = self.slices(total, shards)
        self.full_step = max(total, self._full)

    def step(self, position: DataPosition, batch: int, missing: Sequence[int] | None = None) -> int:
        return self._total

    def batches(self, shard: int) -> Iterator[Batch]:
        for start, stop in self._slices[shard].pieces(self._micro_batch):
            yield Batch(_cut(self._data, start - self._first, stop - self._first), stop - start)

    def close(self) -> None:
        self._data = None


def _cut(data: Any, start: int, stop: int) -> Any:
    def array(thing: Any) -> Any:
        return torch.as_tensor(thing[start:stop]) if isinstance(thing, np.ndarray) else thing

    return map_leaves(data, lambda tensor: tensor[start:stop], array)


def _check_length(data: Any, first: int, behind: int) -> None:
    lengths: list[int] = []

    def note(leaf: Tensor | np.ndarray[Any, Any]) -> Any:
        lengths.append(len(leaf) if leaf.ndim else -1)
        return leaf

    map_leaves(data, note, lambda thing: note(thing) if isinstance(thing, np.ndarray) else thing)
    wanted = behind - first
    if lengths and all(length == wanted for length in lengths):
        return
    if not lengths and not wanted:
        return  # a rank without samples may bring nothing at all
    found = " and ".join(str(length) for length in sorted(set(lengths))) or "no tensor with"
    raise UsageError(
        f"the batch has {found} samples, and this process was dealt samples {first} to {behind} of the step: "
        f"{counted(wanted, 'sample')}",
        remedy="start, end = manager.get_local_batch(samples of the step), and pass exactly those: "
        "(inputs[start:end], targets[start:end])",
    )
