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

import torch
from torch import Tensor

from paceline.comm.calls import Call, Status, call_site
from paceline.comm.ops import ReduceOp
from paceline.comm.transport.base import ANY_SOURCE, Message, Topology, Traffic, Window
from paceline.comm.transport.bulk import Bulk, Transfer
from paceline.comm.transport.exchange import Exchange, Numbers, Tally
from paceline.comm.transport.link import BODY_TAG_BYTES, HEAD_BYTES, Kind
from paceline.comm.transport.mesh import Mesh
from paceline.comm.transport.native import NativeGroup
from paceline.comm.transport.pipeline import Exchanges, Pipeline
from paceline.comm.transport.progress import Work, drive, raise_lost
from paceline.comm.transport.watch import LOOK_SECONDS
from paceline.core.errors import GroupInterruptedError


class TorchTransport:
    """One rank of a group over mesh and bulk connections. `native` is the backend's own collective group."""

    def __init__(self, mesh: Mesh, bulk: Bulk, topology: Topology, native: NativeGroup) -> None:
        self.backend = native.backend
        self.name = native.backend
        self.rank = mesh.rank
        self.world_size = mesh.world_size
        self.topology = topology
        self.traffic = Traffic()
        self.tally = Tally(mesh.rank, topology, self.traffic)
        self.window: Window | None = None
        self.mesh = mesh
        self._bulk = bulk
        self._native = native
        self._numbers = Numbers(mesh.world_size)
        self._closing = threading.Lock()
        self._closed = False

    def exchange(
        self,
        call: Call,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        deadline: float,
    ) -> None:
        self.traffic.rounds += 1
        self.wait_for(self.begin(call, sends, receives), deadline)

    def begin(
        self, call: Call, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Exchange:
        """Starts an exchange that goes on whenever `advance` is called."""
        return Exchange(self.mesh, self._bulk, self._numbers, self.tally, call, sends, receives)

    def pipeline(self, ranks: Sequence[int]) -> Pipeline | None:
        """Overlapping exchanges among these ranks, who all get the same answer. The caller counts rounds."""
        return Exchanges(self.begin, self.wait_for)

    def post(self, dest: int, tag: int, body: Sequence[memoryview], deadline: float) -> None:
        sending = Sending(self, dest, tag, body)
        try:
            self.wait_for(sending, deadline)
        except BaseException:
            sending.give_up()
            raise

    def take(self, source: int, tag: int | None, deadline: float, *, own_deadline: bool) -> Message:
        taking = Taking(self, source, tag, own_deadline)
        self.wait_for(taking, deadline)
        return taking.message()

    def native_all_reduce(self, call: Call, op: ReduceOp, tensor: Tensor, deadline: float) -> None:
        """All-reduces in place by the backend's own algorithm, once the ranks have agreed on it."""
        self._native.check(op, tensor)
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        distance = 1
        while distance < self.world_size:
            right, left = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            self.exchange(call, [(right, nothing)], [(left, nothing)], deadline)
            distance *= 2
        reducing = Reducing(self, call, self._native.start(op, tensor, deadline, self.mesh.notify))
        try:
            self.wait_for(reducing, deadline)
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

    def interrupt(self, error: GroupInterruptedError) -> None:
        self.mesh.interrupt(error)

    def close(self, error: BaseException | None = None) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self.mesh.close(error)
            self._bulk.close()
            self._native.close(in_haste=self.mesh.interrupted)

    def wait_for(self, work: Work, deadline: float) -> None:
        """Lets `work` advance until it is done, looking around when it does not move."""

        def pause(seen: int) -> None:
            self.mesh.wait(seen, LOOK_SECONDS)

        drive(work, self.mesh, lambda: self.mesh.version, pause, deadline)


class Sending:
    """One point-to-point message."""

    def __init__(self, transport: TorchTransport, dest: int, tag: int, body: Sequence[memoryview]) -> None:
        parts = [part.cast("B") for part in body]
        self._mesh = transport.mesh
        self._dest = dest
        self._status = Status(f"send(dest_rank={dest}, tag={tag})", call_site(), (dest,))
        transport.mesh.check_open()
        self._mark = transport.mesh.send(dest, Kind.MESSAGE, parts, sequence=tag)
        size = sum(len(part) for part in parts)
        transport.tally.sent(dest, size, HEAD_BYTES + (BODY_TAG_BYTES if size else 0))

    def advance(self) -> tuple[bool, bool]:
        done = self._mesh.sent(self._dest, self._mark)
        return done, done

    def status(self) -> Status:
        return self._status

    def underway_with(self) -> set[int]:
        return set()

    def give_up(self) -> None:
        """The rest goes out when it can: half a message would spoil all that follow."""
        self._mesh.settle(self._dest)


class Taking:
    """The receipt of one point-to-point message."""

    def __init__(self, transport: TorchTransport, source: int, tag: int | None, own_deadline: bool) -> None:
        self._transport = transport
        self._source, self._tag = source, tag
        self._status = taking_status(transport.rank, transport.world_size, source, tag, own_deadline)
        self._message: Message | None = None

    def advance(self) -> tuple[bool, bool]:
        self._message = self._transport.mesh.next_message(self._source, self._tag)
        return self._message is not None, False

    def message(self) -> Message:
        assert self._message is not None
        self._transport.traffic.received += len(self._message.body)
        return self._message

    def status(self) -> Status:
        return self._status

    def underway_with(self) -> set[int]:
        return set()


class Reducing:
    """The backend's own all-reduce under way in its thread."""

    def __init__(self, transport: TorchTransport, call: Call, transfer: Transfer) -> None:
        self._mesh = transport.mesh
        self._transfer = transfer
        others = tuple(peer for peer in range(transport.world_size) if peer != transport.rank)
        self._others = others
        self._status = Status(call.text, call.where(), others, call.sequence, call.signature, ends_alone=True)

    def advance(self) -> tuple[bool, bool]:
        if self._transfer.done and self._transfer.error is not None:
            raise_lost(self._mesh, self._transfer, self._status)
        return self._transfer.done, self._transfer.done

    def status(self) -> Status:
        return self._status

    def underway_with(self) -> set[int]:
        return set(self._others)


def taking_status(rank: int, world_size: int, source: int, tag: int | None, own_deadline: bool) -> Status:
    others = tuple(peer for peer in range(world_size) if peer != rank)
    peers = others if source == ANY_SOURCE else (source,)
    wanted = "any" if source == ANY_SOURCE else source
    text = f"receive(source_rank={wanted}" + (f", tag={tag})" if tag is not None else ")")
    return Status(text, call_site(), peers, any_of=len(peers) > 1, ends_alone=own_deadline)
