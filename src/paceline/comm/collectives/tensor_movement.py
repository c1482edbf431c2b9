"""Collectives on tensors whose sizes all ranks know: no size travels ahead of the data, and every result is
written where its caller wants it. `data_movement` moves anything of any size instead.

All tensors here are flat and contiguous CPU memory, uint8 where nothing is added up. Each function runs one
collective, in the way that all ranks find alike from its size and from what their memory allows: slots, reads
out of peers' memory, or messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.algorithms import direct
from paceline.comm.algorithms.shm.peer_reads import can_read, published, reduce_scatter_by_reads, share_small
from paceline.comm.call_status import CollectiveCall
from paceline.comm.collectives.data_movement import await_all_ranks
from paceline.comm.ops import ReduceOp
from paceline.comm.reduction_order import fold_over
from paceline.comm.transport.base import Messages, Transport, peers_of

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def all_gather(
    transport: Transport, call: CollectiveCall, mine: Tensor, outs: Sequence[Tensor], deadline: float
) -> None:
    """Fill `outs[rank]` with each rank's data. `mine` may lie in any of them."""
    rank, size, window = transport.rank, transport.world_size, transport.window
    _copy(outs[rank], mine)
    mine = outs[rank]  # what peers read while the other parts are filled
    if window is not None and max(out.numel() for out in outs) <= window.small.shape[2]:
        slots = share_small(window, rank, call, mine, deadline)
        for peer in peers_of(transport):
            outs[peer].copy_(slots[peer, : outs[peer].numel()])
    elif window is not None and can_read(window, call, deadline):
        with published(window, call, mine, deadline) as addresses:
            for step in range(1, size):
                peer = (rank + step) % size  # every rank starts at another peer
                window.read(peer, addresses[peer], outs[peer], call, deadline)
    else:
        peers = peers_of(transport)
        transport.exchange(
            call, [(peer, mine) for peer in peers], [(peer, outs[peer]) for peer in peers], deadline
        )
        return
    _count(transport, mine.numel() * (size - 1), sum(out.numel() for out in outs) - mine.numel())


def broadcast(transport: Transport, call: CollectiveCall, data: Tensor, root: int, deadline: float) -> None:
    """Fill `data` with the root's on every other rank."""
    rank, window, is_root = transport.rank, transport.window, transport.rank == root
    nbytes = data.numel()
    if window is not None and nbytes <= window.small.shape[2]:
        slots = share_small(window, rank, call, data if is_root else _NOTHING, deadline)
        if not is_root:
            data.copy_(slots[root, :nbytes])
    elif window is not None and can_read(window, call, deadline):
        with published(window, call, data, deadline) as addresses:
            if not is_root:
                window.read(root, addresses[root], data, call, deadline)
    else:
        # Ranks that name different roots would send without receiving, and never find out.
        await_all_ranks(transport, call, deadline)
        _along_tree(transport, call, data, root, deadline)
        return
    _count(transport, nbytes * (transport.world_size - 1) * is_root, nbytes * (not is_root))


def all_to_all(
    transport: Transport, call: CollectiveCall, ins: Sequence[Tensor], outs: Sequence[Tensor], deadline: float
) -> None:
    """Send `ins[peer]` to each peer, and fill `outs[peer]` with what it sent."""
    _copy(outs[transport.rank], ins[transport.rank])
    sends = [(peer, ins[peer]) for peer in peers_of(transport)]
    transport.exchange(call, sends, [(peer, outs[peer]) for peer in peers_of(transport)], deadline)


def all_to_all_parts(
    transport: Transport, call: CollectiveCall, ins: Sequence[Tensor], outs: Sequence[Tensor], deadline: float
) -> None:
    """Exchange the parts of one tensor, which lie one behind the other in it: by reads, if all parts of all
    ranks are equally large."""
    rank, size, window = transport.rank, transport.world_size, transport.window
    if window is None or not can_read(window, call, deadline):
        all_to_all(transport, call, ins, outs, deadline)
        return
    count = ins[0].numel()
    even = all(part.numel() == count for part in (*ins, *outs))
    window.wait(window.signal(call, ins[0].data_ptr() if even else 0, count), call, deadline)
    addresses, counts = window.locations(call, deadline)
    if not all(addresses) or len(set(counts)) > 1:
        all_to_all(transport, call, ins, outs, deadline)
        return
    _copy(outs[rank], ins[rank])
    for step in range(1, size):
        peer = (rank + step) % size
        window.read(peer, addresses[peer] + rank * count, outs[peer], call, deadline)
    window.wait(window.signal(), call, deadline)
    _count(transport, count * (size - 1), count * (size - 1))


def gather(
    transport: Transport,
    call: CollectiveCall,
    mine: Tensor,
    outs: Sequence[Tensor],
    root: int,
    deadline: float,
) -> None:
    """Fill the root's `outs[rank]` with each rank's data."""
    if transport.rank != root:
        transport.exchange(call, [(root, mine)], [], deadline)
        return
    _copy(outs[root], mine)
    transport.exchange(call, [], [(peer, outs[peer]) for peer in peers_of(transport)], deadline)


def scatter(
    transport: Transport, call: CollectiveCall, ins: Sequence[Tensor], out: Tensor, root: int, deadline: float
) -> None:
    """Fill `out` with the root's `ins` for this rank."""
    await_all_ranks(transport, call, deadline)  # as in broadcast
    sends: Messages = []
    if transport.rank == root:
        _copy(out, ins[root])
        sends = [(peer, ins[peer]) for peer in peers_of(transport)]
    transport.exchange(call, sends, [] if transport.rank == root else [(root, out)], deadline)


def reduce_scatter(
    transport: Transport, call: CollectiveCall, op: ReduceOp, flat: Tensor, out: Tensor, deadline: float
) -> None:
    """Fold slice `rank` of all ranks' `flat` into `out`; `out` may be that slice of `flat`, no other part."""
    rank, size, window = transport.rank, transport.world_size, transport.window
    count, item = out.numel(), flat.element_size()
    if window is not None and flat.numel() * item <= window.small.shape[2]:
        slots = share_small(window, rank, call, flat.view(torch.uint8), deadline)
        low, high = rank * count * item, (rank + 1) * count * item
        inputs = [slots[peer, low:high].view(flat.dtype) for peer in range(size)]
        fold_over(direct.recipe(size, op), inputs, out)
    elif window is not None and can_read(window, call, deadline):
        reduce_scatter_by_reads(transport, window, call, direct.recipe(size, op), flat, out, deadline)
    else:
        out.copy_(direct.reduce_scatter(transport, call, op, flat.chunk(size), deadline))
        return
    _count(transport, (flat.numel() - count) * item, count * item * (size - 1))


def _along_tree(transport: Transport, call: CollectiveCall, data: Tensor, root: int, deadline: float) -> None:
    """Bring the root's data to all ranks along a binomial tree."""
    rank, size = transport.rank, transport.world_size
    position = (rank - root) % size
    reach = position & -position if position else 1 << (size - 1).bit_length()
    if position:
        transport.exchange(call, [], [((position - reach + root) % size, data)], deadline)
    while reach := reach // 2:
        if position + reach < size:
            transport.exchange(call, [((position + reach + root) % size, data)], [], deadline)


def _copy(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def _count(transport: Transport, sent: int, received: int) -> None:
    traffic = transport.traffic
    traffic.sent += sent
    traffic.received += received
    traffic.rounds += 1
