"""One shared-memory reduction, passed between `all_reduce`, `in_place` and `staged`, and the arithmetic that
they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from paceline.comm.algorithms.shm.checksums import ChecksumRequest, WindowChecksums
from paceline.comm.call_status import CollectiveCall
from paceline.comm.ops import finish, kernel_of
from paceline.comm.reduction_order import Recipe
from paceline.comm.transport.base import Transport, Window
from paceline.core.errors import PacelineError

CACHE_LINE = 64
LEAST_BLOCK = 128 << 10
REACHED_BLOCK = 1 << 20
"""Bytes that one system call copies between processes: a call costs as much as some 100 KB, and a few blocks
of this size still stay in the cache."""
UNTOUCHED = "untouched"


@dataclass(slots=True)
class ReductionTask:
    """Reduce the partials of all ranks by the recipe into `out` on every rank; partials and out are flat and
    of one size, and partials are only read."""

    transport: Transport
    call: CollectiveCall
    recipe: Recipe
    partials: Sequence[Tensor]
    out: Tensor
    deadline: float
    checksum: ChecksumRequest | None = None
    checksums: WindowChecksums | None = field(default=None, init=False)

    @property
    def window(self) -> Window:
        assert self.transport.window is not None
        return self.transport.window

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.world_size

    def wait(self, tick: int) -> None:
        self.window.wait(tick, self.call, self.deadline)

    def end(self) -> None:
        """Signal and await the last tick of a reduction: this rank has written everything, and it was
        right."""
        if self.checksums is not None:
            self.checksums.check()
        self.wait(self.window.signal())

    def fold(self, inputs: Sequence[Tensor], out: Tensor, spare: Sequence[Tensor]) -> None:
        """Fold into `out` in the precision of `spare`, which has one tensor more than the temporaries."""
        recipe, size = self.recipe, out.numel()
        total = out if out.dtype == spare[0].dtype else spare[0][:size]
        recipe.order.run(kernel_of(recipe.op), inputs, total, spare[1:])
        finish(recipe.op, total, recipe.contributions)
        if total is not out:
            out.copy_(total)

    def count(self, sent: int, received: int, rounds: int) -> None:
        """Count elements that peers read of this rank's memory, and that this rank reads of theirs."""
        item, traffic = self.out.element_size(), self.transport.traffic
        traffic.sent += sent * item
        traffic.received += received * item
        traffic.messages += rounds * (self.size - 1)
        traffic.rounds += rounds


def mark_untouched(error: PacelineError) -> None:
    """Mark the inputs as unchanged: the reduction failed before any rank wrote to any result."""
    error.facts[UNTOUCHED] = True


def room_for(window: Window, what: str, dtype: torch.dtype, count: int, size: int) -> list[Tensor]:
    """Return `count` tensors of `size` elements, kept with the window: fresh memory costs a page fault for
    each page. Calls of a window are serialised, and none uses the tensors after its end."""
    key = ("room", what, dtype)
    kept = cast("list[Tensor]", window.prepared.setdefault(key, []))
    if len(kept) < count or kept[0].numel() < size:
        longest = max(size, kept[0].numel() if kept else 0)
        kept[:] = [torch.empty(longest, dtype=dtype, device="cpu") for _ in range(max(count, len(kept)))]
    return [tensor[:size] for tensor in kept[:count]]


def block_size(item: int, tensors: int) -> int:
    """Return the elements of a block such that `tensors` of them stay in the second-level cache together, but
    never so few that handling them costs more."""
    return max(LEAST_BLOCK, _cache_bytes() // tensors) // item // CACHE_LINE * CACHE_LINE


@cache
def _cache_bytes() -> int:
    """Return half of a core's second-level cache, within limits: the next block is loaded while this one is
    used."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        size = int(text.removesuffix("K")) << 10 if text.endswith("K") else int(text)
    except (OSError, ValueError):
        size = 1 << 20
    return min(max(size // 2, 256 << 10), 2 << 20)
