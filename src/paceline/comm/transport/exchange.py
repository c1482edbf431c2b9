"""One exchange over control and bulk connections: every message of a round, in both directions at once.

A message is checked by its header before it is taken. What is still missing is always known exactly:
headers that have not come, large messages whose receiver is not ready. Bytes that are on their way need
nobody any more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor

from paceline.comm.calls import Call, Status
from paceline.comm.transport.base import Topology, Traffic
from paceline.comm.transport.bulk import Bulk, Ticket, Transfer, overhead
from paceline.comm.transport.link import BODY_TAG_BYTES, HEAD_BYTES, INLINE_BYTES, Frame, Kind
from paceline.comm.transport.mesh import Mesh
from paceline.comm.transport.progress import raise_lost
from paceline.comm.transport.watch import Watch


class Tally:
    """Counts what leaves this rank, and which of it leaves the host."""

    def __init__(self, rank: int, topology: Topology, traffic: Traffic) -> None:
        self.traffic = traffic
        self._leaves_host = [host != topology.host_of[rank] for host in topology.host_of]

    def sent(self, peer: int, nbytes: int, besides: int) -> None:
        """One message of `nbytes` on its way to `peer`, with headers and tags of `besides` bytes."""
        traffic = self.traffic
        traffic.messages += 1
        traffic.sent += nbytes
        traffic.headers += besides
        if self._leaves_host[peer]:
            traffic.between_hosts += nbytes


class Numbers:
    """Counts the large messages of each pair, in both directions; both ends give a message one number."""

    def __init__(self, world_size: int) -> None:
        self._sent = [0] * world_size
        self._expected = [0] * world_size

    def next_sent(self, peer: int) -> int:
        self._sent[peer] = (self._sent[peer] + 1) & 0xFFFFFFFF
        return self._sent[peer]

    def next_expected(self, peer: int) -> int:
        self._expected[peer] = (self._expected[peer] + 1) & 0xFFFFFFFF
        return self._expected[peer]


class Exchange:
    """All messages of one `exchange`."""

    def __init__(
        self,
        mesh: Mesh,
        bulk: Bulk,
        numbers: Numbers,
        tally: Tally,
        call: Call,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
    ) -> None:
        self._mesh = mesh
        self._bulk = bulk
        self._tally = tally
        self._call = call
        self._marks: dict[int, int] = {}
        self._unaccepted: set[tuple[int, int]] = set()
        self._undelivered: dict[tuple[int, int], Transfer] = {}
        self._transfers: list[tuple[Transfer, int]] = []
        self._arriving: dict[int, deque[tuple[Tensor, int]]] = {}
        # Sending begins in this thread: room for what comes is made first, so that both directions move.
        for peer, tensor in receives:
            self._expect(peer, _bytes_of(tensor), numbers)
        for peer, tensor in sends:
            self._send(peer, _bytes_of(tensor), numbers)

    def _expect(self, peer: int, body: Tensor, numbers: Numbers) -> None:
        number = 0
        if body.numel() > INLINE_BYTES:
            number = numbers.next_expected(peer)
            self._transfers.append((self._bulk.receive(body, peer, self._ticket(body, number)), number))
        self._arriving.setdefault(peer, deque()).append((body, number))

    def _send(self, peer: int, body: Tensor, numbers: Numbers) -> None:
        size, sequence, signature = body.numel(), self._call.sequence, self._call.signature
        if size <= INLINE_BYTES:
            besides = HEAD_BYTES + (BODY_TAG_BYTES if size else 0)
            pieces = [memoryview(body.numpy().data)]
            self._marks[peer] = self._mesh.send(
                peer, Kind.DATA, pieces, sequence=sequence, signature=signature
            )
        else:
            besides = HEAD_BYTES + overhead(size)
            number = numbers.next_sent(peer)
            self._marks[peer] = self._mesh.send(
                peer, Kind.BULK, length=size, sequence=sequence, signature=signature, number=number
            )
            self._unaccepted.add((peer, number))
            self._undelivered[peer, number] = self._bulk.send(body, peer, self._ticket(body, number))
        self._tally.sent(peer, size, besides)

    def _ticket(self, body: Tensor, number: int) -> Ticket:
        return Ticket(body.numel(), self._call.sequence, self._call.signature, number)

    def advance(self, not_from: Set[int] = frozenset()) -> tuple[bool, bool]:
        """(all done, something moved); what `not_from` sends is for somebody else."""
        moved = self._arrived(not_from) | self._finished() | self._delivered()
        for peer, mark in list(self._marks.items()):
            if self._mesh.sent(peer, mark):
                del self._marks[peer]
        left = self._marks or self._arriving or self._unaccepted or self._undelivered or self._transfers
        return not left, moved

    def expects(self) -> Set[int]:
        """The peers of which messages have not come."""
        return self._arriving.keys()

    def _arrived(self, not_from: Set[int]) -> bool:
        moved = False
        for peer, expected in list(self._arriving.items()):
            if peer in not_from:
                continue
            while expected and (frame := self._mesh.next_data(peer)) is not None:
                moved = True
                self._take(peer, frame, *expected.popleft())
            if not expected:
                del self._arriving[peer]
        return moved

    def _take(self, peer: int, frame: Frame, body: Tensor, number: int) -> None:
        size = body.numel()
        told = (frame.length, frame.sequence, frame.signature, frame.number)
        if told != (size, self._call.sequence, self._call.signature, number):
            with Watch(self._mesh, self._status((peer,)), time.monotonic() + 5) as watch:
                watch.disagree("ranks made different calls")
        if frame.kind is Kind.BULK:
            self._tell(Kind.ACCEPT, peer, number)
        elif size:
            body.copy_(torch.frombuffer(frame.body, dtype=torch.uint8))
        self._tally.traffic.received += size

    def _tell(self, kind: Kind, peer: int, number: int) -> None:
        self._mesh.send(peer, kind, number=number)
        self._tally.traffic.headers += HEAD_BYTES

    def _finished(self) -> bool:
        """Large messages that have come."""
        # Asked once: another thread completes them, and one that is done must be told exactly once.
        finished: list[tuple[Transfer, int]] = []
        under_way: list[tuple[Transfer, int]] = []
        for item in self._transfers:
            (finished if item[0].done else under_way).append(item)
        for transfer, number in finished:
            if transfer.error is not None:
                raise_lost(self._mesh, transfer, self.status())
            self._tell(Kind.DONE, transfer.peer, number)
        self._transfers = under_way
        return bool(finished)

    def _delivered(self) -> bool:
        """Large messages that their receivers have taken, or have taken up. One is delivered when its
        receiver says that it has all of it and that its tags were right: until then its memory is in use."""
        accepted = {item for item in self._unaccepted if self._mesh.told(Kind.ACCEPT, *item)}
        self._unaccepted -= accepted
        delivered = [item for item in self._undelivered if self._mesh.told(Kind.DONE, *item)]
        for item in delivered:
            del self._undelivered[item]
        for transfer in self._undelivered.values():
            if transfer.error is not None:
                raise_lost(self._mesh, transfer, self.status())
        return bool(accepted or delivered)

    def underway_with(self) -> set[int]:
        moving = {transfer.peer for transfer, _ in self._transfers} | {peer for peer, _ in self._undelivered}
        return moving - {peer for peer, _ in self._unaccepted} - self._arriving.keys()

    def status(self) -> Status:
        missing = {*self._arriving, *self._marks, *(peer for peer, _ in self._unaccepted)}
        if missing:
            return self._status(tuple(sorted(missing)))
        # All that is still missing is on its way: nobody has to do anything for it.
        return replace(self._status(tuple(sorted(self.underway_with()))), ends_alone=True)

    def _status(self, waits_for: tuple[int, ...]) -> Status:
        return self._call.status(waits_for)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)
