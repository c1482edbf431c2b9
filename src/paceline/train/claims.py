"""Which shards of a step are computed by now, by any member: what the backup policy goes by.

Ranks that are done with their own shards wait a moment for the others', then compute the last of those that
are still missing; a slow rank skips what another has done. Two may end with the same shard: the bits are
equal, and the step agrees on whose counts. A claim belongs to one attempt at a step, that of one generation:
with another view the gradients that it speaks of are gone, or their member is. Must not know how ranks tell
each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import final

from paceline.comm.shards import Holdings
from paceline.core.errors import PeerLostError
from paceline.train.team import Team

_PATIENCE = 0.5  # of the time for a shard, before a missing one is taken over
_LEAST_SECONDS = 0.005
_LOOK_SECONDS = 0.05


@final
class Claims:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._attempt = (0, 0)  # generation and step; a later view may go back to an earlier step
        self._done: set[int] = set()

    def add(self, generation: int, step: int, shard: int) -> None:
        """A member of this generation has computed this shard; from any thread. It may be ahead of this one,
        and in the next view or step already."""
        with self._changed:
            if (generation, step) > self._attempt:
                self._attempt, self._done = (generation, step), set()
            if (generation, step) == self._attempt:
                self._done.add(shard)
                self._changed.notify_all()

    def has(self, generation: int, step: int, shard: int) -> bool:
        with self._changed:
            return (generation, step) == self._attempt and shard in self._done

    def wait_for_spare(
        self, step: int, team: Team, shard_seconds: float, check: Callable[[], None]
    ) -> int | None:
        """A shard that this rank may compute in the place of a slow one; None when all are done.

        Each rank begins at another place of the list, so that idle ranks rarely choose the same one.
        """
        until = time.monotonic() + max(_LEAST_SECONDS, _PATIENCE * shard_seconds)
        while True:
            check()
            with self._changed:
                done = self._done if (team.generation, step) == self._attempt else set()
                missing = [shard for shard in range(team.shards) if shard not in done]
                if not missing:
                    return None
                left = until - time.monotonic()
                if left > 0:
                    self._changed.wait(min(left, _LOOK_SECONDS))
                    continue
            return missing[-1 - team.rank % len(missing)]


def first_holders(told: Sequence[Sequence[int]], shards: int, step: int) -> Holdings:
    """Whose of the shards that several ranks computed counts: the first rank's. `told`: what each has."""
    owner: dict[int, int] = {}
    for rank, computed in enumerate(told):
        for shard in computed:
            owner.setdefault(shard, rank)
    if len(owner) < shards:
        missing = sorted(set(range(shards)) - owner.keys())
        raise PeerLostError(f"step {step}: shards {missing} were left to a rank that is gone")
    blocks = [tuple(shard for shard in sorted(owner) if owner[shard] == rank) for rank in range(len(told))]
    return Holdings(shards, tuple(blocks))
