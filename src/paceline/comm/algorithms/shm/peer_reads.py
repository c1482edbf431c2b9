"""Movement of data in shared memory without a reduction: every rank reads what it needs out of its peers'
memory.

* small (up to one slot): each rank puts its data into its slot and copies from the others'. One barrier.
* large: each rank publishes the address of its data, and the peers read there, through the kernel, straight
  into their results. Each byte is copied once. Two barriers: the data is ready, and all ranks have read it.

Where the kernel does not let ranks reach each other (`can_read`), the caller sends messages instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from paceline.comm.algorithms.shm.in_place import fold_beside
from paceline.comm.algorithms.shm.task import REACHED_BLOCK, room_for
from paceline.comm.call_status import CollectiveCall
from paceline.comm.ops import accumulator_dtype
from paceline.comm.reduction_order import Recipe
from paceline.comm.transport.base import Transport, Window


def share_small(window: Window, rank: int, call: CollectiveCall, mine: Tensor, deadline: float) -> Tensor:
    """Put flat bytes into this rank's slot; return the slots of all ranks, once all are filled."""
    # The slots of one parity may be filled again without a wait: see SmallReduce.
    parity = window.next_slot
    window.small[parity, rank, : mine.numel()].copy_(mine)
    window.barrier(call, deadline)
    return window.small[parity]


def can_read(window: Window, call: CollectiveCall, deadline: float) -> bool:
    """Return whether all ranks can read each other's memory: the same answer on all of them."""
    if window.reachable is None:
        window.barrier(call, deadline)  # no trial between ranks that are in different calls
        window.can_reach(call, deadline)
    return bool(window.reachable)


@contextmanager
def published(window: Window, call: CollectiveCall, mine: Tensor, deadline: float) -> Iterator[list[int]]:
    """Let the peers read `mine` inside the block; yield the addresses of all ranks' data. The block ends when
    all ranks have read."""
    window.wait(window.signal(call, mine.data_ptr()), call, deadline)
    addresses, _ = window.locations(call, deadline)
    yield addresses
    window.wait(window.signal(), call, deadline)


def reduce_scatter_by_reads(
    transport: Transport,
    window: Window,
    call: CollectiveCall,
    recipe: Recipe,
    flat: Tensor,
    out: Tensor,
    deadline: float,
) -> None:
    """Fold this rank's slice of all ranks' data into `out`, in rank order, block by block through the cache.
    `out` may be this rank's slice of `flat`, which no peer reads."""
    rank, count, item = transport.rank, out.numel(), out.element_size()
    mine = flat[rank * count : (rank + 1) * count]
    block = max(min(REACHED_BLOCK // item, count), 1)
    rooms = room_for(window, "fetched", flat.dtype, 2, block)
    spare = room_for(window, "folded", accumulator_dtype(out.dtype), recipe.order.temporaries + 1, block)
    with published(window, call, flat, deadline) as addresses:
        for low in range(0, count, block):
            high = min(low + block, count)

            def fetch(peer: int, room: Tensor, low: int = low, high: int = high) -> Tensor:
                if peer == rank:
                    return mine[low:high]
                into, address = room[: high - low], addresses[peer] + (rank * count + low) * item
                window.read(peer, address, into, call, deadline)
                return into

            fold_beside(recipe, fetch, rooms, out[low:high], [tensor[: high - low] for tensor in spare])
