"""Which shards of a step are computed by now, by anybody: what the backup policy goes by.

Ranks that are done with their own shards wait a moment for the others', then compute the last of those that
are still missing; whoever is slow skips what somebody else has done. Both may end with the same shard: the
bits are equal, and the step agrees on whose counts. Must not know how ranks tell each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import final

from paceline.train.team import Team

_PATIENCE = 0.5  # of the time for a shard, before a missing one is taken over
_LEAST_SECONDS = 0.005
_LOOK_SECONDS = 0.05


@final
class Claims:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step = 0
        self._done: set[int] = set()

    def add(self, step: int, shard: int) -> None:
        """Somebody has computed this shard; from any thread."""
        with self._changed:
            if step > self._step:
                self._step, self._done = step, set()
            if step == self._step:
                self._done.add(shard)
                self._changed.notify_all()

    def has(self, step: int, shard: int) -> bool:
        with self._changed:
            return step == self._step and shard in self._done

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
                done = self._done if step == self._step else set()
                missing = [shard for shard in range(team.shards) if shard not in done]
                if not missing:
                    return None
                left = until - time.monotonic()
                if left > 0:
                    self._changed.wait(min(left, _LOOK_SECONDS))
                    continue
            return missing[-1 - team.rank % len(missing)]
