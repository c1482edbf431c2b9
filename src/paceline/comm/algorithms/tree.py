"""Tree all-reduce: recursive halving, then recursive doubling.

Idea: ranks pair up over distances N/2, N/4, ... 1. In each round a pair splits what it still holds: one
keeps and sums the lower half, the other the upper. After log2 N rounds everybody owns one finished segment;
log2 N rounds in reverse put the segments together again.
What travels: each rank sends 2(N-1)/N of the message in 2 log2 N messages, and 32 bytes of header each. When
N is no power of two, the surplus ranks first hand their whole contribution to a partner and get the result
at the end (2 more rounds).
What it costs: 2 log2 N rounds of latency, against the ring's 2(N-1); long distances, so a shared uplink is
crossed by all pairs at once.
What it asks: messages between any two ranks.
"""

from __future__ import annotations

import math

from paceline.comm.algorithms.hops import Hops, Segment, cut
from paceline.comm.algorithms.job import Job
from paceline.comm.cost import Links, Situation


def run(job: Job) -> None:
    rank, size = job.transport.rank, job.transport.world_size
    core = 1 << (size.bit_length() - 1)
    segments = cut(job.flat.numel(), core)
    everything = (0, job.flat.numel())
    with Hops(job) as hops:
        if rank >= core:
            hops.reduce([(rank - core, everything)], [])
            hops.share([], [(rank - core, segments)])
            return
        surplus = rank + core if rank + core < size else None
        if surplus is not None:
            hops.reduce([], [(surplus, everything)])
        _halve(hops, rank, segments)
        hops.seal(segments[rank])
        _double(hops, rank, segments)
        if surplus is not None:
            hops.share([(surplus, segments)], [])


def _halve(hops: Hops, rank: int, segments: list[Segment]) -> None:
    low, high = 0, len(segments)
    distance = len(segments) // 2
    while distance:
        partner = rank ^ distance
        middle = (low + high) // 2
        lower, upper = (
            (segments[low][0], segments[middle - 1][1]),
            (segments[middle][0], segments[high - 1][1]),
        )
        if rank & distance:
            hops.reduce([(partner, lower)], [(partner, upper)])
            low = middle
        else:
            hops.reduce([(partner, upper)], [(partner, lower)])
            high = middle
        distance //= 2


def _double(hops: Hops, rank: int, segments: list[Segment]) -> None:
    distance = 1
    while distance < len(segments):
        partner = rank ^ distance
        hops.share(
            [(partner, _block(segments, rank, distance))], [(partner, _block(segments, partner, distance))]
        )
        distance *= 2


def _block(segments: list[Segment], rank: int, width: int) -> list[Segment]:
    start = rank // width * width
    return segments[start : start + width]


def cost(situation: Situation, links: Links) -> float:
    size = situation.ranks
    link = links.message(situation.crosses_hosts)
    core = 1 << (size.bit_length() - 1)
    rounds = 2 * math.log2(core)
    volume = 2 * (core - 1) / core * situation.nbytes
    if core != size:
        rounds += 2
        volume += 2 * situation.nbytes
    return rounds * link.latency + volume * link.per_byte
