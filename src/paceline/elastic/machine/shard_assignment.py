"""Assign shards to members: by speed in contiguous blocks, or around the shards that members already hold.

Pure arithmetic over view indexes; must not know workers, slots or time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

ShardAssignment = tuple[tuple[int, ...], ...]

_SLOWEST = 1e6  # times the typical time, at most: a speed is never 0, whatever a member says of itself


def counts(shards: int, speeds: Sequence[float], kept: Sequence[int] | None = None) -> list[int]:
    """Return how many shards each member computes, so that the slowest is done as early as possible. `kept`
    is the least number of each. Among equals the member with fewer shards comes first, then the faster, then
    the one with the lower index."""
    have = list(kept) if kept is not None else [0] * len(speeds)
    heap = [
        ((count + 1) / speed, count, -speed, index)
        for index, (count, speed) in enumerate(zip(have, speeds, strict=True))
    ]
    heapq.heapify(heap)
    for _ in range(shards - sum(have)):
        _, _, minus_speed, index = heap[0]
        have[index] += 1
        heapq.heapreplace(heap, ((have[index] + 1) / -minus_speed, have[index], minus_speed, index))
    return have


def contiguous(shards: int, speeds: Sequence[float]) -> ShardAssignment:
    """Return blocks of consecutive shards in the order of the members."""
    blocks: list[tuple[int, ...]] = []
    first = 0
    for count in counts(shards, speeds):
        blocks.append(tuple(range(first, first + count)))
        first += count
    return tuple(blocks)


def around_held(shards: int, held: Sequence[Sequence[int]], speeds: Sequence[float]) -> ShardAssignment:
    """Leave each held shard with the first member that holds it, and assign the others in runs."""
    taken: set[int] = set()
    kept: list[list[int]] = []
    for mine in held:
        own = sorted({shard for shard in mine if 0 <= shard < shards} - taken)
        taken.update(own)
        kept.append(own)
    wanted = counts(shards, speeds, [len(own) for own in kept])
    free = iter([shard for shard in range(shards) if shard not in taken])
    return tuple(
        tuple(sorted([*own, *(next(free) for _ in range(count - len(own)))]))
        for own, count in zip(kept, wanted, strict=True)
    )


def speeds_from(seconds: Sequence[float], weights: Sequence[float], slow_from: float) -> list[float]:
    """Return speeds from times per shard (0: not measured, taken as typical). No member counts as faster than
    the typical one, and one counts as slower only from `slow_from` times its time on: noise moves nothing."""
    typical = median([second for second in seconds if second > 0])
    speeds = []
    for second, weight in zip(seconds, weights, strict=True):
        ratio = min(second / typical, _SLOWEST) if typical > 0 else 1.0
        speeds.append(weight / ratio if ratio >= slow_from else weight)
    return speeds


def makespan(assignment: ShardAssignment, speeds: Sequence[float]) -> float:
    """Return when the slowest member is done with its shards."""
    return max((len(mine) / speed for mine, speed in zip(assignment, speeds, strict=True)), default=0.0)


def median(values: Sequence[float]) -> float:
    """Return the lower median; 0 for nothing."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0
