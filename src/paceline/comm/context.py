"""DistributedContext: one rank's end of a group, and everything that it can do with the other ranks.

A thin face: collectives/ checks the arguments and plans a call, the queue runs it, algorithms/ combines data,
transport/ moves bytes. Roots are named `root_rank`. Every operation also has an asynchronous form
(`async_op=True`) that returns a handle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.comm.algorithms.shm.checksums import ChecksumRequest
from paceline.comm.collectives import data_movement, reduction, shard_sums
from paceline.comm.collectives.arguments import (
    check_algorithm_kind,
    check_timeout,
    check_world,
    host_groups,
    shape_of,
)
from paceline.comm.collectives.call_queue import CallQueue, Handle, PointToPoint, StatsReport, finished
from paceline.comm.collectives.reduction import Reducer
from paceline.comm.collectives.result_buffers import fill, fill_by_rank, fill_chunk, is_buffer
from paceline.comm.collectives.shard_sums import ShardOwnership
from paceline.comm.compression import PowerSGD
from paceline.comm.compression.error_feedback import Compression
from paceline.comm.cost import Choice, LinkCosts, load_links
from paceline.comm.ops import ReduceOp, parse_op
from paceline.comm.transport.base import ANY_SOURCE, ReportsWaits, Transport, labels_of
from paceline.core.errors import PacelineError
from paceline.core.time_limits import COLLECTIVE_SECONDS
from paceline.core.traceback_filter import fold


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
        timeout: float = COLLECTIVE_SECONDS,
        hosts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        from paceline.comm.rendezvous.transport_setup import join  # a spawned rank never needs it

        try:
            check_world(world_size, rank)
            check_timeout(timeout)
            if world_size is not None:
                host_groups(hosts, world_size)  # refused before it waits for any rank
            transport, links = join(world_size, rank, address, backend, timeout)
        except PacelineError as error:
            fold(error)
            raise
        self._start(transport, timeout, links, hosts)

    @classmethod
    def from_transport(
        cls,
        transport: Transport,
        *,
        timeout: float = COLLECTIVE_SECONDS,
        links: LinkCosts | None = None,
        hosts: Sequence[Sequence[int]] | None = None,
    ) -> DistributedContext:
        """Make a context over a transport that is already connected."""
        context = cls.__new__(cls)
        context._start(transport, timeout, links if links is not None else load_links(), hosts)
        return context

    @classmethod
    def from_segment(
        cls,
        fd: int,
        rank: int,
        world_size: int,
        *,
        timeout: float | None = None,
        links: LinkCosts | None = None,
    ) -> DistributedContext:
        """Make a context over a shared segment that the launcher made for all ranks."""
        from paceline.comm.transport.shm.transport import ShmTransport

        check_world(world_size, rank)
        timeout = COLLECTIVE_SECONDS if timeout is None else timeout
        return cls.from_transport(ShmTransport(fd, rank, world_size), timeout=timeout, links=links)

    def _start(
        self, transport: Transport, timeout: float, links: LinkCosts, hosts: Sequence[Sequence[int]] | None
    ) -> None:
        self._transport = transport
        # Once: `isinstance` with a Protocol costs as much as the rest of a heartbeat.
        self._reports_waits = transport if isinstance(transport, ReportsWaits) else None
        self._queue = CallQueue(transport, timeout)
        self._reducer = Reducer(transport, links, host_groups(hosts, transport.world_size))
        self._messages = PointToPoint(self._queue)

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

    @property
    def labels(self) -> Sequence[int]:
        """The number by which each rank is called in errors: in a supervised job its slot, else the rank."""
        return labels_of(self._transport)

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
        """Send a tensor, an array or plain Python data. Return when `message` may be changed again."""
        return self._messages.send(message, dest_rank, tag, timeout, async_op)

    def receive(
        self,
        source_rank: int = ANY_SOURCE,
        *,
        tag: int | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Receive the next message from `source_rank` (-1: from any rank). A timeout loses nothing: the
        message can still be received later."""
        return self._messages.receive(source_rank, tag, timeout, async_op)

    # collectives that move

    def broadcast(
        self, data: Any = None, root_rank: int = 0, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Return the root's data on every rank. A tensor or array that another rank passes is filled in place
        and returned; anything else that it passes is ignored."""
        planned = data_movement.broadcast(self._transport, data, root_rank)
        result = self._queue.run(planned, timeout, async_op)
        return finished(result, partial(fill, "broadcast", data)) if is_buffer(data) else result

    def scatter(
        self,
        send: Any = None,
        recv: Any = None,
        root_rank: int = 0,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the root's chunk for this rank, in the tensor or array `recv` where one is passed. The root
        sends a list with one chunk per rank (sizes may differ), or a tensor or array that is cut by rows."""
        recv, root_rank = _buffer_and_root(recv, root_rank)
        planned = data_movement.scatter(self._transport, send, root_rank)
        result = self._queue.run(planned, timeout, async_op)
        return result if recv is None else finished(result, partial(fill_chunk, "scatter", recv))

    def gather(
        self,
        send: Any,
        recv: Any = None,
        root_rank: int = 0,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the data of all ranks, a list by rank, on the root; None elsewhere. Sizes and kinds may
        differ. `recv` on the root is filled: a list of tensors, or a tensor or array with a row per rank."""
        recv, root_rank = _buffer_and_root(recv, root_rank)
        result = self._queue.run(data_movement.gather(self._transport, send, root_rank), timeout, async_op)
        if recv is None or self.rank != root_rank:
            return result
        return finished(result, partial(fill_by_rank, "gather", recv))

    def all_gather(self, data: Any, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return the data of all ranks as a list by rank, on every rank. Sizes and kinds may differ."""
        return self._queue.run(data_movement.all_gather(self._transport, data), timeout, async_op)

    def all_to_all(self, chunks: Any, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Send chunk p to rank p; return the list of the chunks that came, by rank. `chunks` is a list with
        one chunk per rank, or a tensor or array that is cut by rows."""
        return self._queue.run(data_movement.all_to_all(self._transport, chunks), timeout, async_op)

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Handle[None] | None:
        """Return when every rank has called it."""
        return self._queue.run(data_movement.barrier(self._transport), timeout, async_op)

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
        """Return the combination of the data of all ranks, in the kind it was passed. `out=data` works in
        place and allocates nothing.

        `compression` shortens what travels; its error feedback remembers what was lost under `name`, one name
        per tensor.
        """
        if type(algorithm) is not str or not isinstance(compression, Compression | PowerSGD | None):
            check_algorithm_kind(algorithm, compression)
        if isinstance(compression, PowerSGD):

            def average(flat: Tensor) -> Any:
                return self.all_reduce(flat, ReduceOp.AVERAGE, algorithm, timeout=timeout)

            return reduction.by_power_sgd(
                data, parse_op(op), compression, average, self.world_size, name, out, async_op
            )
        op = parse_op(op)
        if type(data) is Tensor and (out is None or out is data) and compression is None and not async_op:
            prepared = self._reducer.prepared(data, op, algorithm)
            if prepared is not None:
                result = self._queue.run_prepared(
                    prepared, data, torch.empty_like(data) if out is None else data, timeout
                )
                if result is not None:
                    return result
        planned = self._reducer.all_reduce(data, op, algorithm, out, compression, name)
        return self._queue.run(planned, timeout, async_op)

    def ring_all_reduce(self, data: Any, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return the average of the data of all ranks, by the ring algorithm."""
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
        """Return the sum over all shards in the fixed tree order: the same bits for any number of ranks and
        any split of the shards.

        Each rank passes the shards it holds, none is fine too. op=AVERAGE divides by the number of shards.
        """
        planned = shard_sums.plan_canonical_sum(self._transport, shards_held, shards, parse_op(op))
        return self._queue.run(planned, timeout, async_op)

    def fold_partials(
        self,
        partials: Sequence[Tensor],
        ownership: ShardOwnership,
        out: Tensor,
        *,
        checksum: bool = False,
        after_checksum: Callable[[], None] | None = None,
        timeout: float | None = None,
    ) -> Tensor:
        """Compute `canonical_sum` from partial sums that each rank has already folded, into `out` on every
        rank, and return `out`.

        `ownership` is which rank holds which shards; all ranks know it, so no rank has to ask for it.
        `partials` are this rank's, one flat tensor per node of `ownership.nodes[rank]`; `out` may be the
        first of them. If it is none of them, they are never written to, also if the call fails.
        `checksum`: what ranks read of each other is checked; a mismatch is a CorruptDataError on all of them.
        `after_checksum` is called when this rank's checksums are taken and its data has not been read.
        """
        request = ChecksumRequest(after_checksum) if checksum else None
        self._queue.run(
            shard_sums.plan_fold_partials(self._transport, partials, ownership, out, request), timeout
        )
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
        """Return the combination of the data of all ranks on the root, None elsewhere."""
        planned = reduction.plan_reduce(self._transport, data, root_rank, parse_op(op))
        return self._queue.run(planned, timeout, async_op)

    def reduce_scatter(
        self,
        data: Any,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return this rank's chunk of the combination. `data` is a list with one chunk per rank (sizes may
        differ), or a tensor or array that is cut by rows."""
        planned = reduction.plan_reduce_scatter(self._transport, data, parse_op(op))
        return self._queue.run(planned, timeout, async_op)

    # memory, statistics, choice

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor in memory that peers reach: reducing it in place copies nothing."""
        self._queue.check_open()
        shape = shape_of(size)
        dtype = dtype or torch.get_default_dtype()
        return self._transport.empty(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def explain_all_reduce(self, nbytes: int) -> Choice:
        """Return which algorithm "auto" takes for a message of `nbytes`, and why (`print(choice.reason)`)."""
        return self._reducer.choose(nbytes)

    def enable_profiling(self, enabled: bool = True) -> None:
        """Count from now on, from zero; with False, stop counting and keep what was counted."""
        if enabled:
            self._queue.stats.clear()
        self._queue.profiling = enabled

    def get_communication_stats(self) -> StatsReport:
        """Return what this rank counted since enable_profiling(), per operation and algorithm: calls,
        messages, bytes as sent, seconds, bandwidth. `.bytes_sent` and `.messages_count` are totals."""
        return self._queue.stats.report()

    @property
    def calls(self) -> int:
        """The collective calls of this rank so far."""
        return self._queue.calls

    def waiting_for(self) -> tuple[int, ...]:
        """Return the ranks that this one waits for right now, by their labels; for another thread. Empty
        while it does not wait or has only just begun to, and where the transport does not report waits."""
        if self._reports_waits is None:
            return ()
        try:
            status = self._reports_waits.posted_status()
        except PacelineError:
            return ()  # the group is over
        return () if status is None else status.waits_for

    # life

    def check_open(self) -> None:
        """Raise if the group is closed, broken or interrupted."""
        self._queue.check_open()

    def interrupt(self, reason: str) -> None:
        """Take this rank out of the group, from any thread: what it waits for, and every later call, ends at
        once with a GroupInterruptedError. Peers that wait for it get an error; `close` is still due."""
        self._queue.interrupt(reason)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group. With an error, ranks that wait for this one get it at once."""
        self._queue.close(error)
        self._reducer.forget()
        self._messages.close()

    def __enter__(self) -> DistributedContext:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)


def _buffer_and_root(recv: Any, root_rank: int) -> tuple[Any, int]:
    """Accept a rank in the place of the buffer: `gather(data, 1)`. What is no buffer is judged as a rank."""
    is_place = recv is None or is_buffer(recv) or isinstance(recv, list | tuple)
    return (recv, root_rank) if is_place else (None, recv)
