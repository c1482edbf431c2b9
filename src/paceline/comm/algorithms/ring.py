"""Ring all-reduce: segments travel around a circle, once to be summed and once to be shared.

Idea: N segments; in round i a rank passes one partial sum to its right neighbour and folds the one from its
left. After N-1 rounds each rank owns one finished segment; N-1 more rounds pass the finished ones on.
What travels: each rank sends 2(N-1)/N of the message, and 32 bytes of header per round. 16-bit floats are
summed in fp32 on the way, so their first N-1 rounds carry twice the bytes.
What it costs: 2(N-1) rounds of latency; bandwidth-optimal on any link, and every link is used equally.
What it asks: messages between neighbours only.
"""

from __future__ import annotations

from paceline.comm.algorithms.hops import Hops, cut
from paceline.comm.algorithms.job import Job
from paceline.comm.cost import Links, Situation


def run(job: Job) -> None:
    transport = job.transport
    rank, size = transport.rank, transport.world_size
    segments = cut(job.flat.numel(), size)
    left, right = (rank - 1) % size, (rank + 1) % size
    with Hops(job) as hops:
        for step in range(size - 1):
            hops.reduce(
                [(right, segments[(rank - step) % size])], [(left, segments[(rank - step - 1) % size])]
            )
        hops.seal(segments[(rank + 1) % size])
        for step in range(size - 1):
            hops.share(
                [(right, [segments[(rank + 1 - step) % size]])], [(left, [segments[(rank - step) % size]])]
            )


def cost(situation: Situation, links: Links) -> float:
    size = situation.ranks
    link = links.message(situation.crosses_hosts)
    rounds = 2 * (size - 1)
    return rounds * link.latency + rounds / size * situation.nbytes * link.per_byte
