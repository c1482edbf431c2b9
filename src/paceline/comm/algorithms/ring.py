"""Ring all-reduce: segments travel around a circle, once to be summed and once to be shared.

Idea: N segments; in round i a rank passes one partial sum to its right neighbour and folds the one from its
left. After N-1 rounds each rank owns one finished segment; N-1 more rounds pass the finished ones on.
What travels: each rank sends 2(N-1)/N of the message, and 32 bytes of header per round. 16-bit floats are
summed in fp32 on the way, so their first N-1 rounds carry twice the bytes.
What it costs: 2(N-1) rounds of latency; bandwidth-optimal on any link, and every link is used equally. Where
exchanges can overlap (between hosts), long segments go in up to four parts: one is folded, or encoded, while
the others travel. That is the same bytes in more messages; between hosts headers have tags, and so
has each chunk of a large message (transport/tcp/bulk_transfer.py).
What it asks: messages between neighbours only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.algorithms.reduce_request import ReduceRequest
from paceline.comm.algorithms.segment_moves import MessageSteps
from paceline.comm.cost import LinkCosts, Situation
from paceline.comm.ops import accumulator_dtype
from paceline.comm.reduction_order import Segment, cut
from paceline.comm.transport.base import Pipeline, Pipelined

PARTS = 4
PART_BYTES = 256 * 1024


def run(request: ReduceRequest) -> None:
    transport = request.transport
    rank, size = transport.rank, transport.world_size
    segments = cut(request.flat.numel(), size)
    left, right = (rank - 1) % size, (rank + 1) % size
    parts = min(PARTS, segments[0][1] * accumulator_dtype(request.flat.dtype).itemsize // PART_BYTES)
    pipeline = None
    if parts > 1 and size > 1 and transport.window is None and isinstance(transport, Pipelined):
        pipeline = transport.pipeline(range(size))
    with MessageSteps(request) as steps:
        if pipeline is not None:
            pieces = [
                [(start + low, start + high) for low, high in cut(stop - start, parts)]
                for start, stop in segments
            ]
            _overlapped(request, steps, pipeline, pieces)
            return
        for step in range(size - 1):
            steps.reduce(
                [(right, segments[(rank - step) % size])], [(left, segments[(rank - step - 1) % size])]
            )
        steps.finish_segment(segments[(rank + 1) % size])
        for step in range(size - 1):
            steps.share(
                [(right, [segments[(rank + 1 - step) % size]])], [(left, [segments[(rank - step) % size]])]
            )


def _overlapped(
    request: ReduceRequest, steps: MessageSteps, pipeline: Pipeline, segments: list[list[Segment]]
) -> None:
    """Run the same rounds for each part; a part starts its next round as soon as its last one has ended."""
    rank, size = request.transport.rank, request.transport.world_size
    left, right = (rank - 1) % size, (rank + 1) % size
    parts = range(len(segments[0]))
    rooms: list[Tensor] = [torch.empty(0, device="cpu")] * len(parts)
    last = 2 * (size - 1)
    for step in range(last + 1):
        for part in parts:
            if step > 0:
                pipeline.finish(request.deadline)
                steps.arrived(segments[(rank - step) % size][part], rooms[part], finished=step >= size)
                if step == size - 1:
                    steps.finish_segment(segments[(rank + 1) % size][part])
            if step < last:
                finished = step >= size - 1
                out, into = segments[(rank - step) % size][part], segments[(rank - step - 1) % size][part]
                rooms[part] = steps.incoming(into, finished=finished, used=rooms[part])
                message = steps.outgoing(out, finished=finished)
                pipeline.start(request.call, [(right, message)], [(left, rooms[part])])
        request.transport.traffic.rounds += step > 0


def cost(situation: Situation, links: LinkCosts) -> float:
    size = situation.ranks
    link = links.message(situation.crosses_hosts)
    rounds = 2 * (size - 1)
    return rounds * link.latency + rounds / size * situation.nbytes * link.per_byte
