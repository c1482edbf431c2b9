"""Average gradients over the ranks while backward runs, in one fixed order: every rank gets the same bits.

Hooks tell when a parameter's gradient is complete. Buckets are reduced in their order, never in the order
of arrival: all ranks make the same calls. Where there are cores to spare, a complete bucket travels in the
background while backward runs; the rest follows when backward ends, in a callback of the autograd
engine.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from paceline.comm.collectives.call_queue import Handle
from paceline.comm.compression import Compression, PowerSGD
from paceline.comm.context import DistributedContext
from paceline.comm.ops import ReduceOp
from paceline.core.available_resources import cores
from paceline.core.errors import PeerError, UsageError
from paceline.core.wording import ranks
from paceline.parallel.buckets import Bucket, BucketSlot


@dataclass
class _Round:
    """One backward: slots that have their gradient, how many each bucket still lacks, what travels."""

    waiting: list[int]
    arrived: set[int] = field(default_factory=set)
    handles: list[Handle[Any] | None] = field(default_factory=list)  # by bucket; None: nothing to wait for

    @property
    def launched(self) -> int:
        return len(self.handles)

    def wait(self) -> None:
        for handle in self.handles:
            if handle is not None:
                handle.wait()


@final
class GradientSync:
    """The hooks of one model. `after` runs when a backward's gradients are averaged."""

    def __init__(
        self,
        context: DistributedContext,
        slots: Sequence[BucketSlot],
        buckets: Sequence[Bucket],
        *,
        find_unused: bool,
        compression: Compression | PowerSGD | None,
        overlap: bool,
        after: Callable[[], None] | None,
    ) -> None:
        self.enabled = True
        self._context = context
        self._slots = slots
        self._buckets = buckets
        self._find_unused = find_unused
        self._compression = compression
        # PowerSGD's two averages depend on each other, so it has no asynchronous form.
        self._overlap = overlap and context.world_size > 1 and not isinstance(compression, PowerSGD)
        self._after = after
        self._round: _Round | None = None
        # Backward of a model on several GPUs calls hooks from several threads.
        self._lock = threading.RLock()
        me = weakref.ref(self)
        for index, slot in enumerate(slots):
            slot.parameter.register_post_accumulate_grad_hook(partial(_arrived, me, index))  # type: ignore[no-untyped-call]

    def prepare(self, enabled: bool) -> None:
        """Set, before a forward, whether its backward synchronises; end what a failed backward has left."""
        with self._lock:
            if self._round is not None:
                left, self._round = self._round, None
                left.wait()
            self.enabled = enabled

    def watch(self, output: object) -> None:
        """Let backward through `output` say that it begins.

        Without it the first parameter would: with reentrant checkpointing that is inside a nested backward,
        whose end is not the end. Also keeps this object alive as long as there is something to synchronise,
        even if the wrapped model itself is gone.
        """

        def begins(_: Tensor) -> None:
            if self.enabled:
                self._begin()

        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(begins)  # type: ignore[no-untyped-call]

    def _begin(self) -> _Round:
        with self._lock:
            if self._round is None:
                self._round = _Round([len(bucket.slots) for bucket in self._buckets])
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
            return self._round

    def _arrive(self, index: int) -> None:
        if not self.enabled:
            return
        with self._lock, torch.no_grad():
            current = self._begin()
            slot = self._slots[index]
            if slot.bucket < current.launched:
                raise UsageError(
                    f"parameter {slot.name!r} got a second gradient in a backward, after the first was sent",
                    remedy="use torch.utils.checkpoint with use_reentrant=False, "
                    "or pass overlap=False to DistributedDataParallel",
                )
            slot.attach()
            if index in current.arrived:
                return
            current.arrived.add(index)
            current.waiting[slot.bucket] -= 1
            # The last bucket is left to `_finish`, which comes next and needs no other thread.
            last = len(self._buckets) - 1
            while self._overlap and current.launched < last and not current.waiting[current.launched]:
                self._launch(current, async_op=True)

    def _finish(self) -> None:
        """Reduce what is left when backward has ended, and wait for everything."""
        with self._lock, torch.no_grad():
            current, self._round = self._round, None
            # torch.autograd.grad fills no parameter's .grad, and concerns no other rank.
            if current is None or not current.arrived:
                return
            absent = [index for index in range(len(self._slots)) if index not in current.arrived]
            unexpected = [index for index in absent if self._slots[index].parameter.requires_grad]
            if unexpected and not self._find_unused:
                self._refuse(current, [self._slots[index].name for index in reversed(unexpected)])
            for index in absent:
                self._slots[index].fill()
            while current.launched < len(self._buckets):
                self._launch(current, async_op=False)
            for bucket, handle in zip(self._buckets, current.handles, strict=True):
                if handle is not None:
                    handle.wait()
                    bucket.store()
            if self._find_unused:
                self._attach_used()
            if self._after is not None:
                self._after()

    def _launch(self, current: _Round, *, async_op: bool) -> None:
        """Reduce the next bucket in order."""
        bucket = self._buckets[current.launched]
        if self._context.world_size == 1 or not bucket.wire.numel():
            current.handles.append(None)
            return
        if isinstance(self._compression, PowerSGD):
            self._low_rank(bucket, self._compression)
            current.handles.append(None)
            return
        bucket.load()
        handle = self._context.all_reduce(
            bucket.wire,
            ReduceOp.AVERAGE,
            "canonical" if self._compression is None else "auto",
            out=bucket.wire,
            compression=self._compression,
            name=bucket.name,
            async_op=async_op,
        )
        if not async_op:
            bucket.store()
        current.handles.append(handle if async_op else None)

    def _low_rank(self, bucket: Bucket, compression: PowerSGD) -> None:
        views = [self._slots[index].view for index in bucket.slots]

        def average(flat: Tensor) -> Tensor:
            averaged: Tensor = self._context.all_reduce(flat, ReduceOp.AVERAGE, "canonical", out=flat)
            return averaged

        for view, reduced in zip(views, compression.reduce(views, average, name=bucket.name), strict=True):
            view.copy_(reduced)

    def _attach_used(self) -> None:
        """Attach the average, on all ranks, to parameters with a gradient on any rank; others keep none."""
        used = torch.tensor([slot.parameter.grad is not None for slot in self._slots])
        if self._context.world_size > 1:
            used = self._context.all_reduce(used, ReduceOp.MAX)
        for slot, is_used in zip(self._slots, used.tolist(), strict=True):
            if is_used:
                slot.parameter.grad = slot.view

    def _refuse(self, current: _Round, names: list[str]) -> NoReturn:
        """End a backward that left parameters out; ranks that left none out notice the different call."""
        unused: Mapping[int, list[str]] = {self._context.rank: names}
        cause: PeerError | None = None
        try:
            current.wait()
            unused = dict(enumerate(self._context.all_gather(names)))
        except PeerError as error:
            cause = error
        without: dict[tuple[str, ...], list[int]] = {}
        for rank, theirs in unused.items():
            without.setdefault(tuple(theirs), []).append(rank)
        listing = "; ".join(
            f"{', '.join(map(repr, missing))} ({ranks(by_ranks, all_named=True)})"
            for missing, by_ranks in without.items()
        )
        raise UsageError(
            f"backward ended without a gradient for {listing}: every rank waits for every parameter",
            remedy="let the loss depend on them, freeze them with requires_grad_(False) before wrapping, "
            "or pass find_unused_parameters=True to DistributedDataParallel",
        ) from cause


def spare_cores(context: DistributedContext) -> bool:
    """Return whether this host has more cores than ranks, so that a reduction can run beside backward."""
    topology = context.transport.topology
    return cores() > len(topology.ranks_on(topology.host_of[context.rank]))


def _arrived(me: weakref.ref[GradientSync], index: int, _: Tensor) -> None:
    # Weak: the parameters outlive the wrapper, and must not keep its memory.
    if (sync := me()) is not None:
        sync._arrive(index)


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif is_dataclass(output) and not isinstance(output, type):
        for entry in fields(output):
            yield from _tensors(getattr(output, entry.name))
