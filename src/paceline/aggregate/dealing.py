"""Who computes which samples when nobody waits for anybody: ranges of each epoch's order, dealt one by one.

Every position of every epoch is settled exactly once. A range whose worker is lost, or whose gradient was too
old, is dealt again before anything new. The next epoch begins as soon as all of this one is dealt, while the
last ranges are still under way. Pure bookkeeping. Must not know workers, gradients or what the samples are.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from paceline.core.errors import InternalError
from paceline.data.arguments import whole


@dataclass(frozen=True, order=True)
class Range:
    """Positions `start` to `stop` - 1 of the order of an epoch, counted from 0."""

    epoch: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


@final
class Dealer:
    """Deals `epochs` passes over `samples` positions in ranges of `batch`."""

    def __init__(self, samples: int, epochs: int, batch: int) -> None:
        self.samples = whole("samples", samples, 1)
        self.epochs = whole("epochs", epochs, 1)
        self.batch = whole("batch", batch, 1)
        self._epoch, self._offset = 0, 0  # of the next range that was never dealt
        self._back: list[Range] = []  # a heap: the oldest is dealt first
        self._out: set[Range] = set()
        self._open: dict[int, int] = {}  # epoch -> positions that are not settled
        self.completed = 0  # epochs, of which all before are complete too

    @property
    def done(self) -> bool:
        return self.completed >= self.epochs

    @property
    def settled(self) -> int:
        """Positions settled in all epochs together."""
        return self._epoch * self.samples + self._offset - self._missing()

    def take(self) -> Range | None:
        """The next range; None while there is nothing left but what others have."""
        if self._back:
            part = heapq.heappop(self._back)
        elif self._epoch >= self.epochs:
            return None
        else:
            part = Range(self._epoch, self._offset, min(self._offset + self.batch, self.samples))
            self._open.setdefault(part.epoch, self.samples)
            self._offset = part.stop
            if self._offset == self.samples:
                self._epoch, self._offset = self._epoch + 1, 0
        self._out.add(part)
        return part

    def settle(self, part: Range) -> list[int]:
        """The range is applied; the epochs that are complete with it."""
        self._forget(part)
        self._open[part.epoch] -= part.count
        before = self.completed
        while self._open.get(self.completed) == 0:
            del self._open[self.completed]
            self.completed += 1
        return list(range(before, self.completed))

    def give_back(self, part: Range) -> None:
        """The range was not applied: somebody else gets it."""
        self._forget(part)
        heapq.heappush(self._back, part)

    def state_dict(self) -> dict[str, Any]:
        """Plain data; what is under way counts as not done."""
        missing = sorted([*self._back, *self._out])
        return {
            "samples": self.samples,
            "epoch": self._epoch,
            "offset": self._offset,
            "missing": [[part.epoch, part.start, part.stop] for part in missing],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._offset = state["epoch"], state["offset"]
        self._back = sorted(Range(*part) for part in state["missing"])
        self._out = set()
        self._open = {}
        first = min([self._epoch, *(part.epoch for part in self._back)])
        for epoch in range(first, self._epoch + 1):
            dealt = self.samples if epoch < self._epoch else self._offset
            missing = sum(part.count for part in self._back if part.epoch == epoch)
            left = self.samples - dealt + missing
            if left < self.samples or missing:
                self._open[epoch] = left
        self.completed = first
        while self._open.get(self.completed) == 0:
            del self._open[self.completed]
            self.completed += 1

    def _missing(self) -> int:
        return sum(part.count for part in (*self._back, *self._out))

    def _forget(self, part: Range) -> None:
        if part not in self._out:
            raise InternalError(f"{part} is settled or given back, and nobody had it")
        self._out.remove(part)
