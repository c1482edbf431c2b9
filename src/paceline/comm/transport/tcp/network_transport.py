"""Messages between hosts: headers and small ones over the mesh, large ones over bulk connections.

Every message has a header that the receiver checks against its own call before it takes the message, so
ranks that disagree find out instead of mixing data up. Messages up to 64 KB travel with their header; of
larger ones the header goes ahead, the bytes go over the pair's bulk connection, and the receiver says when
it takes them and when it has them. All of it is authenticated. `native_all_reduce` hands a tensor to the
all-reduce of the backend itself (Gloo, NCCL, MPI), which is not.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.comm.call_status import CollectiveCall
from paceline.comm.ops import ReduceOp
from paceline.comm.transport.base import (
    Messages,
    Pipeline,
    ReceivedMessage,
    Topology,
    Traffic,
    Window,
    message_barrier,
    peers_of,
    sending_status,
    taking_status,
)
from paceline.comm.transport.tcp.bulk_transfer import BulkConnections
from paceline.comm.transport.tcp.exchange import (
    Exchange,
    ExchangePipeline,
    MessageNumbers,
    PendingOperation,
    PolledOperation,
    SentCounter,
    drive,
    raise_lost,
)
from paceline.comm.transport.tcp.framed_socket import BODY_TAG_BYTES, HEAD_BYTES, FrameKind
from paceline.comm.transport.tcp.mesh import Mesh
from paceline.comm.transport.tcp.native_backend import BackendGroup
from paceline.comm.transport.wait_watch import LOOK_SECONDS


class NetworkTransport:
    """One rank of a group over mesh and bulk connections. `native` is the backend's own collective group."""

    def __init__(self, mesh: Mesh, bulk: BulkConnections, topology: Topology, native: BackendGroup) -> None:
        self.backend = native.backend
        self.name = native.backend
        self.rank = mesh.rank
        self.world_size = mesh.world_size
        self.labels = mesh.labels
        self.topology = topology
        self.traffic = Traffic()
        self.tally = SentCounter(mesh.rank, topology, self.traffic)
        self.window: Window | None = None
        self.mesh = mesh
        self.posted_status, self.interrupt = mesh.posted, mesh.interrupt
        self._bulk = bulk
        self._native = native
        self._numbers = MessageNumbers(mesh.world_size)
        self._closing = threading.Lock()
        self._closed = False

    def exchange(self, call: CollectiveCall, sends: Messages, receives: Messages, deadline: float) -> None:
        self.traffic.rounds += 1
        self.wait_for(self.begin(call, sends, receives), deadline)

    def begin(self, call: CollectiveCall, sends: Messages, receives: Messages) -> Exchange:
        """Start an exchange that continues whenever `advance` is called."""
        return Exchange(self.mesh, self._bulk, self._numbers, self.tally, call, sends, receives)

    def pipeline(self, ranks: Sequence[int]) -> Pipeline | None:
        return ExchangePipeline(ranks, self.begin, self.wait_for)

    def post(self, dest: int, tag: int, body: Sequence[memoryview], deadline: float) -> None:
        mesh, status = self.mesh, sending_status(self.labels, dest, tag)
        parts = [part.cast("B") for part in body]
        mesh.check_open()
        mark = mesh.send(dest, FrameKind.MESSAGE, parts, sequence=tag)
        size = sum(len(part) for part in parts)
        self.tally.sent(dest, size, HEAD_BYTES + (BODY_TAG_BYTES if size else 0))

        def advance() -> tuple[bool, bool]:
            done = mesh.sent(dest, mark)
            return done, done

        try:
            self.wait_for(PolledOperation(advance, lambda: status), deadline)
        except BaseException:
            mesh.settle(dest)  # the rest goes out when it can: half a message would spoil all that follow
            raise

    def take(self, source: int, tag: int | None, deadline: float, *, own_deadline: bool) -> ReceivedMessage:
        status = taking_status(self, self.labels, source, tag, own_deadline)
        received: list[ReceivedMessage] = []

        def advance() -> tuple[bool, bool]:
            if (message := self.mesh.next_message(source, tag)) is not None:
                received.append(message)
            return bool(received), False

        self.wait_for(PolledOperation(advance, lambda: status), deadline)
        self.traffic.received += len(received[0].body)
        return received[0]

    def native_all_reduce(self, call: CollectiveCall, op: ReduceOp, tensor: Tensor, deadline: float) -> None:
        """All-reduce in place by the backend's own algorithm, once the ranks have agreed on it."""
        self._native.check(op, tensor)
        message_barrier(self, call, deadline)
        status = replace(call.status(peers_of(self)), ends_alone=True)
        transfer = self._native.start(op, tensor, deadline, self.mesh.notify)

        def advance() -> tuple[bool, bool]:
            if transfer.done and transfer.error is not None:
                raise_lost(self.mesh, transfer, status)
            return transfer.done, transfer.done

        try:
            pending = PolledOperation(advance, lambda: status, lambda: set(status.waits_for))
            self.wait_for(pending, deadline)
        except BaseException:
            self._native.abort()
            raise
        nbytes = tensor.numel() * tensor.element_size()
        self.traffic.messages += 1
        self.traffic.sent += nbytes
        self.traffic.received += nbytes
        self.traffic.between_hosts += nbytes if self.topology.hosts > 1 else 0

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def close(self, error: BaseException | None = None) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self.mesh.close(error)
            self._bulk.close()
            self._native.close(in_haste=self.mesh.interrupted)

    def wait_for(self, pending: PendingOperation, deadline: float) -> None:
        """Let an operation advance until it is done, looking at the other ranks when it does not move."""

        mesh = self.mesh
        drive(pending, mesh, lambda: mesh.version, lambda seen: mesh.wait(seen, LOOK_SECONDS), deadline)
