"""Shared memory inside a host, connections between hosts, as one transport.

Messages to ranks of the same host go through the host's segment, all others over proven connections; one
exchange moves both at once. A rank that waits sleeps on its bell in the segment, and the mesh rings it too.
Every wait, in shared memory or not, is judged by the statuses of the whole group. `local` is the transport
inside the host, for algorithms that work there first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.comm.call_status import CollectiveCall, Status
from paceline.comm.transport.base import (
    ANY_SOURCE,
    Messages,
    Pipeline,
    ReceivedMessage,
    Window,
    taking_status,
)
from paceline.comm.transport.shm.transport import ShmTransport
from paceline.comm.transport.tcp.exchange import PolledOperation, drive
from paceline.comm.transport.tcp.network_transport import NetworkTransport
from paceline.core.errors import GroupInterruptedError


class HybridTransport:
    """`local` holds the ranks of this host in ascending order of their numbers in `wide`."""

    def __init__(self, local: ShmTransport, wide: NetworkTransport) -> None:
        self.name = "hybrid"
        self.backend = wide.backend
        self.rank = wide.rank
        self.world_size = wide.world_size
        self.labels = wide.labels
        self.topology = wide.topology
        self.traffic = wide.traffic
        self.window: Window | None = None
        self.local = local
        self.empty, self.posted_status = local.empty, wide.posted_status
        self.native_all_reduce = wide.native_all_reduce
        self._wide = wide
        self.mesh = wide.mesh
        self._ranks = wide.topology.ranks_on(wide.topology.host_of[wide.rank])
        self._inside = {rank: index for index, rank in enumerate(self._ranks)}
        # One count for the whole rank, whichever way its bytes go.
        local.traffic = wide.traffic
        local.enclose(wide.mesh)
        self.mesh.on_change = self._ring

    def exchange(self, call: CollectiveCall, sends: Messages, receives: Messages, deadline: float) -> None:
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
            near = {self._ranks[index] for index in waits_for()}
            far = abroad.status()
            if not near:
                return far
            waits = near if far.ends_alone else near | set(far.waits_for)
            return replace(far, waits_for=tuple(sorted(waits)), ends_alone=False)

        lane = self.local.lanes[1]
        pending = PolledOperation(both, status, abroad.underway_with)
        drive(pending, self.mesh, lane.bell, lane.sleep, deadline)

    def pipeline(self, ranks: Sequence[int]) -> Pipeline | None:
        # Those among ranks that share a host would have to go through its segment.
        hosts = {self.topology.host_of[rank] for rank in ranks}
        return self._wide.pipeline(ranks) if len(hosts) == len(ranks) else None

    def post(self, dest: int, tag: int, body: Sequence[memoryview], deadline: float) -> None:
        if dest not in self._inside:
            self._wide.post(dest, tag, body, deadline)
        else:
            self.local.post(self._inside[dest], tag, body, deadline)

    def take(self, source: int, tag: int | None, deadline: float, *, own_deadline: bool) -> ReceivedMessage:
        received: list[ReceivedMessage] = []
        near = source == ANY_SOURCE or source in self._inside
        local_source = ANY_SOURCE if source == ANY_SOURCE else self._inside.get(source, 0)
        wanted = taking_status(self, self.labels, source, tag, own_deadline)

        def advance() -> tuple[bool, bool]:
            moved = False
            if near:
                message, moved = self.local.next_message(local_source, tag)
                if message is not None:
                    received.append(replace(message, source=self._ranks[message.source]))
            if not received and (message := self.mesh.next_message(source, tag)) is not None:
                received.append(message)
            return bool(received), moved

        lane = self.local.lanes[0]
        drive(PolledOperation(advance, lambda: wanted), self.mesh, lane.bell, lane.sleep, deadline)
        self.traffic.received += len(received[0].body)
        return received[0]

    def interrupt(self, error: GroupInterruptedError) -> None:
        self._wide.interrupt(error)
        self.local.interrupt(error)

    def close(self, error: BaseException | None = None) -> None:
        self._wide.close(error)
        self.local.close(error)

    def _ring(self) -> None:
        for lane in self.local.lanes:
            lane.ring_bell(self.local.rank)
