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

from torch import Tensor

from paceline.comm.algorithms import direct, ring
from paceline.comm.algorithms.job import Job
from paceline.comm.cost import Links, Situation
from paceline.comm.ops import ReduceOp, accumulator_dtype, finish
from paceline.comm.transport.base import Transport
from paceline.comm.transport.subset import Subset


def run(job: Job) -> None:
    transport = job.transport
    groups = job.groups or host_groups(transport)
    if len(groups) == 1:
        direct.run(job)
        return
    mine = next(group for group in groups if transport.rank in group)
    leaders = [group[0] for group in groups]
    # Averages are divided once, at the end: hosts may have different numbers of ranks.
    op = ReduceOp.SUM if job.op is ReduceOp.AVERAGE else job.op
    total = job.flat.to(accumulator_dtype(job.flat.dtype), copy=True)
    local = inside(transport, mine)
    if len(mine) > 1:
        direct.run(Job(local, job.call, op, total, total, job.deadline))
    if transport.rank == mine[0]:
        between = Subset(transport, leaders)
        ring.run(Job(between, job.call, op, total, total, job.deadline, job.compression, job.name))
        finish(job.op, total, transport.world_size)
    if len(mine) > 1:
        _spread(local, job, total)
    job.out.copy_(total)


def host_groups(transport: Transport) -> tuple[tuple[int, ...], ...]:
    topology = transport.topology
    return tuple(tuple(topology.ranks_on(host)) for host in sorted(set(topology.host_of)))


def inside(transport: Transport, ranks: tuple[int, ...]) -> Transport:
    """The transport among the ranks of one host: the transport's own fast one if it has one for them."""
    local = getattr(transport, "local", None)
    here = transport.topology.ranks_on(transport.topology.host_of[transport.rank])
    if local is not None and here == list(ranks):
        return local  # type: ignore[no-any-return]
    return transport if len(ranks) == transport.world_size else Subset(transport, list(ranks))


def _spread(local: Transport, job: Job, total: Tensor) -> None:
    sends = [(peer, total) for peer in range(1, local.world_size)] if local.rank == 0 else []
    receives = [(0, total)] if local.rank != 0 else []
    local.exchange(job.call, sends, receives, job.deadline)


def cost(situation: Situation, links: Links) -> float:
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
