"""One reduction in shared memory to be done: what `window` and `pipeline` pass around, and the fold they
both use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch import Tensor

from paceline.comm.algorithms.seals import Seals
from paceline.comm.calls import Call
from paceline.comm.fold import Fold
from paceline.comm.ops import ReduceOp, finish, kernel_of
from paceline.comm.transport.base import Traffic, Window
from paceline.core.errors import PacelineError

CACHE_LINE = 64
LEAST_BLOCK = 128 << 10
UNTOUCHED = "untouched"


@dataclass(frozen=True)
class Recipe:
    """How partials become the result: `sources[i]` says whose which partial is the fold's input i."""

    fold: Fold
    sources: tuple[tuple[int, int], ...]
    op: ReduceOp
    contributions: int

    @property
    def most_partials(self) -> int:
        return max(position for _, position in self.sources) + 1


@dataclass(slots=True)
class Work:
    """Partials and out are flat and of one size."""

    rank: int
    size: int
    traffic: Traffic
    window: Window
    call: Call
    recipe: Recipe
    partials: Sequence[Tensor]
    out: Tensor
    deadline: float
    seals: Seals | None = None

    def wait(self, tick: int) -> None:
        self.window.wait(tick, self.call, self.deadline)

    def end(self) -> None:
        """The last tick of a reduction, waited for: this rank has written everything, and it was right."""
        if self.seals is not None:
            self.seals.check()
        self.wait(self.window.tick())

    def fold(self, inputs: Sequence[Tensor], out: Tensor, spare: Sequence[Tensor]) -> None:
        """Inputs into `out`, in the precision of `spare`, finished; `spare` holds one tensor more than the
        fold's temporaries."""
        recipe, size = self.recipe, out.numel()
        total = out if out.dtype == spare[0].dtype else spare[0][:size]
        recipe.fold.run(kernel_of(recipe.op), inputs, total, spare[1:])
        finish(recipe.op, total, recipe.contributions)
        if total is not out:
            out.copy_(total)

    def count(self, sent: int, received: int, rounds: int) -> None:
        """Elements that peers read of this rank's memory, or that this rank reads of theirs."""
        item = self.out.element_size()
        self.traffic.sent += sent * item
        self.traffic.received += received * item
        self.traffic.messages += rounds * (self.size - 1)
        self.traffic.rounds += rounds


def mark_untouched(error: PacelineError) -> None:
    """The reduction failed before any rank wrote to any result: inputs that are results too are as before."""
    error.facts[UNTOUCHED] = True


def block_size(item: int, tensors: int) -> int:
    """Elements of a block such that `tensors` of them stay in the second-level cache together, but never
    so few that handling them costs more."""
    return max(LEAST_BLOCK, _cache_bytes() // tensors) // item // CACHE_LINE * CACHE_LINE


@cache
def _cache_bytes() -> int:
    """Half of a core's second-level cache, within reason: the next block comes while this one is used."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        size = int(text.removesuffix("K")) << 10 if text.endswith("K") else int(text)
    except (OSError, ValueError):
        size = 1 << 20
    return min(max(size // 2, 256 << 10), 2 << 20)
