"""Shared memory inside a host, connections between hosts, as one transport.

Messages to ranks of the same host go through the host's segment, all others over proven connections; one
exchange moves both at once. A rank that waits sleeps on its bell in the segment, and the mesh rings it too.
Whoever waits, in shared memory or not, looks around in the whole group. `local` is the host's own
transport, for algorithms that work inside the host first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from paceline.comm.calls import Call, Status
from paceline.comm.ops import ReduceOp
from paceline.comm.transport.base import ANY_SOURCE, Message, Window
from paceline.comm.transport.pipeline import Pipeline
from paceline.comm.transport.progress import drive
from paceline.comm.transport.shm.messages import Lane
from paceline.comm.transport.shm.transport import ShmTransport
from paceline.comm.transport.torchdist import TorchTransport, taking_status
from paceline.comm.transport.watch import Outlook
from paceline.core.errors import GroupInterruptedError

Step = Callable[[], tuple[bool, bool]]


class HybridTransport:
    """`local` holds the ranks of this host in ascending order of their numbers in `wide`."""

    def __init__(self, local: ShmTransport, wide: TorchTransport) -> None:
        self.name = "hybrid"
        self.backend = wide.backend
        self.rank = wide.rank
        self.world_size = wide.world_size
        self.topology = wide.topology
        self.traffic = wide.traffic
        self.window: Window | None = None
        self.local = local
        self._wide = wide
        self.mesh = self._mesh = wide.mesh
        self._ranks = wide.topology.ranks_on(wide.topology.host_of[wide.rank])
        self._inside = {rank: place for place, rank in enumerate(self._ranks)}
        # One count for the whole rank, whichever way its bytes go.
        local.traffic = wide.traffic
        local.widen(self._widened)
        self._mesh.on_change = self._ring

    def exchange(
        self,
        call: Call,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        deadline: float,
    ) -> None:
        inside = self._inside
        self.traffic.rounds += 1
        advance, waits_for = self.local.begin(
            call,
            [(inside[peer], tensor) for peer, tensor in sends if peer in inside],
            [(inside[peer], tensor) for peer, tensor in receives if peer in inside],
        )
        abroad = self._wide.begin(
            call,
            [(peer, tensor) for peer, tensor in sends if peer not in inside],
            [(peer, tensor) for peer, tensor in receives if peer not in inside],
        )

        def both() -> tuple[bool, bool]:
            here, here_moved = advance()
            there, there_moved = abroad.advance()
            return here and there, here_moved or there_moved

        def status() -> Status:
            near = {self._ranks[place] for place in waits_for()}
            far = abroad.status()
            if not near:
                return far
            waits = near if far.ends_alone else near | set(far.waits_for)
            return replace(far, waits_for=tuple(sorted(waits)), ends_alone=False)

        self._drive(_Work(both, status, abroad.underway_with), self.local.lanes[1], deadline)

    def pipeline(self, ranks: Sequence[int]) -> Pipeline | None:
        """Overlapping exchanges among ranks that are all on different hosts; None if some share one."""
        hosts = {self.topology.host_of[rank] for rank in ranks}
        return self._wide.pipeline(ranks) if len(hosts) == len(ranks) else None

    def post(self, dest: int, tag: int, body: Sequence[memoryview], deadline: float) -> None:
        if dest not in self._inside:
            self._wide.post(dest, tag, body, deadline)
        else:
            self.local.post(self._inside[dest], tag, body, deadline)

    def take(self, source: int, tag: int | None, deadline: float, *, own_deadline: bool) -> Message:
        found: list[Message] = []
        near = source == ANY_SOURCE or source in self._inside
        place = ANY_SOURCE if source == ANY_SOURCE else self._inside.get(source, 0)
        wanted = taking_status(self.rank, self.world_size, source, tag, own_deadline)

        def advance() -> tuple[bool, bool]:
            moved = False
            if near:
                message, moved = self.local.next_message(place, tag)
                if message is not None:
                    found.append(replace(message, source=self._ranks[message.source]))
            if not found and (message := self._mesh.next_message(source, tag)) is not None:
                found.append(message)
            return bool(found), moved

        self._drive(_Work(advance, lambda: wanted, set), self.local.lanes[0], deadline)
        self.traffic.received += len(found[0].body)
        return found[0]

    def native_all_reduce(self, call: Call, op: ReduceOp, tensor: Tensor, deadline: float) -> None:
        """All-reduces in place by the backend's own algorithm, over all ranks."""
        self._wide.native_all_reduce(call, op, tensor, deadline)

    def empty(self, nbytes: int) -> Tensor:
        return self.local.empty(nbytes)

    def interrupt(self, error: GroupInterruptedError) -> None:
        self._wide.interrupt(error)
        self.local.interrupt(error)

    def close(self, error: BaseException | None = None) -> None:
        self._wide.close(error)
        self.local.close(error)

    def _drive(self, work: _Work, lane: Lane, deadline: float) -> None:
        drive(work, self._mesh, lane.bell, lane.sleep, deadline)

    def _ring(self) -> None:
        for lane in self.local.lanes:
            lane.ring_bell(self.local.rank)

    def _widened(self, status: Status) -> tuple[Outlook, Status]:
        """A wait inside the host as one of the whole group."""
        waits_for = tuple(self._ranks[place] for place in status.waits_for)
        text = status.text
        if status.sequence < 0:
            text = re.sub(r"(?<=dest_rank=)\d+", str(waits_for[0]), text)
        return self._mesh, replace(status, text=text, waits_for=waits_for)


class _Work:
    def __init__(self, advance: Step, status: Callable[[], Status], underway: Callable[[], set[int]]) -> None:
        self.advance = advance
        self.status = status
        self.underway_with = underway
