"""Transport interface: the operations of every transport, and optional capabilities.

Collectives and algorithms are written against `Transport`. Everything optional is a small Protocol that a
transport declares by implementing it: `Interruptible`, `ReportsWaits`, `Labelled`,
`NativeAllReduce`, `HasLocalGroup`, `Pipelined`. `Window` is for transports whose ranks reach each other's
memory: `WindowMemory` is the memory, `WindowTicks` how ranks wait for each other in it.
A transport knows nothing of reductions, algorithms or what the bytes mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.comm.call_status import CollectiveCall, Status, call_site, in_background
from paceline.comm.ops import ReduceOp
from paceline.core.errors import GroupInterruptedError

ANY_SOURCE = -1
HEADER_BYTES = 32
"""What travels with each message of a collective besides the message: length, sequence, signature, spare."""

Messages = Sequence[tuple[int, Tensor]]
"""(peer, flat contiguous CPU tensor) for each message of a round."""


@dataclass(slots=True)
class Traffic:
    """Counters of one transport, headers apart; `between_hosts` is the part of `sent` that left the host."""

    messages: int = 0
    sent: int = 0
    received: int = 0
    headers: int = 0
    between_hosts: int = 0
    rounds: int = 0

    def snapshot(self) -> tuple[int, ...]:
        return (self.messages, self.sent, self.received, self.headers, self.between_hosts, self.rounds)


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A point-to-point message as it arrived."""

    source: int
    tag: int
    body: memoryview


@dataclass(frozen=True)
class Topology:
    """Placement of ranks on hosts: `host_of[rank]` is the host's number, in order of first appearance."""

    host_of: tuple[int, ...]
    names: tuple[str, ...] = field(default=())

    @property
    def hosts(self) -> int:
        return len(set(self.host_of))

    def ranks_on(self, host: int) -> list[int]:
        return [rank for rank, number in enumerate(self.host_of) if number == host]


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a flat uint8 CPU tensor, not copied."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat contiguous tensor as flat uint8, same memory."""
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def tensor_of(memory: memoryview | bytearray) -> Tensor:
    """Return bytes as a flat uint8 CPU tensor, not copied; torch refuses to look at an empty buffer."""
    if not len(memory):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8)


def peers_of(transport: Transport) -> list[int]:
    """Return all ranks but this one, in order."""
    return [peer for peer in range(transport.world_size) if peer != transport.rank]


def message_barrier(transport: Transport, call: CollectiveCall, deadline: float) -> None:
    """Return when all ranks are in this call: log2 N rounds of empty messages, twice as far in each round."""
    rank, size = transport.rank, transport.world_size
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    for distance in (1 << level for level in range((size - 1).bit_length())):
        right, left = (rank + distance) % size, (rank - distance) % size
        transport.exchange(call, [(right, nothing)], [(left, nothing)], deadline)


class WindowMemory(Protocol):
    """Memory of all ranks that this rank can reach: scratch areas, tensors of `Transport.empty`, and, where
    `can_reach` says so, any memory of a peer's process. Nothing here waits for a peer to be ready: the ticks
    of `WindowTicks` say when which memory may be touched."""

    small: Tensor  # uint8, [2, world, bytes of a small slot]: one slot of each rank for each call parity
    staging: Tensor  # uint8, [3, world, bytes]: slots of the staged pipeline
    results: Tensor  # uint8, [3, bytes]: its results
    reachable: bool | None  # what `can_reach` found; None: not tried yet. The same on all ranks
    prepared: dict[object, object]  # what algorithms keep with the window; cleared when the transport closes

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return where a tensor lives in the window; None if it does not."""

    def at(self, offset: int, nbytes: int) -> Tensor:
        """Return the window's memory of any rank, as flat uint8."""

    def can_reach(self, call: CollectiveCall, deadline: float) -> bool:
        """Return whether all ranks can `read` and `write` each other, and gain by it: the same answer on all
        ranks. The first call is a collective; later ones return what it found."""

    def read(self, rank: int, address: int, into: Tensor, call: CollectiveCall, deadline: float) -> None:
        """Copy ordinary memory at `address` in the peer's address space into a contiguous tensor."""

    def write(self, rank: int, address: int, data: Tensor, call: CollectiveCall, deadline: float) -> None:
        """Copy a contiguous tensor into ordinary memory of a peer, which the peer has published for it."""


class WindowTicks(Protocol):
    """Counters by which ranks wait for each other. In one call all ranks signal the same number of ticks, so
    "all ranks have reached my tick" is a barrier; what a rank wrote before its tick is visible after it."""

    next_slot: int  # 0 or 1 in turn: the parity of the next call, in `small` and in the published entries

    def signal(self, call: CollectiveCall | None = None, source: int = 0, target: int = 0) -> int:
        """Publish that this rank is one tick further and return the tick. With `call`, the first tick of a
        call: publish its signature and two numbers (`locations`) with it, and turn `next_slot` over."""

    def wait(self, tick: int, call: CollectiveCall, deadline: float) -> None:
        """Return when every rank has reached `tick`; raise if a rank never will."""

    def barrier(self, call: CollectiveCall, deadline: float) -> None:
        """Signal the first tick of a call, wait for it, and check that all ranks signalled the same call."""

    def locations(self, call: CollectiveCall, deadline: float) -> tuple[list[int], list[int]]:
        """Return the two numbers that each rank published with this call; raise if the signatures differ."""

    def is_unreachable(self, tick: int) -> bool:
        """Return whether some rank has not reached `tick` and never will: then no rank gets past it."""


class Window(WindowMemory, WindowTicks, Protocol):
    """Window memory and ticks in one object, as algorithms use them."""


class Transport(Protocol):
    """Point-to-point movement between the ranks of one group, numbered from 0 (the view index)."""

    name: str
    rank: int
    world_size: int
    topology: Topology
    traffic: Traffic
    window: Window | None

    def exchange(self, call: CollectiveCall, sends: Messages, receives: Messages, deadline: float) -> None:
        """Send and receive all messages at once; messages of one pair arrive in order."""

    def post(self, dest: int, tag: int, body: Sequence[memoryview], deadline: float) -> None:
        """Send a point-to-point message; return when `body` may be reused."""

    def take(self, source: int, tag: int | None, deadline: float, *, own_deadline: bool) -> ReceivedMessage:
        """Receive the oldest message that fits; raise CommTimeoutError at the deadline and lose nothing."""

    def empty(self, nbytes: int) -> Tensor:
        """Return memory for a tensor that peers can reach directly where the transport has such memory."""

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group; with an error, peers that wait for this rank get it."""


@runtime_checkable
class Interruptible(Protocol):
    """A transport whose waits another thread can end."""

    def interrupt(self, error: GroupInterruptedError) -> None:
        """Announce to the peers that this rank leaves, and make its waits raise `error`, without waiting for
        any peer. May be called by any thread; `close` is still due."""


@runtime_checkable
class ReportsWaits(Protocol):
    """A transport that can say what this rank waits for: heartbeats carry it, and a hang is blamed on the
    rank for which the others wait instead of on all of them."""

    def posted_status(self) -> Status | None:
        """Return what this rank posted when it began to wait; None while it does not wait. Called by another
        thread, several times a second: must not ask the peers."""


@runtime_checkable
class Labelled(Protocol):
    """A transport whose ranks are called by other numbers than their position in the group: the slots of a
    supervised job, of which a view may leave some out."""

    labels: Sequence[int]


def labels_of(transport: Transport) -> Sequence[int]:
    """Return the number by which each rank is called in sentences and errors."""
    return transport.labels if isinstance(transport, Labelled) else range(transport.world_size)


def sending_status(labels: Sequence[int], dest: int, tag: int) -> Status:
    """Describe a rank that waits in `post`."""
    text = f"send(dest_rank={labels[dest]}, tag={tag})"
    return Status(text, call_site(), (dest,), ends_alone=in_background())


def taking_status(
    transport: Transport, labels: Sequence[int], source: int, tag: int | None, own_deadline: bool
) -> Status:
    """Describe a rank that waits in `take`."""
    peers = tuple(peers_of(transport)) if source == ANY_SOURCE else (source,)
    wanted = "any" if source == ANY_SOURCE else labels[source]
    text = f"receive(source_rank={wanted}" + (f", tag={tag})" if tag is not None else ")")
    return Status(text, call_site(), peers, any_of=len(peers) > 1, ends_alone=own_deadline)


def take_first(mailbox: deque[ReceivedMessage], source: int, tag: int | None) -> ReceivedMessage | None:
    """Remove the oldest message that fits, and return it; None if there is none."""
    for index, message in enumerate(mailbox):
        if source in (ANY_SOURCE, message.source) and tag in (None, message.tag):
            del mailbox[index]
            return message
    return None


@runtime_checkable
class NativeAllReduce(Protocol):
    """A transport over torch.distributed, for algorithm="native". `backend` is torch's name of it."""

    backend: str

    def native_all_reduce(self, call: CollectiveCall, op: ReduceOp, tensor: Tensor, deadline: float) -> None:
        """All-reduce in place by the backend's own algorithm, over all ranks."""


@runtime_checkable
class HasLocalGroup(Protocol):
    """A transport with a faster one among the ranks of this host, in ascending order."""

    local: Transport


class Pipeline(Protocol):
    """Several exchanges under way at once. `finish` ends the oldest one that was started."""

    def start(self, call: CollectiveCall, sends: Messages, receives: Messages) -> None: ...
    def finish(self, deadline: float) -> None: ...


@runtime_checkable
class Pipelined(Protocol):
    """A transport on which exchanges can overlap."""

    def pipeline(self, ranks: Sequence[int]) -> Pipeline | None:
        """Overlap exchanges among these ranks, numbered by their position in `ranks`; None where it cannot,
        alike on all of them. The caller counts rounds."""
