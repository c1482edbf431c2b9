"""Checksums of one reduction: every rank seals what will be read of it, every reader checks what it read.

A rank takes one checksum for each rank, of the part of its partials that this rank reads, and shows them
before it lets anybody at the data. Its own part is one of them: what is folded is what was sealed, also where
it never left its memory. A reader hashes what it folds, block by block, while it is in the cache.
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
"""What a rank reads of this one, in the order in which it reads it."""


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
    if rank == reader:
        return CorruptDataError(
            f"what rank {rank} holds of its own in {what} is no longer what it took the checksum of",
            rank=rank,
        )
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
        self.slot = 0
        self._sealed: tuple[Pieces, list[int]] | None = None
        self._read = [xxhash.xxh3_64() for _ in range(size)]

    def seal(self, pieces: Pieces, slot: int) -> None:
        """Takes the checksums and shows them in this rank's small slot of the call. The second time, because
        the ranks have agreed on another way, only if the data is still what it was."""
        if not self.intact():
            raise corrupt(self._rank, self._rank, self._what)
        again = self._sealed is not None
        values = self._digests(pieces)
        self._sealed, self.slot = (pieces, values), slot
        self._shown(self._rank)[:] = values
        if not again:
            self._sealing.taken()

    def intact(self) -> bool:
        """Whether this rank's data is still what it sealed, if it has sealed any."""
        return self._sealed is None or self._digests(self._sealed[0]) == self._sealed[1]

    def read(self, rank: int, piece: Tensor) -> None:
        """This is what was read next of a rank's data."""
        update(self._read[rank], piece)

    def check(self) -> None:
        """Raises if something that was read is not what its rank had sealed."""
        for rank in range(self._size):
            if int(self._shown(rank)[self._rank]) != self._read[rank].intdigest():
                raise corrupt(rank, self._rank, self._what)

    def _digests(self, pieces: Pieces) -> list[int]:
        return [digest(pieces(rank)) for rank in range(self._size)]

    def _shown(self, rank: int) -> Any:
        return self._window.small[self.slot, rank, : 8 * self._size].numpy().view(np.uint64)


class MessageSeals:
    """One rank's checksums in one exchange of messages: those for a peer travel ahead of its messages. `own`
    is what this rank does not send but uses itself."""

    def __init__(self, sealing: Sealing, sends: Messages, own: Sequence[Tensor] = ()) -> None:
        self._sends, self._own = sends, own
        self._values = self._digests()
        sealing.taken()

    def intact(self) -> bool:
        """Whether this rank's data is still what it sealed."""
        return self._digests() == self._values

    def exchange(self, transport: Transport, call: Call, receives: Messages, deadline: float) -> None:
        outgoing: dict[int, list[int]] = {}
        for (peer, _), value in zip(self._sends, self._values, strict=False):
            outgoing.setdefault(peer, []).append(value)
        told = {
            peer: torch.empty(count, dtype=torch.int64, device="cpu")
            for peer, count in Counter(peer for peer, _ in receives).items()
        }
        seals = [
            (peer, torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64)))
            for peer, values in outgoing.items()
        ]
        transport.exchange(call, [*seals, *self._sends], [*told.items(), *receives], deadline)
        due = {peer: iter(values.numpy().view(np.uint64).tolist()) for peer, values in told.items()}
        for peer, tensor in receives:
            if digest([tensor]) != next(due[peer]):
                raise corrupt(peer, transport.rank, call.text)
        if digest(self._own) != self._values[-1]:
            raise corrupt(transport.rank, transport.rank, call.text)

    def _digests(self) -> list[int]:
        return [*(digest([tensor]) for _, tensor in self._sends), digest(self._own)]
