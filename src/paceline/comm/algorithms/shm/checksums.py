"""Checksums of one reduction: every rank publishes them for what its peers will read, every reader checks.

A rank takes one checksum for each peer, of the part of its partials that this peer reads, and publishes them
before any peer may read the data. The rank's own part has one too: it is checked also where it never left
the rank's memory. A reader hashes what it folds, block by block, while it is in the cache, and signals its
last tick only if everything matched. All ranks wait for that tick before they return, so either all have the
result or all fail, with the name of the rank whose data it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from paceline.comm.transport.base import Transport, WindowMemory, labels_of, memory_of
from paceline.core.errors import CorruptDataError

Pieces = Callable[[int], Iterable[Tensor]]
"""What a rank reads of this one, in the order in which it reads it."""


@dataclass(frozen=True)
class ChecksumRequest:
    """Request for checksums in a reduction. `after` is called when this rank's checksums are taken and no
    peer has read its data yet: tests and chaos put faults in there."""

    after: Callable[[], None] | None = None

    def taken(self) -> None:
        if self.after is not None:
            self.after()


def digest(pieces: Iterable[Tensor]) -> int:
    """Return the checksum of tensors, as if they were one."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        update(state, piece)
    return state.intdigest()


def update(state: Any, piece: Tensor) -> None:
    if piece.numel():
        state.update(memory_of(piece.view(torch.uint8)))


def corrupt(transport: Transport, rank: int, what: str) -> CorruptDataError:
    """Describe data of `rank` that this rank read in `what` and that does not match its checksum."""
    labels = labels_of(transport)
    owner, reader = labels[rank], labels[transport.rank]
    if owner == reader:
        text = f"what rank {owner} holds itself in {what} is no longer what it took the checksum of"
    else:
        text = (
            f"what rank {reader} read of rank {owner} in {what} does not match the checksum that rank "
            f"{owner} took of it"
        )
    return CorruptDataError(text, rank=owner)


class WindowChecksums:
    """One rank's checksums in one reduction through a window."""

    def __init__(
        self, request: ChecksumRequest, transport: Transport, window: WindowMemory, what: str
    ) -> None:
        self._request = request
        self._transport, self._window = transport, window
        self._what = what
        self.slot = 0
        self._published: tuple[Pieces, list[int]] | None = None
        self._read = [xxhash.xxh3_64() for _ in range(transport.world_size)]

    def publish(self, pieces: Pieces, slot: int) -> None:
        """Take the checksums and put them into this rank's small slot of the call. The second time, because
        the ranks have agreed on another way of reducing, only if the data is still what it was."""
        if not self.intact():
            raise corrupt(self._transport, self._transport.rank, self._what)
        again = self._published is not None
        values = self._digests(pieces)
        self._published, self.slot = (pieces, values), slot
        self._shown(self._transport.rank)[:] = values
        if not again:
            self._request.taken()

    def intact(self) -> bool:
        """Return whether this rank's data still matches the checksums that it published, if any."""
        return self._published is None or self._digests(self._published[0]) == self._published[1]

    def read(self, rank: int, piece: Tensor) -> None:
        """Add a piece to what this rank has read of a rank's data, in the order of reading."""
        update(self._read[rank], piece)

    def check(self) -> None:
        """Raise if something that was read does not match the checksum that its rank published."""
        for rank, read in enumerate(self._read):
            if int(self._shown(rank)[self._transport.rank]) != read.intdigest():
                raise corrupt(self._transport, rank, self._what)

    def _digests(self, pieces: Pieces) -> list[int]:
        return [digest(pieces(rank)) for rank in range(len(self._read))]

    def _shown(self, rank: int) -> Any:
        return self._window.small[self.slot, rank, : 8 * len(self._read)].numpy().view(np.uint64)
