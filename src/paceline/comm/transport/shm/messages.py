"""Messages over the rings of one rank: many at once, in pieces, without a thread.

`Outgoing` and `Incoming` are transfers in progress; `pump` moves whatever can move. A rank rings its peer's
bell after it wrote or made room, so that a peer that sleeps looks again. Knows headers and lengths, not
calls or tags' meaning.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.comm.transport.shm import sync
from paceline.comm.transport.shm.board import BELL, Board
from paceline.comm.transport.shm.layout import Layout
from paceline.comm.transport.shm.ring import Ring

HEADER = struct.Struct("<QqQq")  # length, sequence (or tag), signature, spare


@dataclass(slots=True)
class Outgoing:
    peer: int
    header: memoryview
    bodies: list[Tensor | memoryview]  # flat bytes

    @property
    def done(self) -> bool:
        return not self.header and not self.bodies


@dataclass(slots=True)
class Incoming:
    peer: int
    body: Tensor  # flat uint8
    header: bytearray = field(default_factory=lambda: bytearray(HEADER.size))
    have_header: int = 0
    have: int = 0

    @property
    def done(self) -> bool:
        return self.have_header == HEADER.size and self.have == self.body.numel()


class Lane:
    """One independent set of rings: this rank's to and from every peer, and its bell."""

    def __init__(self, memory: memoryview, layout: Layout, board: Board, lane: int) -> None:
        rank = board.rank
        self._board = board
        self._bell = BELL + 16 * lane
        self._memory, self._layout, self._lane = memory, layout, lane
        self._out: dict[int, Ring] = {}
        self._in: dict[int, Ring] = {}
        self._rings = 0
        self._rank = rank
        self._my_bell = board.word(rank, self._bell)

    def bell(self) -> int:
        return self._board.words[self._my_bell]

    def sleep(self, bell: int) -> None:
        """Returns when the bell rings that was `bell`, or when it is time to look around."""
        self._board.sleep(self._rank, self._bell, bell)

    def out(self, peer: int) -> Ring:
        ring = self._out.get(peer)
        if ring is None:
            ring = self._out[peer] = Ring(self._memory, self._layout, self._lane, self._rank, peer)
        return ring

    def into(self, peer: int) -> Ring:
        ring = self._in.get(peer)
        if ring is None:
            ring = self._in[peer] = Ring(self._memory, self._layout, self._lane, peer, self._rank)
        return ring

    def ring_bell(self, peer: int) -> None:
        # The value names the writer and grows, so it differs from whatever the sleeper saw, even if two
        # ranks write at once.
        self._rings = (self._rings + 1) & 0xFFFFF
        sync.fence()
        self._board.words[self._board.word(peer, self._bell)] = self._rings << 12 | self._rank
        sync.wake(self._board.address(peer, self._bell))

    def push(self, transfer: Outgoing) -> bool:
        """Writes what fits; True if anything moved."""
        ring = self.out(transfer.peer)
        moved = False
        if transfer.header:
            count = ring.write(transfer.header)
            transfer.header = transfer.header[count:]
            moved = count > 0
        while not transfer.header and transfer.bodies:
            body = transfer.bodies[0]
            count = ring.write(body) if isinstance(body, memoryview) else ring.write_tensor(body)
            if count == len(body):
                transfer.bodies.pop(0)
                moved = True
                continue
            if count == 0:
                break
            transfer.bodies[0] = body[count:]
            moved = True
        if moved:
            self.ring_bell(transfer.peer)
        return moved

    def pull_header(self, transfer: Incoming) -> bool:
        ring = self.into(transfer.peer)
        count = ring.read(memoryview(transfer.header)[transfer.have_header :])
        transfer.have_header += count
        return count > 0

    def pull_body(self, transfer: Incoming) -> bool:
        """Reads what is there; True if anything moved."""
        ring = self.into(transfer.peer)
        moved = False
        while transfer.have < transfer.body.numel():
            count = ring.read_tensor(transfer.body[transfer.have :])
            if count == 0:
                break
            transfer.have += count
            moved = True
        if moved:
            self.ring_bell(transfer.peer)
        return moved


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat contiguous tensor as flat uint8, same memory."""
    return tensor.view(torch.uint8) if tensor.dtype != torch.uint8 else tensor
