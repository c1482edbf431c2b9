"""One exchange over control and bulk connections: every message of a round, in both directions at once.

A message is checked by its header before it is taken. What is still missing is always known exactly:
headers that have not come, large messages whose receiver is not ready. Bytes that are on their way depend on
no rank. `drive` lets an exchange, or another operation that moves in steps, advance until it is done; when
nothing moves for a moment it looks at the other ranks, and raises if the wait cannot end well.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.call_status import CollectiveCall, PeerState, RankState, Status
from paceline.comm.transport.base import Messages, Topology, Traffic, as_bytes
from paceline.comm.transport.tcp.bulk_transfer import BulkConnections, BulkTransfer, bulk_head, overhead
from paceline.comm.transport.tcp.framed_socket import (
    BODY_TAG_BYTES,
    HEAD_BYTES,
    INLINE_BYTES,
    Frame,
    FrameKind,
)
from paceline.comm.transport.tcp.mesh import Mesh
from paceline.comm.transport.wait_watch import LOOK_SECONDS, StatusChannel, Watch
from paceline.core.errors import InternalError, PeerLostError


class PendingOperation(Protocol):
    """Operation in steps: `advance` gives (all done, something moved), `status` what is still missing."""

    def advance(self) -> tuple[bool, bool]: ...
    def status(self) -> Status: ...
    def underway_with(self) -> set[int]: ...


@dataclass(frozen=True)
class PolledOperation:
    """A pending operation that is made of functions."""

    advance: Callable[[], tuple[bool, bool]]
    status: Callable[[], Status]
    underway_with: Callable[[], set[int]] = set


def drive(
    pending: PendingOperation,
    mesh: Mesh,
    version: Callable[[], int],
    pause: Callable[[int], None],
    deadline: float,
) -> None:
    """Let an operation advance until done; `pause(seen)` sleeps while `version()` is `seen`, or a moment."""
    channel = _During(mesh, pending)
    watch: Watch | None = None
    moved_at = time.monotonic()
    departures, calm = mesh.departures, True
    with ExitStack() as stack:
        while True:
            seen = version()
            mesh.check_open()
            done, moved = pending.advance()
            if done:
                return
            now = time.monotonic()
            if moved:
                moved_at, calm = now, True
                if watch is not None:
                    watch.reassure()
                continue
            if now - moved_at >= LOOK_SECONDS or not calm or departures != mesh.departures:
                departures = mesh.departures
                if watch is None:
                    watch = stack.enter_context(Watch(channel, pending.status(), deadline))
                else:
                    watch.update(pending.status())
                calm = watch.look()
                moved_at = now
            if calm:
                pause(seen)


class _During:
    """The mesh for a watch: a rank that left after doing its part is not missing while its bytes arrive."""

    def __init__(self, mesh: Mesh, pending: PendingOperation) -> None:
        self.rank, self.labels = mesh.rank, mesh.labels
        self.enclosing: StatusChannel | None = None
        self.post, self.forget = mesh.post, mesh.forget
        self._mesh = mesh
        self._pending = pending

    def peers(self) -> dict[int, PeerState]:
        states = self._mesh.peers()
        for peer in self._pending.underway_with():
            if peer in states and states[peer].state is RankState.LEFT:
                states[peer] = replace(states[peer], state=RankState.RUNNING)
        return states


def raise_lost(mesh: Mesh, transfer: BulkTransfer, status: Status, patience: float = 0.5) -> None:
    """Raise for a broken transfer: name the rank that is gone as soon as the mesh knows, else the peer."""
    with Watch(mesh, replace(status, ends_alone=True), time.monotonic() + 2 * patience) as watch:
        end = time.monotonic() + patience
        while time.monotonic() < end:
            seen = mesh.version
            if watch.look():
                mesh.wait(seen, LOOK_SECONDS)
    if transfer.peer < 0:
        raise InternalError(
            f"the backend's own all-reduce failed in {status}: {transfer.error}"
        ) from transfer.error
    rank = mesh.labels[transfer.peer]
    raise PeerLostError(
        f"the connection to rank {rank} broke in {status}: {transfer.error}", rank=rank
    ) from transfer.error


class SentCounter:
    """Counter of what leaves this rank, and of what leaves the host."""

    def __init__(self, rank: int, topology: Topology, traffic: Traffic) -> None:
        self.traffic = traffic
        self._leaves_host = [host != topology.host_of[rank] for host in topology.host_of]

    def sent(self, peer: int, nbytes: int, besides: int) -> None:
        """Count one message of `nbytes` to `peer`, with headers and tags of `besides` bytes."""
        traffic = self.traffic
        traffic.messages += 1
        traffic.sent += nbytes
        traffic.headers += besides
        if self._leaves_host[peer]:
            traffic.between_hosts += nbytes


class MessageNumbers:
    """Numbers of the large messages of each pair, in both directions; both ends give a message one number."""

    def __init__(self, world_size: int) -> None:
        self._sent, self._expected = [0] * world_size, [0] * world_size

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
        bulk: BulkConnections,
        numbers: MessageNumbers,
        tally: SentCounter,
        call: CollectiveCall,
        sends: Messages,
        receives: Messages,
    ) -> None:
        self._mesh = mesh
        self._bulk = bulk
        self._tally = tally
        self._call = call
        self._marks: dict[int, int] = {}
        self._unaccepted: set[tuple[int, int]] = set()
        self._undelivered: dict[tuple[int, int], BulkTransfer] = {}
        self._transfers: list[tuple[BulkTransfer, int]] = []
        self._arriving: dict[int, deque[tuple[Tensor, int]]] = {}
        # Sending begins in this thread: room for what comes is made first, so that both directions move.
        for peer, tensor in receives:
            self._expect(peer, as_bytes(tensor), numbers)
        for peer, tensor in sends:
            self._send(peer, as_bytes(tensor), numbers)

    def _expect(self, peer: int, body: Tensor, numbers: MessageNumbers) -> None:
        number = 0
        if body.numel() > INLINE_BYTES:
            number = numbers.next_expected(peer)
            self._transfers.append((self._bulk.receive(body, peer, self._head(body, number)), number))
        self._arriving.setdefault(peer, deque()).append((body, number))

    def _send(self, peer: int, body: Tensor, numbers: MessageNumbers) -> None:
        size, sequence, signature = body.numel(), self._call.sequence, self._call.signature
        if size <= INLINE_BYTES:
            besides = HEAD_BYTES + (BODY_TAG_BYTES if size else 0)
            pieces = [memoryview(body.numpy().data)]
            mark = self._mesh.send(peer, FrameKind.DATA, pieces, sequence=sequence, signature=signature)
        else:
            besides = HEAD_BYTES + overhead(size)
            number = numbers.next_sent(peer)
            mark = self._mesh.send(
                peer, FrameKind.BULK, length=size, sequence=sequence, signature=signature, number=number
            )
            self._unaccepted.add((peer, number))
            self._undelivered[peer, number] = self._bulk.send(body, peer, self._head(body, number))
        self._marks[peer] = mark
        self._tally.sent(peer, size, besides)

    def _head(self, body: Tensor, number: int) -> bytes:
        return bulk_head(body.numel(), self._call.sequence, self._call.signature, number)

    def advance(self, not_from: Set[int] = frozenset()) -> tuple[bool, bool]:
        """Return (all done, something moved); frames of ranks in `not_from` are for an earlier exchange."""
        moved = self._arrived(not_from) | self._finished() | self._delivered()
        for peer, mark in list(self._marks.items()):
            if self._mesh.sent(peer, mark):
                del self._marks[peer]
        left = self._marks or self._arriving or self._unaccepted or self._undelivered or self._transfers
        return not left, moved

    def expects(self) -> Set[int]:
        """Return the peers of which messages have not come."""
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
        announced = (frame.length, frame.sequence, frame.signature, frame.number)
        if announced != (size, self._call.sequence, self._call.signature, number):
            with Watch(self._mesh, self._call.status((peer,)), time.monotonic() + 5) as watch:
                watch.disagree("ranks made different calls")
        if frame.kind is FrameKind.BULK:
            self._tell(FrameKind.ACCEPT, peer, number)
        elif size:
            body.copy_(torch.frombuffer(frame.body, dtype=torch.uint8))
        self._tally.traffic.received += size

    def _tell(self, kind: FrameKind, peer: int, number: int) -> None:
        self._mesh.send(peer, kind, number=number)
        self._tally.traffic.headers += HEAD_BYTES

    def _finished(self) -> bool:
        """Confirm large messages that have come."""
        # `done` is asked once: another thread sets it, and DONE must be sent exactly once.
        finished = [item for item in self._transfers if item[0].done]
        for transfer, number in finished:
            if transfer.error is not None:
                raise_lost(self._mesh, transfer, self.status())
            self._tell(FrameKind.DONE, transfer.peer, number)
        self._transfers = [item for item in self._transfers if item not in finished]
        return bool(finished)

    def _delivered(self) -> bool:
        """Record which large messages their receivers have accepted, and which they have. One is delivered
        when its receiver confirms that all its tags were right: until then its memory is in use."""
        accepted = {item for item in self._unaccepted if self._mesh.confirmed(FrameKind.ACCEPT, *item)}
        self._unaccepted -= accepted
        delivered = [item for item in self._undelivered if self._mesh.confirmed(FrameKind.DONE, *item)]
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
            return self._call.status(missing)
        # All that is still missing is on its way: no rank has to do anything for it.
        return replace(self._call.status(self.underway_with()), ends_alone=True)


@dataclass(eq=False)
class ExchangePipeline:
    """Several exchanges under way at once, finished in the order in which they were started.

    For algorithms whose rounds depend on each other: cut into parts, one part can be folded while the others
    travel, and no link idles between rounds. Messages of a pair still arrive in order, so an exchange takes
    nothing from a peer before the earlier ones have all they expect from it. `ranks` are those that take
    part: peers are numbered by their position among them.
    """

    ranks: Sequence[int]
    begin: Callable[[CollectiveCall, Messages, Messages], Exchange]
    wait_for: Callable[[PendingOperation, float], None]
    _under_way: deque[Exchange] = field(default_factory=deque, init=False)

    def start(self, call: CollectiveCall, sends: Messages, receives: Messages) -> None:
        ranks = self.ranks
        outgoing = [(ranks[peer], tensor) for peer, tensor in sends]
        incoming = [(ranks[peer], tensor) for peer, tensor in receives]
        self._under_way.append(self.begin(call, outgoing, incoming))

    def finish(self, deadline: float) -> None:
        self.wait_for(self, deadline)
        self._under_way.popleft()

    def advance(self) -> tuple[bool, bool]:
        """Move all exchanges; done when the oldest one is."""
        expected: set[int] = set()
        first_done, moved = False, False
        for position, exchange in enumerate(self._under_way):
            done, some = exchange.advance(expected)
            first_done |= done and position == 0
            moved |= some
            expected |= exchange.expects()
        return first_done, moved

    def status(self) -> Status:
        return self._under_way[0].status()

    def underway_with(self) -> set[int]:
        return self._under_way[0].underway_with()
