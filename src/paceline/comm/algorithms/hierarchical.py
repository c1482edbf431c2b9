"""Hierarchical all-reduce: inside each host first, then between the hosts, then back.

Idea: links inside a host are fast, those between hosts are slow. Each host sums its ranks' contributions
(direct, in shared memory), the first rank of each host exchanges the host's sum with the other hosts (ring),
and spreads the result inside.
What travels: between hosts one host's worth, 2(H-1)/H of the message per host for H hosts, whatever the
number of ranks in it. Compression is applied there only.
What it costs: the latency of both levels; the slow links carry ranks-per-host times less than with a flat
ring.
What it asks: host groups, detected by the transport or given (`hosts=`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.comm.algorithms import direct, ring
from paceline.comm.algorithms.reduce_request import ReduceRequest
from paceline.comm.call_status import CollectiveCall
from paceline.comm.cost import LinkCosts, Situation
from paceline.comm.ops import ReduceOp, accumulator_dtype, finish
from paceline.comm.transport.base import (
    HasLocalGroup,
    Messages,
    Pipeline,
    Pipelined,
    ReceivedMessage,
    Topology,
    Transport,
    Window,
    labels_of,
)


def run(request: ReduceRequest) -> None:
    transport = request.transport
    groups = request.groups or host_groups(transport)
    if len(groups) == 1:
        direct.run(request)
        return
    mine = next(group for group in groups if transport.rank in group)
    leaders = [group[0] for group in groups]
    # Averages are divided once, at the end: hosts may have different numbers of ranks.
    op = ReduceOp.SUM if request.op is ReduceOp.AVERAGE else request.op
    total = request.flat.to(accumulator_dtype(request.flat.dtype), copy=True)
    local = inside(transport, mine)
    if len(mine) > 1:
        direct.run(ReduceRequest(local, request.call, op, total, total, request.deadline))
    if transport.rank == mine[0]:
        ring.run(replace(request, transport=Subset(transport, leaders), op=op, flat=total, out=total))
        finish(request.op, total, transport.world_size)
    if len(mine) > 1:
        sends = [(peer, total) for peer in range(1, local.world_size)] if local.rank == 0 else []
        receives = [(0, total)] if local.rank != 0 else []
        local.exchange(request.call, sends, receives, request.deadline)
    request.out.copy_(total)


def host_groups(transport: Transport) -> tuple[tuple[int, ...], ...]:
    topology = transport.topology
    return tuple(tuple(topology.ranks_on(host)) for host in sorted(set(topology.host_of)))


def inside(transport: Transport, ranks: tuple[int, ...]) -> Transport:
    """Return the transport among the ranks of one host: the transport's own fast one if it has one."""
    here = transport.topology.ranks_on(transport.topology.host_of[transport.rank])
    if isinstance(transport, HasLocalGroup) and here == list(ranks):
        return transport.local
    return transport if len(ranks) == transport.world_size else Subset(transport, list(ranks))


class Subset:
    """A transport among some ranks of another one, by messages."""

    def __init__(self, parent: Transport, ranks: Sequence[int]) -> None:
        self._parent = parent
        self._ranks = list(ranks)
        self.name = parent.name
        self.rank = self._ranks.index(parent.rank)
        self.world_size = len(self._ranks)
        hosts = [parent.topology.host_of[rank] for rank in self._ranks]
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        labels = labels_of(parent)
        self.labels = [labels[rank] for rank in self._ranks]
        self.topology = Topology(tuple(numbers[host] for host in hosts))
        self.traffic = parent.traffic
        self.window: Window | None = None
        self.empty = parent.empty

    def exchange(self, call: CollectiveCall, sends: Messages, receives: Messages, deadline: float) -> None:
        outgoing = [(self._ranks[peer], tensor) for peer, tensor in sends]
        incoming = [(self._ranks[peer], tensor) for peer, tensor in receives]
        self._parent.exchange(call, outgoing, incoming, deadline)

    def pipeline(self, ranks: Sequence[int]) -> Pipeline | None:
        if not isinstance(self._parent, Pipelined):
            return None
        return self._parent.pipeline([self._ranks[rank] for rank in ranks])

    def post(self, dest: int, tag: int, body: Sequence[memoryview], deadline: float) -> None:
        self._parent.post(self._ranks[dest], tag, body, deadline)

    def take(self, source: int, tag: int | None, deadline: float, *, own_deadline: bool) -> ReceivedMessage:
        message = self._parent.take(self._ranks[source], tag, deadline, own_deadline=own_deadline)
        return ReceivedMessage(self._ranks.index(message.source), message.tag, message.body)

    def close(self, error: BaseException | None = None) -> None:
        """Do nothing: the parent is closed by its owner."""


def cost(situation: Situation, links: LinkCosts) -> float:
    hosts, size = situation.hosts, situation.ranks
    if hosts <= 1 or size <= hosts:
        return float("inf")
    per_host = size / hosts
    inside = links.window if situation.has_window or situation.window_inside else links.inside
    within = 2 * inside.latency + (2 * (per_host - 1) / per_host + 1) * situation.nbytes * inside.per_byte
    rounds = 2 * (hosts - 1)
    return (
        within + rounds * links.between.latency + rounds / hosts * situation.nbytes * links.between.per_byte
    )
