"""Collectives that move data without combining it: broadcast, scatter, gather, all-to-all, barrier.

Each function checks and encodes its arguments and returns the call that the queue will run. Sizes may differ
from rank to rank: a first round carries them (16 bytes per message), a second one the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from paceline.comm.call_status import CollectiveCall, PlannedCall
from paceline.comm.collectives.arguments import check_rank
from paceline.comm.collectives.message_encoding import EncodedMessage, encode_message
from paceline.comm.transport.base import Transport, labels_of, message_barrier, peers_of
from paceline.core.errors import UsageError
from paceline.core.wording import counted


def barrier(transport: Transport) -> PlannedCall[None]:
    return PlannedCall("barrier", "barrier()", partial(await_all_ranks, transport))


def broadcast(transport: Transport, data: Any, root: int) -> PlannedCall[Any]:
    text = _with_root("broadcast", transport, root)
    message = encode_message(data, "broadcast") if transport.rank == root else None

    def work(call: CollectiveCall, deadline: float) -> Any:
        # Ranks that name different roots would send without receiving, and never find out.
        await_all_ranks(transport, call, deadline)
        arrived = _along_tree(transport, call, message, root, deadline)
        return data if transport.rank == root else arrived.decoded()

    return PlannedCall("broadcast", text, work)


def scatter(transport: Transport, chunks: Any, root: int) -> PlannedCall[Any]:
    text = _with_root("scatter", transport, root)
    is_root = transport.rank == root
    parts = chunks_of(chunks, transport.world_size, "scatter") if is_root else []
    messages = _encoded(transport, parts, "scatter")

    def work(call: CollectiveCall, deadline: float) -> Any:
        await_all_ranks(transport, call, deadline)  # as in broadcast
        arrived = transfer(transport, call, messages, [] if is_root else [root], deadline)
        return parts[root] if is_root else arrived[root].decoded()

    return PlannedCall("scatter", text, work)


def gather(transport: Transport, data: Any, root: int) -> PlannedCall[Any]:
    text = _with_root("gather", transport, root)
    is_root = transport.rank == root
    messages = {} if is_root else {root: encode_message(data, "gather")}

    def work(call: CollectiveCall, deadline: float) -> Any:
        arrived = transfer(transport, call, messages, peers_of(transport) if is_root else [], deadline)
        return _by_rank(transport, arrived, data) if is_root else None

    return PlannedCall("gather", text, work)


def all_gather(transport: Transport, data: Any) -> PlannedCall[list[Any]]:
    messages = dict.fromkeys(peers_of(transport), encode_message(data, "all_gather"))

    def work(call: CollectiveCall, deadline: float) -> list[Any]:
        arrived = transfer(transport, call, messages, peers_of(transport), deadline)
        return _by_rank(transport, arrived, data)

    return PlannedCall("all_gather", "all_gather()", work)


def all_to_all(transport: Transport, chunks: Any) -> PlannedCall[list[Any]]:
    parts = chunks_of(chunks, transport.world_size, "all_to_all")
    messages = _encoded(transport, parts, "all_to_all")

    def work(call: CollectiveCall, deadline: float) -> list[Any]:
        arrived = transfer(transport, call, messages, peers_of(transport), deadline)
        return _by_rank(transport, arrived, parts[transport.rank])

    return PlannedCall("all_to_all", "all_to_all()", work)


def transfer(
    transport: Transport,
    call: CollectiveCall,
    outgoing: Mapping[int, EncodedMessage],
    sources: Sequence[int],
    deadline: float,
) -> dict[int, EncodedMessage]:
    """Send one message to each peer in `outgoing` and receive one from each of `sources`, sizes first."""
    sizes = {
        peer: torch.tensor([len(message.head), message.body.numel()], device="cpu")
        for peer, message in outgoing.items()
    }
    announced = {peer: torch.empty(2, dtype=torch.int64, device="cpu") for peer in sources}
    transport.exchange(call, list(sizes.items()), list(announced.items()), deadline)
    parts = {
        peer: [torch.empty(length, dtype=torch.uint8, device="cpu") for length in lengths.tolist()]
        for peer, lengths in announced.items()
    }
    sends = [
        (peer, part)
        for peer, message in outgoing.items()
        for part in (torch.frombuffer(bytearray(message.head), dtype=torch.uint8), message.body)
    ]
    receives = [(peer, part) for peer in sources for part in parts[peer]]
    transport.exchange(call, sends, receives, deadline)
    return {peer: EncodedMessage(head.numpy().tobytes(), body) for peer, (head, body) in parts.items()}


def chunks_of(data: Any, world_size: int, what: str) -> list[Any]:
    """Cut the data into one chunk per rank: a list's elements, else rows, as evenly as they go."""
    if isinstance(data, list | tuple):
        if len(data) != world_size:
            raise UsageError(
                f"{what}: a list of {counted(len(data), 'chunk')} for {counted(world_size, 'rank')}",
                remedy="pass one chunk per rank",
            )
        return list(data)
    rows = getattr(data, "shape", None)
    if not rows:
        raise UsageError(
            f"{what}: cannot cut a {type(data).__name__} into chunks",
            remedy="pass a list with one chunk per rank",
        )
    edges = [len(data) * part // world_size for part in range(world_size + 1)]
    return [data[start:stop] for start, stop in pairwise(edges)]


def _with_root(operation: str, transport: Transport, root: int) -> str:
    check_rank("root_rank", root, transport.world_size)
    return f"{operation}(root_rank={labels_of(transport)[root]})"


def await_all_ranks(transport: Transport, call: CollectiveCall, deadline: float) -> None:
    """Return when all ranks are in this call: one tick in shared memory, else rounds of messages."""
    if transport.window is not None:
        transport.window.barrier(call, deadline)
    else:
        message_barrier(transport, call, deadline)


def _along_tree(
    transport: Transport, call: CollectiveCall, message: EncodedMessage | None, root: int, deadline: float
) -> EncodedMessage:
    """Bring the root's message to all ranks along a binomial tree: log2 N rounds, each rank receives once."""
    rank, size = transport.rank, transport.world_size
    position = (rank - root) % size
    if position:
        reach = position & -position  # the lowest set bit names the parent and how many are below
        parent = (position - reach + root) % size
        message = transfer(transport, call, {}, [parent], deadline)[parent]
    else:
        reach = 1 << (size - 1).bit_length()
    assert message is not None
    while reach := reach // 2:
        if position + reach < size:
            transfer(transport, call, {(position + reach + root) % size: message}, [], deadline)
    return message


def _encoded(transport: Transport, parts: Sequence[Any], what: str) -> dict[int, EncodedMessage]:
    return {
        rank: encode_message(part, f"{what}: chunk {rank}")
        for rank, part in enumerate(parts)
        if rank != transport.rank
    }


def _by_rank(transport: Transport, arrived: Mapping[int, EncodedMessage], own: Any) -> list[Any]:
    return [
        own if rank == transport.rank else arrived[rank].decoded() for rank in range(transport.world_size)
    ]
