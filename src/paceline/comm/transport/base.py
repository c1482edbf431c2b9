"""What a transport must offer: bytes between ranks, and a word on who is alive.

Algorithms and collectives are written against `Transport` only. `Window` is an extra of transports whose
ranks can read each other's memory (shared memory, threads). A transport knows nothing of reductions,
algorithms or what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from paceline.comm.calls import Call
from paceline.core.errors import GroupInterruptedError

ANY_SOURCE = -1
HEADER_BYTES = 32
"""What travels with each message of a collective besides the message: length, sequence, signature, spare."""


@dataclass(slots=True)
class Traffic:
    """Counters of one transport, payload bytes and headers apart; `between_hosts` is the part of `sent`
    that left the host."""

    messages: int = 0
    sent: int = 0
    received: int = 0
    headers: int = 0
    between_hosts: int = 0
    rounds: int = 0

    def snapshot(self) -> tuple[int, ...]:
        return (self.messages, self.sent, self.received, self.headers, self.between_hosts, self.rounds)


@dataclass(frozen=True, slots=True)
class Message:
    """A point-to-point message as it arrived."""

    source: int
    tag: int
    body: memoryview


@dataclass(frozen=True)
class Topology:
    """Which rank is on which host: `host_of[rank]` is the host's number, in order of first appearance."""

    host_of: tuple[int, ...]
    names: tuple[str, ...] = field(default=())

    @property
    def hosts(self) -> int:
        return len(set(self.host_of))

    def ranks_on(self, host: int) -> list[int]:
        return [rank for rank, number in enumerate(self.host_of) if number == host]


def memory_of(tensor: Tensor) -> memoryview:
    """A flat uint8 CPU tensor's bytes, not copied."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


class Window(Protocol):
    """Memory of all ranks that this rank can reach, and a tick of every rank to wait for.

    `small`, `staging` and `results` are scratch areas; their layout is the transport's, their reuse is the
    caller's (see
    algorithms/window.py), and so is what it keeps in `prepared`.
    """

    small: Tensor  # uint8 [2, world, small_bytes]
    staging: Tensor  # uint8 [3, world, stage_bytes]
    results: Tensor  # uint8 [3, stage_bytes]
    reachable: bool | None  # what `can_reach` found; None: not tried yet
    prepared: dict[object, object]

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where a tensor lives in the window; None: it does not."""
        ...

    def at(self, offset: int, nbytes: int) -> Tensor:
        """Any rank's memory in the window, as flat uint8."""
        ...

    def can_reach(self, call: Call, deadline: float) -> bool:
        """Whether all ranks can `read` and `write` each other, and gain by it. The first time, all ranks
        try it out together."""
        ...

    def read(self, rank: int, address: int, into: Tensor, call: Call, deadline: float) -> None:
        """Copies a peer's ordinary memory, at `address` in its own address space, into a contiguous
        tensor."""
        ...

    def write(self, rank: int, address: int, data: Tensor, call: Call, deadline: float) -> None:
        """Copies a contiguous tensor into a peer's ordinary memory, which the peer has offered for it."""
        ...

    def keep_offered(self, *tensors: Tensor) -> None:
        """The call failed while peers could reach these: their memory must not be given to anybody else."""
        ...

    def next_slot(self) -> int:
        """Which of the two small slots the coming call may fill."""
        ...

    def tick(self, call: Call | None = None, source: int = 0, target: int = 0) -> int:
        """Publishes that this rank is one tick further; the first tick of a call shows its signature,
        where its input is and where its result goes."""
        ...

    def wait(self, tick: int, call: Call, deadline: float) -> None:
        """Returns when every rank has reached `tick`."""
        ...

    def never_met(self, tick: int) -> bool:
        """Whether some rank has not reached `tick` and never will: then nobody gets past it."""
        ...

    def meet(self, call: Call, deadline: float) -> None:
        """The first tick of a call, waited for, with everybody's signature checked."""
        ...

    def locations(self, call: Call, deadline: float) -> tuple[list[int], list[int]]:
        """The two locations each rank published with its first tick of this call; raises if their
        signatures differ."""
        ...


@runtime_checkable
class Interruptible(Protocol):
    """A transport whose waits another thread can end."""

    def interrupt(self, error: GroupInterruptedError) -> None:
        """Tells the peers that this rank leaves and makes its waits raise `error`, at once and without
        waiting for anybody. Any thread may call it; `close` is still due."""
        ...


class Transport(Protocol):
    """Point-to-point movement between the ranks of one group. Rank and size are those of the group."""

    name: str
    rank: int
    world_size: int
    topology: Topology
    traffic: Traffic
    window: Window | None

    def exchange(
        self,
        call: Call,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        deadline: float,
    ) -> None:
        """Sends and receives flat contiguous CPU tensors, all at once; messages of one pair arrive in
        order."""
        ...

    def post(self, dest: int, tag: int, body: Sequence[memoryview], deadline: float) -> None:
        """Sends a point-to-point message; returns when `body` may be reused."""
        ...

    def take(self, source: int, tag: int | None, deadline: float, *, own_deadline: bool) -> Message:
        """Receives the oldest message that fits; raises CommTimeoutError at the deadline and loses
        nothing."""
        ...

    def empty(self, nbytes: int) -> Tensor:
        """Memory for a tensor that peers can reach directly where the transport has such memory."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """Leaves the group; with an error, peers that wait for this rank are told."""
        ...
