"""One direction of one pair of ranks: a circular buffer with a single writer and a single reader.

Positions only grow; the writer owns `head`, the reader owns `tail`. Never blocks: what does not fit is
written later by the caller.
Knows bytes, not messages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.transport.shm import sync
from paceline.comm.transport.shm.layout import RING_HEADER, Layout

_HEAD, _TAIL = 0, 8  # 64-bit words, a cache line apart


class Ring:
    @torch.inference_mode(False)  # made once and used in any mode
    def __init__(self, memory: memoryview, layout: Layout, lane: int, source: int, dest: int) -> None:
        start = layout.ring(lane, source, dest)
        self._words = memory[start : start + RING_HEADER].cast("Q")
        self.capacity = layout.ring_bytes
        self._bytes = memory[start + RING_HEADER : start + RING_HEADER + self.capacity]
        self._tensor: Tensor = torch.frombuffer(self._bytes, dtype=torch.uint8)

    @property
    def readable(self) -> int:
        return self._words[_HEAD] - self._words[_TAIL]

    @property
    def writable(self) -> int:
        return self.capacity - self.readable

    def write(self, data: memoryview) -> int:
        """Writes as much of `data` as fits; returns how much that was."""
        head = self._words[_HEAD]
        count = min(len(data), self.capacity - (head - self._words[_TAIL]))
        at = head % self.capacity
        first = min(count, self.capacity - at)
        self._bytes[at : at + first] = data[:first]
        if count > first:
            self._bytes[: count - first] = data[first:count]
        return self._advance_head(head, count)

    def read(self, into: memoryview) -> int:
        """Reads as much as there is and `into` holds."""
        tail = self._words[_TAIL]
        count = min(len(into), self._words[_HEAD] - tail)
        sync.fence()
        at = tail % self.capacity
        first = min(count, self.capacity - at)
        into[:first] = self._bytes[at : at + first]
        if count > first:
            into[first:count] = self._bytes[: count - first]
        return self._advance_tail(tail, count)

    def write_tensor(self, data: Tensor) -> int:
        """As `write`, for a uint8 tensor; the copy leaves the interpreter free."""
        head = self._words[_HEAD]
        count = min(data.numel(), self.capacity - (head - self._words[_TAIL]))
        at = head % self.capacity
        count = min(count, self.capacity - at)
        if count:
            self._tensor[at : at + count].copy_(data[:count])
        return self._advance_head(head, count)

    def read_tensor(self, into: Tensor) -> int:
        tail = self._words[_TAIL]
        count = min(into.numel(), self._words[_HEAD] - tail)
        sync.fence()
        at = tail % self.capacity
        count = min(count, self.capacity - at)
        if count:
            into[:count].copy_(self._tensor[at : at + count])
        return self._advance_tail(tail, count)

    def _advance_head(self, head: int, count: int) -> int:
        if count:
            sync.fence()
            self._words[_HEAD] = head + count
        return count

    def _advance_tail(self, tail: int, count: int) -> int:
        if count:
            sync.fence()
            self._words[_TAIL] = tail + count
        return count
