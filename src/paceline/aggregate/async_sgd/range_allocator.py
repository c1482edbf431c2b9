"""Allocate ranges of each epoch's order of samples, one by one, to workers that never wait for each other.

Every position of every epoch is settled exactly once. A range whose worker is lost, or whose gradient was too
old, is allocated again before anything new. The next epoch begins as soon as all of this one is allocated,
while its last ranges are still in progress. Pure bookkeeping.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from paceline.core.errors import InternalError
from paceline.data.whole_numbers import whole


@dataclass(frozen=True, order=True)
class SampleRange:
    """Positions `start` to `stop` - 1 of the order of an epoch, counted from 0."""

    epoch: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


@final
class RangeAllocator:
    """Allocator of `epochs` passes over `samples` positions in ranges of `batch`."""

    def __init__(self, samples: int, epochs: int, batch: int) -> None:
        self.samples = whole("samples", samples, 1)
        self.epochs = whole("epochs", epochs, 1)
        self.batch = whole("batch", batch, 1)
        self._epoch, self._offset = 0, 0  # of the next range that was never allocated
        self._back: list[SampleRange] = []  # a heap: the oldest is allocated first
        self._out: set[SampleRange] = set()
        self._open: dict[int, int] = {}  # epoch -> positions that are not settled
        self.completed = 0  # epochs, of which all before are complete too

    @property
    def done(self) -> bool:
        return self.completed >= self.epochs

    @property
    def settled(self) -> int:
        """The number of positions settled in all epochs together."""
        missing = sum(part.count for part in (*self._back, *self._out))
        return self._epoch * self.samples + self._offset - missing

    def take(self) -> SampleRange | None:
        """Return the next range; None while all that is left is in progress elsewhere."""
        if self._back:
            part = heapq.heappop(self._back)
        elif self._epoch >= self.epochs:
            return None
        else:
            part = SampleRange(self._epoch, self._offset, min(self._offset + self.batch, self.samples))
            self._open.setdefault(part.epoch, self.samples)
            self._offset = part.stop
            if self._offset == self.samples:
                self._epoch, self._offset = self._epoch + 1, 0
        self._out.add(part)
        return part

    def settle(self, part: SampleRange) -> None:
        """Note that the range is applied."""
        self._forget(part)
        self._open[part.epoch] -= part.count
        self._count_completed()

    def give_back(self, part: SampleRange) -> None:
        """Take back a range that was not applied, for another worker."""
        self._forget(part)
        heapq.heappush(self._back, part)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data; ranges in progress count as missing."""
        missing = sorted([*self._back, *self._out])
        return {
            "samples": self.samples,
            "epoch": self._epoch,
            "offset": self._offset,
            "missing": [[part.epoch, part.start, part.stop] for part in missing],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._offset = state["epoch"], state["offset"]
        self._back = sorted(SampleRange(*part) for part in state["missing"])
        self._out = set()
        self._open = {}
        first = min([self._epoch, *(part.epoch for part in self._back)])
        for epoch in range(first, self._epoch + 1):
            allocated = self.samples if epoch < self._epoch else self._offset
            missing = sum(part.count for part in self._back if part.epoch == epoch)
            left = self.samples - allocated + missing
            if left < self.samples or missing:
                self._open[epoch] = left
        self.completed = first
        self._count_completed()

    def _count_completed(self) -> None:
        while self._open.get(self.completed) == 0:
            del self._open[self.completed]
            self.completed += 1

    def _forget(self, part: SampleRange) -> None:
        if part not in self._out:
            raise InternalError(f"{part} is settled or given back, and was not allocated")
        self._out.remove(part)
