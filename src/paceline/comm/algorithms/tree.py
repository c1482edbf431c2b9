"""Tree all-reduce: recursive halving, then recursive doubling.

Idea: ranks pair up over distances N/2, N/4, ... 1. In each round a pair splits what it still holds: one
keeps and sums the lower half, the other the upper. After log2 N rounds each rank owns one finished segment;
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

from paceline.comm.algorithms.reduce_request import ReduceRequest
from paceline.comm.algorithms.segment_moves import MessageSteps
from paceline.comm.cost import LinkCosts, Situation
from paceline.comm.reduction_order import Segment, cut


def run(request: ReduceRequest) -> None:
    rank, size = request.transport.rank, request.transport.world_size
    core = 1 << (size.bit_length() - 1)
    segments = cut(request.flat.numel(), core)
    everything = (0, request.flat.numel())
    with MessageSteps(request) as steps:
        if rank >= core:
            steps.reduce([(rank - core, everything)], [])
            steps.share([], [(rank - core, segments)])
            return
        surplus = rank + core if rank + core < size else None
        if surplus is not None:
            steps.reduce([], [(surplus, everything)])
        _halve(steps, rank, segments)
        steps.finish_segment(segments[rank])
        _double(steps, rank, segments)
        if surplus is not None:
            steps.share([(surplus, segments)], [])


def _halve(steps: MessageSteps, rank: int, segments: list[Segment]) -> None:
    low, high = 0, len(segments)
    distance = len(segments) // 2
    while distance:
        partner = rank ^ distance
        middle = (low + high) // 2
        lower = (segments[low][0], segments[middle - 1][1])
        upper = (segments[middle][0], segments[high - 1][1])
        if rank & distance:
            keep, give, low = upper, lower, middle
        else:
            keep, give, high = lower, upper, middle
        steps.reduce([(partner, give)], [(partner, keep)])
        distance //= 2


def _double(steps: MessageSteps, rank: int, segments: list[Segment]) -> None:
    distance = 1
    while distance < len(segments):
        partner = rank ^ distance
        steps.share(
            [(partner, _block(segments, rank, distance))], [(partner, _block(segments, partner, distance))]
        )
        distance *= 2


def _block(segments: list[Segment], rank: int, width: int) -> list[Segment]:
    start = rank // width * width
    return segments[start : start + width]


def cost(situation: Situation, links: LinkCosts) -> float:
    size = situation.ranks
    link = links.message(situation.crosses_hosts)
    core = 1 << (size.bit_length() - 1)
    rounds = 2 * math.log2(core)
    volume = 2 * (core - 1) / core * situation.nbytes
    if core != size:
        rounds += 2
        volume += 2 * situation.nbytes
    return rounds * link.latency + volume * link.per_byte
