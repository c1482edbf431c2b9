"""Collectives that move data without combining it, on any transport: broadcast, scatter, gather, all-gather,
all-to-all, barrier.

Sizes may differ from rank to rank: a first round tells them (16 bytes per message), a second one carries the
data.
Knows parcels and peers; who may call what, and when, is the context's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.calls import Call
from paceline.comm.parcel import Parcel
from paceline.comm.transport.base import Transport


def barrier(transport: Transport, call: Call, deadline: float) -> None:
    """Nobody leaves before everybody has come: one tick in shared memory, log2 N rounds of empty messages
    elsewhere."""
    if transport.window is not None:
        transport.window.meet(call, deadline)
        return
    rank, size = transport.rank, transport.world_size
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    distance = 1
    while distance < size:
        transport.exchange(
            call, [((rank + distance) % size, nothing)], [((rank - distance) % size, nothing)], deadline
        )
        distance *= 2


def broadcast(transport: Transport, call: Call, parcel: Parcel | None, root: int, deadline: float) -> Parcel:
    """The root's parcel to everybody along a binomial tree: log2 N rounds, each rank receives once."""
    rank, size = transport.rank, transport.world_size
    place = (rank - root) % size
    span = 1 << (size - 1).bit_length()
    if place:
        reach = place & -place  # the lowest set bit names the parent and how many are below
        parcel = transfer(transport, call, {}, [(place - reach + root) % size], deadline)[
            (place - reach + root) % size
        ]
    else:
        reach = span
    assert parcel is not None
    reach //= 2
    while reach:
        if place + reach < size:
            transfer(transport, call, {(place + reach + root) % size: parcel}, [], deadline)
        reach //= 2
    return parcel


def transfer(
    transport: Transport, call: Call, outgoing: Mapping[int, Parcel], sources: Sequence[int], deadline: float
) -> dict[int, Parcel]:
    """One parcel to each peer in `outgoing`, one from each of `sources`, sizes first."""
    sizes = {
        peer: torch.tensor([len(parcel.head), parcel.body.numel()], device="cpu")
        for peer, parcel in outgoing.items()
    }
    announced = {peer: torch.empty(2, dtype=torch.int64, device="cpu") for peer in sources}
    transport.exchange(call, list(sizes.items()), list(announced.items()), deadline)
    heads: dict[int, Tensor] = {}
    bodies: dict[int, Tensor] = {}
    for peer, about in announced.items():
        head, body = about.tolist()
        heads[peer] = torch.empty(head, dtype=torch.uint8, device="cpu")
        bodies[peer] = torch.empty(body, dtype=torch.uint8, device="cpu")
    sends = [
        (peer, part)
        for peer, parcel in outgoing.items()
        for part in (torch.frombuffer(bytearray(parcel.head), dtype=torch.uint8), parcel.body)
    ]
    receives = [(peer, part) for peer in sources for part in (heads[peer], bodies[peer])]
    transport.exchange(call, sends, receives, deadline)
    return {peer: Parcel(heads[peer].numpy().tobytes(), bodies[peer]) for peer in sources}
