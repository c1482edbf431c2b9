"""What a member says that it committed: steps and shards, put together until the next heartbeat.

Must not know what becomes of a receipt.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from paceline.core.control.messages import Receipt
from paceline.train.recorder import CommittedStep

if TYPE_CHECKING:
    from paceline.core.control.member_link import MemberLink


@dataclass
class _Open:
    generation: int
    first: int
    last: int
    shards: tuple[int, ...]
    hashes: dict[str, str] = field(default_factory=dict)
    shard_hashes: list[tuple[int, int, str]] = field(default_factory=list)


@final
class Receipts:
    """Steps in a row with the same shards become one receipt. Filled by the main thread, sent by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unsent: list[_Open] = []

    def add(
        self,
        generation: int,
        step: CommittedStep,
        shards: tuple[int, ...],
        shard_hashes: Mapping[int, str],
    ) -> None:
        with self._lock:
            last = self._unsent[-1] if self._unsent else None
            if last is None or (last.generation, last.last + 1, last.shards) != (
                generation,
                step.step,
                shards,
            ):
                last = _Open(generation, step.step, step.step, shards)
                self._unsent.append(last)
            last.last = step.step
            if step.hash is not None:
                last.hashes[str(step.step)] = step.hash
            last.shard_hashes += [(step.step, shard, digest) for shard, digest in shard_hashes.items()]

    def send(self, link: MemberLink | None) -> None:
        if link is None:
            return
        with self._lock:
            unsent, self._unsent = self._unsent, []
            # With the lock held: two threads send in the order of the steps. Whoever has a receipt of a later
            # step takes an earlier one for what it knows.
            for one in unsent:
                link.send(
                    Receipt(
                        generation=one.generation,
                        first=one.first,
                        last=one.last,
                        shards=one.shards,
                        hashes=one.hashes,
                        shard_hashes=tuple(one.shard_hashes),
                    )
                )
