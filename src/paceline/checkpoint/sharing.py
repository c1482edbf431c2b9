"""Which rank writes which tensor. Must not know how they are written."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from torch import Tensor

from paceline.core.errors import UsageError


def share_of(tensors: Mapping[str, Tensor], rank: int, world: int) -> list[str]:
    """The names that `rank` of `world` writes: whole tensors, balanced by bytes, largest first.

    Every rank computes the same division, from names and sizes alone, whatever the order of the mapping.
    """
    if not 0 <= rank < world:
        raise UsageError(f"rank {rank} of {world}", remedy="give 0 <= rank < world")
    sizes = sorted((-_nbytes(name, tensor), name) for name, tensor in tensors.items())
    loads = [(0, index) for index in range(world)]
    mine: list[str] = []
    for negative, name in sizes:
        load, index = heapq.heappop(loads)
        heapq.heappush(loads, (load - negative, index))
        if index == rank:
            mine.append(name)
    return sorted(mine)


def _nbytes(name: str, tensor: Tensor) -> int:
    if not isinstance(tensor, Tensor):
        raise UsageError(
            f"{name!r} is a {type(tensor).__name__}, not a tensor", remedy="put plain values into the state"
        )
    return tensor.numel() * tensor.element_size()
