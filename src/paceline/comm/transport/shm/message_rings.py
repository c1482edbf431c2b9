"""Messages over the rings of one rank: many at once, in pieces, without a thread.

A `RingBuffer` is one direction of one pair of ranks. `Outgoing` and `Incoming` are transfers in progress; a
`Lane` moves what can move. A rank rings its peer's bell after it wrote or made room, so that a peer that
sleeps looks again.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.comm.transport.shm import futex
from paceline.comm.transport.shm.status_board import BELL, StatusBoard
from paceline.core.shm_segment_layout import RING_HEADER, SegmentLayout

HEADER = struct.Struct("<QqQq")  # length, sequence (or tag), signature, spare
_HEAD, _TAIL = 0, 8  # 64-bit words, a cache line apart


class RingBuffer:
    """A circular buffer with a single writer and a single reader.

    Positions only grow; the writer owns `head`, the reader owns `tail`. Never blocks: what does not fit is
    written later by the caller.
    """

    @torch.inference_mode(False)  # made once and used in any mode
    def __init__(self, memory: memoryview, layout: SegmentLayout, lane: int, source: int, dest: int) -> None:
        start = layout.ring(lane, source, dest)
        self._words = memory[start : start + RING_HEADER].cast("Q")
        self._capacity = layout.ring_bytes
        self._bytes = memory[start + RING_HEADER : start + RING_HEADER + self._capacity]
        self._tensor: Tensor = torch.frombuffer(self._bytes, dtype=torch.uint8)

    def write(self, data: Tensor | memoryview) -> int:
        """Write as much of `data` as fits before the end of the buffer; return how much that was."""
        head = self._words[_HEAD]
        at = head % self._capacity
        count = min(data.nbytes, self._capacity - (head - self._words[_TAIL]), self._capacity - at)
        if count:
            if isinstance(data, memoryview):
                self._bytes[at : at + count] = data[:count]
            else:
                self._tensor[at : at + count].copy_(data[:count])  # leaves the interpreter free meanwhile
            futex.fence()  # the bytes come before the position that lets the reader take them
            self._words[_HEAD] = head + count
        return count

    def read(self, into: Tensor | memoryview) -> int:
        """Read as much as there is before the end of the buffer and `into` holds; return how much."""
        tail = self._words[_TAIL]
        at = tail % self._capacity
        count = min(into.nbytes, self._words[_HEAD] - tail, self._capacity - at)
        if count:
            futex.fence()  # the position was read before the bytes that it announces
            if isinstance(into, memoryview):
                into[:count] = self._bytes[at : at + count]
            else:
                into[:count].copy_(self._tensor[at : at + count])
            futex.fence()  # the bytes are out before the position that lets the writer overwrite them
            self._words[_TAIL] = tail + count
        return count


@dataclass(slots=True)
class Outgoing:
    peer: int
    pieces: deque[Tensor | memoryview]  # the header, then flat bytes; none is empty
    begun: bool = False


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

    def __init__(self, memory: memoryview, layout: SegmentLayout, board: StatusBoard, lane: int) -> None:
        self._board = board
        self._bell = BELL + 16 * lane
        self._memory, self._layout, self._lane = memory, layout, lane
        self._rings: dict[tuple[int, int], RingBuffer] = {}
        self._rung = 0
        self._rank = board.rank
        self._my_bell = board.word(board.rank, self._bell)

    def bell(self) -> int:
        return self._board.words[self._my_bell]

    def sleep(self, bell: int) -> None:
        """Return when the bell rings that was `bell`, or when it is time to look around."""
        self._board.sleep(self._rank, self._bell, bell)

    def _ring(self, source: int, dest: int) -> RingBuffer:
        ring = self._rings.get((source, dest))
        if ring is None:
            ring = RingBuffer(self._memory, self._layout, self._lane, source, dest)
            self._rings[source, dest] = ring
        return ring

    def ring_bell(self, peer: int) -> None:
        # The value names the writer and grows, so it differs from whatever the sleeper saw, even if two
        # ranks write at once.
        self._rung = (self._rung + 1) & 0xFFFFF
        futex.fence()
        self._board.words[self._board.word(peer, self._bell)] = self._rung << 12 | self._rank
        futex.wake(self._board.address(peer, self._bell))

    def push_all(self, queue: deque[Outgoing]) -> bool:
        """Write messages in order as far as they fit, and drop those that are complete; True if any moved."""
        moved = False
        while queue:
            moved |= self._push(queue[0])
            if queue[0].pieces:
                break
            queue.popleft()
        return moved

    def _push(self, transfer: Outgoing) -> bool:
        ring, pieces = self._ring(self._rank, transfer.peer), transfer.pieces
        moved = False
        while pieces and (count := ring.write(pieces[0])):
            moved = transfer.begun = True
            if count == pieces[0].nbytes:
                pieces.popleft()
            else:
                pieces[0] = pieces[0][count:]
        if moved:
            self.ring_bell(transfer.peer)
        return moved

    def pull(self, transfer: Incoming, opened: Callable[[Incoming], None]) -> bool:
        """Read what is there; True if anything moved. `opened` is called when the header is complete, to
        check it and to make room for the body."""
        ring = self._ring(transfer.peer, self._rank)
        moved = False
        while transfer.have_header < HEADER.size:
            count = ring.read(memoryview(transfer.header)[transfer.have_header :])
            if not count:
                return moved
            moved = True
            transfer.have_header += count
            if transfer.have_header == HEADER.size:
                opened(transfer)
        size = transfer.body.nbytes
        while transfer.have < size and (count := ring.read(transfer.body[transfer.have :])):
            transfer.have += count
            moved = True
        if moved:
            self.ring_bell(transfer.peer)
        return moved
