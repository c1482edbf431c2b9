"""Direct all-reduce: everybody gives each peer its slice, and gets the finished slices back.

Idea: rank r owns slice r. One round brings all contributions to the owners, who fold them along the
canonical tree; one round takes the finished slices to everybody. In shared memory nothing is sent: owners
read their peers' memory (window.py). Messages of up to 4 KB between hosts go whole, in one round.
What travels: each rank sends 2(N-1)/N of the message in 2(N-1) messages (N-1 whole messages where it is
small).
What it costs: 2 rounds of latency; bandwidth-optimal where every pair of ranks has its own link, as in
shared memory or on a full switch.
What it asks: messages between any two ranks; uses a window where there is one.
"""

from __future__ import annotations

from functools import cache

import torch

from paceline.comm.algorithms.hops import Hops, cut
from paceline.comm.algorithms.job import Job
from paceline.comm.algorithms.window import reduce_in_window
from paceline.comm.algorithms.work import Recipe
from paceline.comm.cost import Links, Situation
from paceline.comm.fold import left_fold, run_blocks
from paceline.comm.ops import ReduceOp, accumulator_dtype, finish, kernel_of

WHOLE_BYTES = 4096


def run(job: Job) -> None:
    transport = job.transport
    size = transport.world_size
    if transport.window is not None and job.compression is None:
        reduce_in_window(
            transport, transport.window, job.call, recipe(size, job.op), [job.flat], job.out, job.deadline
        )
    elif job.flat.numel() * job.flat.element_size() <= WHOLE_BYTES and job.compression is None:
        _whole(job)
    else:
        _sliced(job)


@cache
def recipe(size: int, op: ReduceOp) -> Recipe:
    """One contribution per rank, folded in rank order."""
    return Recipe(left_fold(size), tuple((rank, 0) for rank in range(size)), op, size)


def _whole(job: Job) -> None:
    transport = job.transport
    rank, size = transport.rank, transport.world_size
    peers = [peer for peer in range(size) if peer != rank]
    arrived = {peer: torch.empty_like(job.flat) for peer in peers}
    transport.exchange(job.call, [(peer, job.flat) for peer in peers], list(arrived.items()), job.deadline)
    arrived[rank] = job.flat
    total = torch.empty(job.flat.numel(), dtype=accumulator_dtype(job.flat.dtype), device="cpu")
    left_fold(size).run(kernel_of(job.op), [arrived[peer] for peer in range(size)], total, [])
    finish(job.op, total, size)
    job.out.copy_(total)


def _sliced(job: Job) -> None:
    transport = job.transport
    rank, size = transport.rank, transport.world_size
    slices = cut(job.flat.numel(), size)
    peers = [peer for peer in range(size) if peer != rank]
    start, stop = slices[rank]
    with Hops(job) as hops:
        arrived = hops.gather_partials([(peer, slices[peer]) for peer in peers], peers, slices[rank])
        mine = hops.accumulator[start:stop]
        inputs = [*arrived[:rank], mine.clone(), *arrived[rank:]]
        run_blocks(left_fold(size), kernel_of(job.op), inputs, mine)
        hops.seal(slices[rank])
        hops.share([(peer, [slices[rank]]) for peer in peers], [(peer, [slices[peer]]) for peer in peers])


def cost(situation: Situation, links: Links) -> float:
    size = situation.ranks
    volume = 2 * (size - 1) / size * situation.nbytes
    if situation.has_window:
        link = links.window
        return link.latency + volume * link.per_byte
    link = links.message(situation.crosses_hosts)
    if situation.nbytes <= WHOLE_BYTES:
        return link.latency + (size - 1) * (situation.nbytes * link.per_byte + links.overhead)
    # Every further message costs its handling, and senders that meet at one port lose some of its rate.
    crowd = 1 + 0.05 * (size - 2) if situation.crosses_hosts else 1.0
    return 2 * link.latency + 2 * (size - 1) * links.overhead + volume * crowd * link.per_byte
