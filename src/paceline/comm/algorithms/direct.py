"""Direct all-reduce: each rank gives each peer its slice, and gets the finished slices back.

Idea: rank r owns slice r. One round brings all contributions to the owners, who fold them along the
canonical tree; one round takes the finished slices to all ranks. In shared memory nothing is sent: owners
read their peers' memory (shm/all_reduce.py). Messages of up to 4 KB between hosts go whole, in one round.
What travels: each rank sends 2(N-1)/N of the message in 2(N-1) messages (N-1 whole messages where it is
small).
What it costs: 2 rounds of latency; bandwidth-optimal where every pair of ranks has its own link, as in
shared memory or on a full switch.
What it asks: messages between any two ranks; uses a window where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from paceline.comm.algorithms.reduce_request import ReduceRequest
from paceline.comm.algorithms.segment_moves import MessageSteps
from paceline.comm.algorithms.shm.all_reduce import reduce_in_window
from paceline.comm.algorithms.shm.task import ReductionTask
from paceline.comm.call_status import CollectiveCall
from paceline.comm.cost import LinkCosts, Situation
from paceline.comm.ops import ReduceOp, accumulator_dtype, finish, kernel_of
from paceline.comm.reduction_order import Recipe, cut, left_fold, run_blocks
from paceline.comm.transport.base import Transport, peers_of

WHOLE_BYTES = 4096


def run(request: ReduceRequest) -> None:
    transport, flat = request.transport, request.flat
    order = recipe(transport.world_size, request.op)
    if request.compression is not None:
        _sliced(request)
    elif transport.window is not None:
        reduce_in_window(ReductionTask(transport, request.call, order, [flat], request.out, request.deadline))
    elif flat.numel() * flat.element_size() <= WHOLE_BYTES:
        whole = [flat] * transport.world_size
        request.out.copy_(reduce_scatter(transport, request.call, request.op, whole, request.deadline))
    else:
        _sliced(request)


@cache
def recipe(size: int, op: ReduceOp) -> Recipe:
    """Fold one contribution per rank, in rank order."""
    return Recipe(left_fold(size), tuple((rank, 0) for rank in range(size)), op, size)


def reduce_scatter(
    transport: Transport, call: CollectiveCall, op: ReduceOp, chunks: Sequence[Tensor], deadline: float
) -> Tensor:
    """Send chunk p to rank p, and fold those that come in rank order."""
    rank, peers = transport.rank, peers_of(transport)
    mine = chunks[rank]
    arrived = {peer: torch.empty_like(mine) for peer in peers}
    transport.exchange(call, [(peer, chunks[peer]) for peer in peers], list(arrived.items()), deadline)
    arrived[rank] = mine
    total = torch.empty(mine.numel(), dtype=accumulator_dtype(mine.dtype), device="cpu")
    inputs = [arrived[peer] for peer in range(transport.world_size)]
    run_blocks(left_fold(transport.world_size), kernel_of(op), inputs, total)
    finish(op, total, transport.world_size)
    return total.to(mine.dtype)


def _sliced(request: ReduceRequest) -> None:
    rank, size, peers = request.transport.rank, request.transport.world_size, peers_of(request.transport)
    slices = cut(request.flat.numel(), size)
    start, stop = slices[rank]
    with MessageSteps(request) as steps:
        outgoing = [(peer, slices[peer]) for peer in peers]
        arrived = steps.partials(outgoing, [(peer, slices[rank]) for peer in peers])
        mine = steps.accumulator[start:stop]
        inputs = [*arrived[:rank], mine.clone(), *arrived[rank:]]
        run_blocks(left_fold(size), kernel_of(request.op), inputs, mine)
        steps.finish_segment(slices[rank])
        steps.share([(peer, [slices[rank]]) for peer in peers], [(peer, [slices[peer]]) for peer in peers])


def cost(situation: Situation, links: LinkCosts) -> float:
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
