"""Ring all-reduce: segments travel around a circle, once to be summed and once to be shared.

Idea: N segments; in round i a rank passes one partial sum to its right neighbour and folds the one from its
left. After N-1 rounds each rank owns one finished segment; N-1 more rounds pass the finished ones on.
What travels: each rank sends 2(N-1)/N of the message, and 32 bytes of header per round. 16-bit floats are
summed in fp32 on the way, so their first N-1 rounds carry twice the bytes.
What it costs: 2(N-1) rounds of latency; bandwidth-optimal on any link, and every link is used equally. Where
exchanges can overlap (between hosts), long segments go in up to four parts: one is folded, or encoded, while
the others travel. That is the same bytes in more messages; between hosts headers have tags, and so
has each chunk of a large message (transport/bulk.py).
What it asks: messages between neighbours only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.algorithms.hops import Hops, Segment, cut
from paceline.comm.algorithms.job import Job
from paceline.comm.cost import Links, Situation
from paceline.comm.ops import accumulator_dtype
from paceline.comm.transport.pipeline import Pipeline

PARTS = 4
PART_BYTES = 256 * 1024


def run(job: Job) -> None:
    transport = job.transport
    rank, size = transport.rank, transport.world_size
    segments = cut(job.flat.numel(), size)
    left, right = (rank - 1) % size, (rank + 1) % size
    parts = min(PARTS, segments[0][1] * accumulator_dtype(job.flat.dtype).itemsize // PART_BYTES)
    pipeline = _pipeline(job) if parts > 1 and size > 1 else None
    with Hops(job) as hops:
        if pipeline is not None:
            _overlapped(job, hops, pipeline, [_parts(segment, parts) for segment in segments])
            return
        for step in range(size - 1):
            hops.reduce(
                [(right, segments[(rank - step) % size])], [(left, segments[(rank - step - 1) % size])]
            )
        hops.seal(segments[(rank + 1) % size])
        for step in range(size - 1):
            hops.share(
                [(right, [segments[(rank + 1 - step) % size]])], [(left, [segments[(rank - step) % size]])]
            )


def _pipeline(job: Job) -> Pipeline | None:
    make = getattr(job.transport, "pipeline", None)
    return None if make is None else make(range(job.transport.world_size))


def _parts(segment: Segment, parts: int) -> list[Segment]:
    start, stop = segment
    return [(start + low, start + high) for low, high in cut(stop - start, parts)]


def _overlapped(job: Job, hops: Hops, pipeline: Pipeline, segments: list[list[Segment]]) -> None:
    """The same rounds for each part; a part starts its next round as soon as it has ended the one before."""
    rank, size = job.transport.rank, job.transport.world_size
    left, right = (rank - 1) % size, (rank + 1) % size
    parts = range(len(segments[0]))
    rooms: list[Tensor] = [torch.empty(0, device="cpu")] * len(parts)
    last = 2 * (size - 1)
    for step in range(last + 1):
        for part in parts:
            if step > 0:
                pipeline.finish(job.deadline)
                hops.arrived(segments[(rank - step) % size][part], rooms[part], sealed=step >= size)
                if step == size - 1:
                    hops.seal(segments[(rank + 1) % size][part])
            if step < last:
                sealed = step >= size - 1
                out, into = segments[(rank - step) % size][part], segments[(rank - step - 1) % size][part]
                rooms[part] = hops.incoming(into, sealed=sealed, used=rooms[part])
                message = hops.outgoing(out, sealed=sealed)
                pipeline.start(job.call, [(right, message)], [(left, rooms[part])])
        job.transport.traffic.rounds += step > 0


def cost(situation: Situation, links: Links) -> float:
    size = situation.ranks
    link = links.message(situation.crosses_hosts)
    rounds = 2 * (size - 1)
    return rounds * link.latency + rounds / size * situation.nbytes * link.per_byte
