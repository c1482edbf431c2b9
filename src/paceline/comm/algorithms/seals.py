"""Checksums of one reduction: every rank seals what its peers will read, every reader checks what it read.

A rank takes one checksum for each peer, of the part of its partials that this peer reads, and shows them
before it lets anybody at the data. A reader hashes what it folds, block by block, while it is in the cache.
It says that it is done only if everything matched: in every way of reducing all ranks wait for that word of
all others before they return, so either all have the result or all fail, with the name of the rank whose
data it was. Knows checksums and the window, not how reductions are done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from paceline.comm.calls import Call
from paceline.comm.transport.base import Transport, Window, memory_of
from paceline.core.errors import CorruptDataError

Messages = Sequence[tuple[int, Tensor]]
Pieces = Callable[[int], Iterable[Tensor]]
"""What a peer reads of this rank, in the order in which it reads it."""


@dataclass(frozen=True)
class Sealing:
    """Whether and how a reduction is checked. `after` is called when this rank's checksums are taken and
    nobody has seen its data yet: faults are put in there."""

    after: Callable[[], None] | None = None

    def taken(self) -> None:
        if self.after is not None:
            self.after()


def digest(pieces: Iterable[Tensor]) -> int:
    """The checksum of tensors, as if they were one."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        update(state, piece)
    return state.intdigest()


def update(state: Any, piece: Tensor) -> None:
    if piece.numel():
        state.update(memory_of(piece.view(torch.uint8)))


def corrupt(rank: int, reader: int, what: str) -> CorruptDataError:
    return CorruptDataError(
        f"what rank {reader} read of rank {rank} in {what} does not match the checksum that rank {rank} "
        f"took of it",
        rank=rank,
    )


class Seals:
    """One rank's checksums in one reduction through a window."""

    def __init__(self, sealing: Sealing, window: Window, rank: int, size: int, what: str) -> None:
        self._sealing = sealing
        self._window = window
        self._rank, self._size = rank, size
        self._what = what
        self._peers = [peer for peer in range(size) if peer != rank]
        self.slot = 0
        self._sealed: tuple[Pieces, list[int]] | None = None
        self._read = {peer: xxhash.xxh3_64() for peer in self._peers}

    def seal(self, pieces: Pieces, slot: int) -> None:
        """Takes the checksums and shows them in this rank's small slot of the call. The second time, because
        the ranks have agreed on another way, only if the data is still what it was."""
        if self._sealed is not None:
            before, values = self._sealed
            if self._digests(before) != values:
                raise corrupt(self._rank, self._rank, self._what)
        again = self._sealed is not None
        values = self._digests(pieces)
        self._sealed, self.slot = (pieces, values), slot
        self._shown(self._rank)[:] = values
        if not again:
            self._sealing.taken()

    def read(self, peer: int, piece: Tensor) -> None:
        """This is what was read next of a peer's data."""
        update(self._read[peer], piece)

    def check(self) -> None:
        """Raises if something that was read is not what its rank had sealed."""
        for peer in self._peers:
            if int(self._shown(peer)[self._rank]) != self._read[peer].intdigest():
                raise corrupt(peer, self._rank, self._what)

    def _digests(self, pieces: Pieces) -> list[int]:
        return [0 if peer == self._rank else digest(pieces(peer)) for peer in range(self._size)]

    def _shown(self, rank: int) -> Any:
        return self._window.small[self.slot, rank, : 8 * self._size].numpy().view(np.uint64)


def sealed_exchange(
    transport: Transport,
    sealing: Sealing,
    call: Call,
    sends: Messages,
    receives: Messages,
    deadline: float,
) -> None:
    """An exchange in which the checksums of all messages for a peer travel ahead of them."""
    outgoing: dict[int, list[int]] = {}
    for peer, tensor in sends:
        outgoing.setdefault(peer, []).append(digest([tensor]))
    sealing.taken()
    told = {
        peer: torch.empty(count, dtype=torch.int64, device="cpu")
        for peer, count in Counter(peer for peer, _ in receives).items()
    }
    seals = [
        (peer, torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64)))
        for peer, values in outgoing.items()
    ]
    transport.exchange(call, [*seals, *sends], [*told.items(), *receives], deadline)
    due = {peer: iter(values.numpy().view(np.uint64).tolist()) for peer, values in told.items()}
    for peer, tensor in receives:
        if digest([tensor]) != next(due[peer]):
            raise corrupt(peer, transport.rank, call.text)
