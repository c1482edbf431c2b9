"""DistributedContext: a rank's view of its group, and everything it can do with the others.

A thin face: arguments are checked and turned into calls here; what a call does is in collectives.py,
reduction.py and algorithms/, how bytes move is in transport/. Roots are named `root_rank`. Every operation
also has an asynchronous form (`async_op=True`) that returns a handle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence as Items
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from paceline.comm import collectives, reduction, shards as shards_of_ranks
from paceline.comm.algorithms.seals import Sealing
from paceline.comm.arguments import (
    check_algorithm_kind,
    check_rank,
    check_timeout,
    check_world,
    host_groups,
    shape_of,
)
from paceline.comm.calls import Call
from paceline.comm.compression import PowerSGD
from paceline.comm.compression.base import Compression
from paceline.comm.cost import Choice, Links, load_links
from paceline.comm.messenger import Messenger
from paceline.comm.ops import ReduceOp, check_op, parse_op
from paceline.comm.parcel import Parcel, pack, unpack
from paceline.comm.payload import open_payload
from paceline.comm.reduction import Reducer
from paceline.comm.sequence import Handle, Sequence
from paceline.comm.shards import Holdings
from paceline.comm.transport.base import ANY_SOURCE, Transport

DEFAULT_TIMEOUT = 300.0


class DistributedContext:
    """One rank of a group. `DistributedContext(world_size, rank)` finds the other ranks; `paceline.spawn`
    passes a ready one."""

    def __init__(
        self,
        world_size: int | None = None,
        rank: int | None = None,
        *,
        address: str | None = None,
        backend: str = "auto",
        timeout: float = DEFAULT_TIMEOUT,
        hosts: Items[Items[int]] | None = None,
    ) -> None:
        from paceline.comm.rendezvous import join  # a spawned rank never needs it

        check_world(world_size, rank)
        check_timeout(timeout)
        if world_size is not None:
            host_groups(hosts, world_size)  # refused before it waits for anybody
        transport, links = join(world_size, rank, address, backend, timeout)
        self._start(transport, timeout, links, hosts)

    @classmethod
    def from_transport(
        cls,
        transport: Transport,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        links: Links | None = None,
        hosts: Items[Items[int]] | None = None,
    ) -> DistributedContext:
        """A context over a transport that is already connected."""
        context = cls.__new__(cls)
        context._start(transport, timeout, links if links is not None else load_links(), hosts)
        return context

    @classmethod
    def from_segment(
        cls, fd: int, rank: int, world_size: int, *, timeout: float | None = None, links: Links | None = None
    ) -> DistributedContext:
        """A context over a shared segment that the launcher made for all ranks."""
        from paceline.comm.transport.shm.transport import ShmTransport

        check_world(world_size, rank)
        timeout = DEFAULT_TIMEOUT if timeout is None else timeout
        return cls.from_transport(ShmTransport(fd, rank, world_size), timeout=timeout, links=links)

    def _start(
        self, transport: Transport, timeout: float, links: Links, hosts: Items[Items[int]] | None
    ) -> None:
        self._transport = transport
        self._sequence = Sequence(transport, timeout)
        self._reducer = Reducer(transport, links, host_groups(hosts, transport.world_size))
        self._messenger = Messenger(self._sequence)

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def world_size(self) -> int:
        return self._transport.world_size

    @property
    def is_master(self) -> bool:
        return self._transport.rank == 0

    @property
    def backend(self) -> str:
        return self._transport.name

    @property
    def transport(self) -> Transport:
        return self._transport

    def __repr__(self) -> str:
        return f"DistributedContext(rank={self.rank}, world_size={self.world_size}, backend={self.backend!r})"

    # point to point

    def send(
        self,
        message: Any,
        dest_rank: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Sends a tensor, an array or plain Python data. Returns when `message` may be changed again."""
        return self._messenger.send(message, dest_rank, tag, timeout, async_op)

    def receive(
        self,
        source_rank: int = ANY_SOURCE,
        *,
        tag: int | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """The next message from `source_rank` (-1: from anybody). A timeout loses nothing: the message can
        still be received later."""
        return self._messenger.receive(source_rank, tag, timeout, async_op)

    # collectives that move

    def broadcast(
        self, data: Any = None, root_rank: int = 0, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """The root's data on every rank; the others' argument is ignored."""
        self._check_root(root_rank)
        parcel = pack(data, "broadcast") if self.rank == root_rank else None

        def work(call: Call, deadline: float) -> Any:
            # Ranks that name different roots would send without receiving, and never find out.
            collectives.barrier(self._transport, call, deadline)
            arrived = collectives.broadcast(self._transport, call, parcel, root_rank, deadline)
            return data if self.rank == root_rank else unpack(arrived.head, arrived.body)

        return self._sequence.run(
            "broadcast", f"broadcast(root_rank={root_rank})", work, timeout=timeout, async_op=async_op
        )

    def scatter(
        self, chunks: Any = None, root_rank: int = 0, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """The root's chunk for this rank. The root passes a list with one chunk per rank (sizes may
        differ), or a tensor or array that is cut by rows."""
        self._check_root(root_rank)
        parts = reduction.chunks_of(chunks, self.world_size, "scatter") if self.rank == root_rank else []
        parcels = self._packed(parts, "scatter")

        def work(call: Call, deadline: float) -> Any:
            sources = [] if self.rank == root_rank else [root_rank]
            collectives.barrier(self._transport, call, deadline)  # as in broadcast
            arrived = collectives.transfer(self._transport, call, parcels, sources, deadline)
            if self.rank == root_rank:
                return parts[root_rank]
            return unpack(arrived[root_rank].head, arrived[root_rank].body)

        return self._sequence.run(
            "scatter", f"scatter(root_rank={root_rank})", work, timeout=timeout, async_op=async_op
        )

    def gather(
        self, data: Any, root_rank: int = 0, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Everybody's data as a list by rank on the root, None elsewhere. Sizes and kinds may differ."""
        self._check_root(root_rank)
        outgoing = {} if self.rank == root_rank else {root_rank: pack(data, "gather")}

        def work(call: Call, deadline: float) -> Any:
            sources = self._peers() if self.rank == root_rank else []
            arrived = collectives.transfer(self._transport, call, outgoing, sources, deadline)
            return self._by_rank(arrived, data) if self.rank == root_rank else None

        return self._sequence.run(
            "gather", f"gather(root_rank={root_rank})", work, timeout=timeout, async_op=async_op
        )

    def all_gather(self, data: Any, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Everybody's data as a list by rank, on every rank. Sizes and kinds may differ."""
        parcel = pack(data, "all_gather")

        def work(call: Call, deadline: float) -> Any:
            outgoing = dict.fromkeys(self._peers(), parcel)
            arrived = collectives.transfer(self._transport, call, outgoing, self._peers(), deadline)
            return self._by_rank(arrived, data)

        return self._sequence.run("all_gather", "all_gather()", work, timeout=timeout, async_op=async_op)

    def all_to_all(self, chunks: Any, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Chunk p goes to rank p; returns the list of chunks that came, by rank. A tensor or array is cut
        by rows."""
        parts = reduction.chunks_of(chunks, self.world_size, "all_to_all")
        parcels = self._packed(parts, "all_to_all")

        def work(call: Call, deadline: float) -> Any:
            arrived = collectives.transfer(self._transport, call, parcels, self._peers(), deadline)
            return self._by_rank(arrived, parts[self.rank])

        return self._sequence.run("all_to_all", "all_to_all()", work, timeout=timeout, async_op=async_op)

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Handle[None] | None:
        """Returns when every rank has called it."""
        return self._sequence.run(
            "barrier",
            "barrier()",
            lambda call, deadline: collectives.barrier(self._transport, call, deadline),
            timeout=timeout,
            async_op=async_op,
        )

    # collectives that combine

    def all_reduce(
        self,
        data: Any,
        op: ReduceOp | str = ReduceOp.SUM,
        algorithm: str = "auto",
        *,
        out: Any = None,
        compression: Compression | PowerSGD | None = None,
        name: str = "default",
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """The combination of everybody's data, in the kind it was passed. `out=data` works in place and
        allocates nothing.

        `compression` shortens what travels; its error feedback remembers what was lost under `name`, one
        name per tensor.
        """
        if type(algorithm) is not str or not isinstance(compression, Compression | PowerSGD | None):
            check_algorithm_kind(algorithm, compression)
        if isinstance(compression, PowerSGD):
            reduction.check_synchronous(async_op)

            def average(flat: Tensor) -> Any:
                return self.all_reduce(flat, ReduceOp.AVERAGE, algorithm, timeout=timeout)

            return reduction.by_power_sgd(
                data, parse_op(op), compression, average, self.world_size, name, out
            )
        op = parse_op(op)
        if type(data) is Tensor and (out is None or out is data) and compression is None and not async_op:
            prepared = self._reducer.prepared(data, op, algorithm)
            if prepared is not None:
                result = self._sequence.run_prepared(
                    prepared, data, torch.empty_like(data) if out is None else data, timeout
                )
                if result is not None:
                    return result
        plan, work = self._reducer.all_reduce(data, op, algorithm, out, compression, name)
        return self._sequence.run(
            "all_reduce", plan.text, work, algorithm=plan.algorithm, timeout=timeout, async_op=async_op
        )

    def ring_all_reduce(self, data: Any, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """The average of everybody's data, by the ring algorithm."""
        return self.all_reduce(data, ReduceOp.AVERAGE, "ring", timeout=timeout, async_op=async_op)

    def canonical_sum(
        self,
        shards_held: Mapping[int, Tensor],
        shards: int,
        *,
        op: ReduceOp | str = ReduceOp.SUM,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """The sum over all shards in the fixed tree order: the same bits for any number of ranks and any
        split of the shards.

        Each rank passes the shards it holds, none is fine too. op=AVERAGE divides by the number of shards.
        """
        op = parse_op(op)
        held = shards_of_ranks.open_shards(shards_held, shards, op)

        def work(call: Call, deadline: float) -> Tensor:
            return shards_of_ranks.canonical_sum(self._transport, call, op, held, shards, deadline)

        text = f"canonical_sum({op.name}, shards={shards})"
        return self._sequence.run(
            "canonical_sum", text, work, algorithm="canonical", timeout=timeout, async_op=async_op
        )

    def fold_partials(
        self,
        partials: Items[Tensor],
        holdings: Holdings,
        out: Tensor,
        *,
        checksum: bool = False,
        after_checksum: Callable[[], None] | None = None,
        timeout: float | None = None,
    ) -> Tensor:
        """canonical_sum from partial sums that each rank has already folded, into `out` on every rank.

        `holdings` says who holds which shards, and every rank knows it: nothing is exchanged to find out.
        `partials` are this rank's, one flat tensor per node of `holdings.nodes[rank]`; `out` may be the
        first of them. If it is none of them, they are never written to, also if the call fails.
        `checksum`: what ranks read of each other is checked; a mismatch is a CorruptDataError on all of them.
        `after_checksum` is called when this rank's checksums are taken and its data has not been read.
        """
        checked = ", checksum" if checksum else ""
        text = f"fold_partials({holdings.text}, {out.dtype}[{out.numel()}]{checked})"
        sealing = Sealing(after_checksum) if checksum else None

        def work(call: Call, deadline: float) -> None:
            shards_of_ranks.fold_partials(self._transport, call, partials, holdings, out, deadline, sealing)

        self._sequence.run("fold_partials", text, work, algorithm="canonical", timeout=timeout)
        return out

    def reduce(
        self,
        data: Any,
        root_rank: int = 0,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """The combination of everybody's data on the root, None elsewhere."""
        self._check_root(root_rank)
        op = parse_op(op)
        payload = open_payload(data, "reduce")
        check_op(op, payload.flat.dtype)
        result = torch.empty_like(payload.flat)
        text = f"reduce({op.name}, {payload.shape}, root_rank={root_rank})"

        def work(call: Call, deadline: float) -> Any:
            reduction.reduce(self._transport, call, op, payload.flat, result, root_rank, deadline)
            return payload.restore(result) if self.rank == root_rank else None

        return self._sequence.run(
            "reduce", text, work, algorithm="direct", timeout=timeout, async_op=async_op
        )

    def reduce_scatter(
        self,
        data: Any,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """This rank's chunk of the combination. `data` is a list with one chunk per rank (sizes may
        differ), or a tensor or array cut by rows."""
        op = parse_op(op)
        chunks = reduction.open_chunks(data, self.world_size, op)
        text = f"reduce_scatter({op.name}, {' | '.join(chunk.shape for chunk in chunks)})"

        def work(call: Call, deadline: float) -> Any:
            return reduction.reduce_scatter(self._transport, call, op, chunks, deadline)

        return self._sequence.run(
            "reduce_scatter", text, work, algorithm="direct", timeout=timeout, async_op=async_op
        )

    # memory, statistics, choice

    def empty(self, *size: int | Items[int], dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor in memory that peers reach: reducing it in place copies nothing."""
        self._sequence.check_open()
        shape = shape_of(size)
        dtype = dtype or torch.get_default_dtype()
        return self._transport.empty(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def explain_all_reduce(self, nbytes: int) -> Choice:
        """Which algorithm "auto" takes for a message of `nbytes`, and why (`print(choice.reason)`)."""
        return self._reducer.choose(nbytes)

    def enable_profiling(self, enabled: bool = True) -> None:
        """Counts from now on, from zero; with False, stops counting and keeps what was counted."""
        if enabled:
            self._sequence.stats.clear()
        self._sequence.profiling = enabled

    def get_communication_stats(self) -> dict[str, Any]:
        """Since enable_profiling(): per operation and algorithm, calls, messages, bytes as sent, seconds,
        bandwidth."""
        return self._sequence.stats.to_dict()

    # life

    def check_open(self) -> None:
        """Raises if the group is closed, broken or interrupted."""
        self._sequence.check_open()

    def interrupt(self, reason: str) -> None:
        """Takes this rank out of the group, from any thread: what it waits for, and every later call, ends at
        once with a GroupInterruptedError. Peers that wait for this rank are told; `close` is still due."""
        self._sequence.interrupt(reason)

    def close(self, error: BaseException | None = None) -> None:
        """Leaves the group. With an error, ranks that wait for this one are told at once."""
        self._sequence.close(error)
        self._reducer.forget()
        self._messenger.close()

    def __enter__(self) -> DistributedContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.world_size) if peer != self.rank]

    def _packed(self, parts: Items[Any], what: str) -> dict[int, Parcel]:
        return {
            rank: pack(part, f"{what}: chunk {rank}") for rank, part in enumerate(parts) if rank != self.rank
        }

    def _by_rank(self, arrived: Mapping[int, Parcel], own: Any) -> list[Any]:
        return [
            own if rank == self.rank else unpack(arrived[rank].head, arrived[rank].body)
            for rank in range(self.world_size)
        ]

    def _check_root(self, root_rank: int) -> None:
        check_rank("root_rank", root_rank, self.world_size)
