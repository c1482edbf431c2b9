"""One exchange over mesh and Gloo: every message of a round, in both directions at once.

A message is checked by its header before it is taken. What is still missing is always known exactly: headers that have not come, large
messages whose receiver is not ready. Bytes that are on their way need nobody any more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.comm.calls import Call, Status
from paceline.comm.transport.base import HEADER_BYTES, Topology, Traffic
from paceline.comm.transport.bulk import Bulk, Transfer
from paceline.comm.transport.link import INLINE_BYTES, Frame, Kind
from paceline.comm.transport.mesh import Mesh
from paceline.comm.transport.progress import raise_lost
from paceline.comm.transport.watch import Watch


class Tally:
    """Counts what leaves this rank, and which of it leaves the host."""

    def __init__(self, rank: int, topology: Topology, traffic: Traffic) -> None:
        self.traffic = traffic
        self._leaves_host = [host != topology.host_of[rank] for host in topology.host_of]

    def sent(self, peer: int, nbytes: int) -> None:
        """One message of `nbytes` on its way to `peer`."""
        traffic = self.traffic
        traffic.messages += 1
        traffic.sent += nbytes
        traffic.headers += HEADER_BYTES
        if self._leaves_host[peer]:
            traffic.between_hosts += nbytes


class Exchange:
    """All messages of one `exchange`, in both directions at once."""

    def __init__(
        self,
        mesh: Mesh,
        bulk: Bulk,
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
        self._held: list[tuple[Tensor, int, int]] = []
        self._transfers: list[Transfer] = []
        self._arriving: dict[int, deque[Tensor]] = {}
        for peer, tensor in receives:
            self._arriving.setdefault(peer, deque()).append(_bytes_of(tensor))
        for peer, tensor in sends:
            self._send(peer, _bytes_of(tensor))

    def _send(self, peer: int, body: Tensor) -> None:
        size = body.numel()
        fields = {"sequence": self._call.sequence, "signature": self._call.signature}
        if size <= INLINE_BYTES:
            self._marks[peer] = self._mesh.send(peer, Kind.DATA, [memoryview(body.numpy())], **fields)
        else:
            number = self._bulk.next_number(peer)
            self._marks[peer] = self._mesh.send(peer, Kind.BULK, length=size, number=number, **fields)
            self._unaccepted.add((peer, number))
            self._held.append((body, peer, number))
        self._tally.sent(peer, size)

    def advance(self) -> tuple[bool, bool]:
        moved = self._arrived() | self._started() | self._accepted() | self._finished()
        for peer, mark in list(self._marks.items()):
            if self._mesh.sent(peer, mark):
                del self._marks[peer]
        left = self._marks or self._arriving or self._held or self._unaccepted or self._transfers
        return not left, moved

    def _arrived(self) -> bool:
        moved = False
        for peer, bodies in list(self._arriving.items()):
            while bodies and (frame := self._mesh.next_data(peer)) is not None:
                moved = True
                self._take(peer, frame, bodies.popleft())
            if not bodies:
                del self._arriving[peer]
        return moved

    def _take(self, peer: int, frame: Frame, body: Tensor) -> None:
        size = body.numel()
        if (frame.length, frame.sequence, frame.signature) != (
            size,
            self._call.sequence,
            self._call.signature,
        ):
            with Watch(self._mesh, self._status((peer,)), time.monotonic() + 5) as watch:
                watch.disagree("ranks made different calls")
        if frame.kind is Kind.BULK:
            self._transfers.append(self._start(self._bulk.receive, body, peer, frame.number))
            self._mesh.send(peer, Kind.ACCEPT, number=frame.number)
            self._tally.traffic.headers += HEADER_BYTES
        elif size:
            body.copy_(torch.frombuffer(frame.body, dtype=torch.uint8))
        self._tally.traffic.received += size

    def _start(
        self, start: Callable[[Tensor, int, int], Transfer], body: Tensor, peer: int, number: int
    ) -> Transfer:
        try:
            return start(body, peer, number)
        except RuntimeError as error:
            return Transfer(peer, lambda: None, done=True, error=error)

    def _accepted(self) -> bool:
        ready = {item for item in self._unaccepted if self._mesh.accepted(*item)}
        self._unaccepted -= ready
        return bool(ready)

    def _started(self) -> bool:
        """Starts the large sends that need not be held back.

        Gloo has one queue for each peer. What it has to tell about a receive from that peer must not stand behind
        the bytes of a send, or the two directions would take turns: receives come first.
        """
        free = [item for item in self._held if item[1] not in self._arriving]
        self._held = [item for item in self._held if item[1] in self._arriving]
        self._transfers += [self._start(self._bulk.send, *item) for item in free]
        return bool(free)

    def _finished(self) -> bool:
        before = len(self._transfers)
        for transfer in self._transfers:
            if transfer.done and transfer.error is not None:
                raise_lost(self._mesh, transfer, self.status())
        self._transfers = [transfer for transfer in self._transfers if not transfer.done]
        return len(self._transfers) < before

    def underway_with(self) -> set[int]:
        return {transfer.peer for transfer in self._transfers} - {peer for peer, _ in self._unaccepted}

    def status(self) -> Status:
        missing = {*self._arriving, *self._marks, *(peer for peer, _ in self._unaccepted)}
        if missing:
            return self._status(tuple(sorted(missing)))
        # All that is still missing is on its way: nobody has to do anything for it.
        return replace(self._status(tuple(sorted(self.underway_with()))), ends_alone=True)

    def _status(self, waits_for: tuple[int, ...]) -> Status:
        return Status(
            self._call.text, self._call.where(), waits_for, self._call.sequence, self._call.signature
        )


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)
