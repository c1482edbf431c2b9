"""DistributedDataParallel: one model, a copy per rank, every copy with the same gradients.

Idea: each rank runs forward and backward on its own samples; gradients are averaged before backward returns.
What travels: gradients in buckets, once per synchronised backward, and after them rank 0's buffers; rank 0's
    parameters once, when the model is wrapped.
What it costs: one all-reduce of the gradients per step, beside backward where cores are to spare, and one
    copy of each gradient into its bucket when .grad was None.
What it promises: sums have one fixed order, a balanced tree over the ranks, so that all ranks hold the same
    bits, run after run. mode="fast" is torch's own and promises no order.
What survives a failure: nothing here; the loss of a rank raises PeerLostError out of backward on the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parameter import is_lazy

from paceline.comm import default_group
from paceline.comm.collectives.reduction import check_compressible
from paceline.comm.collectives.reduction_input import describe
from paceline.comm.compression import Compression, PowerSGD
from paceline.comm.context import DistributedContext
from paceline.comm.ops import ReduceOp
from paceline.core import log
from paceline.core.errors import DisagreementError, UsageError
from paceline.core.wording import ranks
from paceline.parallel import buckets
from paceline.parallel.gradient_sync import GradientSync, spare_cores

_WHAT = "DistributedDataParallel"
_MODES = ("exact", "fast")
_ABSENT = "has none of this name"
_COPY_BYTES = 32 << 20

_paused: ContextVar[bool] = ContextVar("paceline_no_sync", default=False)


@final
class DistributedDataParallel(nn.Module):
    """Wrapper of `model`: backward leaves the average of all ranks' gradients in .grad, the same bits on all.

    bucket_size_mb          gradients travel in pieces of at most this many MiB
    find_unused_parameters  allow parameters that a rank's backward does not reach; they count as zero there
    context                 the group; default: the one of init_process_group or spawn
    mode                    "exact", or "fast" for torch's own over the default group of torch.distributed
    compression             of gradients on their way, such as quantize_gradients(8); one object per model
    broadcast_buffers       every rank takes rank 0's buffers (BatchNorm's) after each synchronised backward
    overlap                 reduce while backward runs; default: if this host has more cores than ranks

    The model is `.module`; state_dict() has torch's keys, which begin with "module.".
    """

    module: nn.Module

    def __init__(
        self,
        model: nn.Module,
        bucket_size_mb: float = 25,
        find_unused_parameters: bool = False,
        *,
        context: DistributedContext | None = None,
        mode: str = "exact",
        compression: Compression | PowerSGD | None = None,
        broadcast_buffers: bool = True,
        overlap: bool | None = None,
    ) -> None:
        super().__init__()
        trained = _check(model, bucket_size_mb, mode, compression)
        self.module = model
        self._mode = mode
        self._no_sync_depth = 0
        self._steps = 0  # passes whose gradients are synchronised, for log lines and reported metrics
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._sync: GradientSync | None = None
        # In a tuple, so that it is not registered as a second child with parameters of its own.
        self._fast: tuple[TorchDDP, ...] = ()
        if mode == "fast":
            _check_fast(context, compression)
            self._fast = (
                TorchDDP(
                    model,
                    bucket_cap_mb=bucket_size_mb,
                    find_unused_parameters=find_unused_parameters,
                    broadcast_buffers=broadcast_buffers,
                    gradient_as_bucket_view=True,
                ),
            )
            return
        self._context = context if context is not None else default_group.required(_WHAT)
        if self._context.world_size > 1:
            settings = (
                f"bucket_size_mb={float(bucket_size_mb)}, "
                f"find_unused_parameters={bool(find_unused_parameters)}, "
                f"broadcast_buffers={bool(broadcast_buffers)}, "
                f"compression={None if compression is None else compression.name}"
            )
            _check_same(self._context, model, settings)
            _copy_from_root(self._context, [*model.parameters(), *model.buffers()])
        group = self._context
        follow = broadcast_buffers and group.world_size > 1
        slots, parts = buckets.build(trained, max(1, int(bucket_size_mb * (1 << 20))), self._context)
        self._sync = GradientSync(
            self._context,
            slots,
            parts,
            find_unused=find_unused_parameters,
            compression=compression,
            overlap=spare_cores(self._context) if overlap is None else overlap,
            after=(lambda: _copy_from_root(group, model.buffers())) if follow else None,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        paused = self._no_sync_depth > 0 or _paused.get()
        # Checkpointing calls forward again from inside backward; that decides nothing.
        begins = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if begins and not paused and self.training:
            self._steps += 1
            log.set_process_step(self._steps)
        if self._sync is None:
            with self._fast[0].no_sync() if paused else nullcontext():
                return self._fast[0](*args, **kwargs)
        if begins:
            self._check_still_frozen()
            self._sync.prepare(not paused)
        output = self.module(*args, **kwargs)
        if begins and not paused:
            self._sync.watch(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank in this block; the next forward after it averages them."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    def train(self, mode: bool = True) -> DistributedDataParallel:
        super().train(mode)
        for fast in self._fast:
            fast.train(mode)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        return f"mode={self._mode!r}"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            f"a {_WHAT} belongs to one group of ranks and cannot be copied or pickled",
            remedy="copy or save its .module, or its state_dict()",
        )

    def _check_still_frozen(self) -> None:
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            raise UsageError(
                f"{', '.join(map(repr, thawed))} did not require a gradient when the model was wrapped, "
                "and would now train without the other ranks",
                remedy=f"wrap the model in a new {_WHAT} after unfreezing",
            )


def no_sync(model: nn.Module | None = None) -> AbstractContextManager[None]:
    """Accumulate gradients on this rank only in this block: `model`'s, or all wrapped models'.

    with paceline.no_sync():
        loss(model(first)).backward()
    loss(model(second)).backward()      # averages the sum of both
    """
    if model is None:
        return _pause_all()
    if isinstance(model, DistributedDataParallel | TorchDDP):
        return model.no_sync()
    raise UsageError(
        f"no_sync was given a {type(model).__name__}, which does not synchronise gradients",
        remedy=f"pass the {_WHAT}, or nothing for all of them",
    )


@contextmanager
def _pause_all() -> Iterator[None]:
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


def _check(
    model: object, bucket_size_mb: object, mode: object, compression: object
) -> list[tuple[str, nn.Parameter]]:
    """Check the arguments; return the parameters to train, by name."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"{_WHAT} was given a {type(model).__name__}", remedy="pass a torch.nn.Module")
    if (
        isinstance(bucket_size_mb, bool)
        or not isinstance(bucket_size_mb, int | float)
        or not 0 < bucket_size_mb < math.inf
    ):
        raise UsageError(f"bucket_size_mb={bucket_size_mb!r}", remedy="it is a number above 0, such as 25")
    if mode not in _MODES:
        raise UsageError(f"mode={mode!r}", remedy=f"mode is one of {', '.join(map(repr, _MODES))}")
    if compression is not None and not isinstance(compression, Compression | PowerSGD):
        raise UsageError(
            f"compression={compression!r}",
            remedy="pass quantize_gradients(8), sparsify_gradients(0.99), cast_gradients() or PowerSGD()",
        )
    named = list(model.named_parameters())
    if lazy := [name for name, parameter in named if is_lazy(parameter)]:
        raise UsageError(
            f"parameters {', '.join(map(repr, lazy))} have no shape yet",
            remedy="run one forward, then wrap the model",
        )
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trained:
        raise UsageError(
            f"no parameter of this {type(model).__name__} requires a gradient",
            remedy="use the model as it is, without wrapping",
        )
    for name, parameter in trained:
        if parameter.device.type not in ("cpu", "cuda"):
            raise UsageError(
                f"parameter {name!r} is on device {parameter.device}",
                remedy="move the model to the CPU or to a CUDA device",
            )
        if compression is not None:
            try:
                check_compressible(ReduceOp.AVERAGE, parameter.dtype)
            except UsageError as error:
                raise UsageError(
                    f"parameter {name!r}: {error.message}", remedy="wrap the model without compression"
                ) from error
    return trained


def _check_fast(context: DistributedContext | None, compression: object) -> None:
    if context is not None or compression is not None:
        raise UsageError(
            "mode='fast' is torch's own and takes neither context= nor compression=",
            remedy="use mode='exact', or leave them out",
        )
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise UsageError(
            "mode='fast' needs an initialised group of torch.distributed, and there is none",
            remedy="call torch.distributed.init_process_group(...) first, or use mode='exact'",
        )


def _check_same(context: DistributedContext, model: nn.Module, settings: str) -> None:
    """Raise the same error on every rank if the ranks' models or settings differ, naming what and where."""
    mine = [["settings", settings], *_describe_model(model)]
    descriptions = [dict(description) for description in context.all_gather(mine)]
    names = list(dict.fromkeys(name for description in descriptions for name in description))
    differing = [name for name in names if len({description.get(name) for description in descriptions}) > 1]
    if differing:
        name = differing[0]
        others = [
            rank
            for rank, description in enumerate(descriptions)
            if description.get(name) != descriptions[0].get(name)
        ]
        left = len(differing) - 1
        more = f", and {left} more {'differs' if left == 1 else 'differ'}" if left else ""
        raise DisagreementError(
            f"the models to keep equal are not: {name!r} on rank 0 differs from {ranks(others)}{more}",
            calls={
                rank: f"{name}: {description.get(name, _ABSENT)}"
                for rank, description in enumerate(descriptions)
            },
            remedy="build the same model with the same settings on every rank, then wrap it",
        )
    orders = [list(description) for description in descriptions]
    if any(order != orders[0] for order in orders):
        columns = enumerate(zip(*orders, strict=True))
        place = next(place for place, column in columns if len(set(column)) > 1)
        raise DisagreementError(
            f"the models to keep equal hold their parameters in another order, from number {place} on",
            calls={rank: order[place] for rank, order in enumerate(orders)},
            remedy="register the model's parts in the same order on every rank",
        )


def _describe_model(model: nn.Module) -> list[list[str]]:
    """Return name and a short text for every parameter and buffer, in order."""
    described = []
    for name, parameter in model.named_parameters():
        frozen = "" if parameter.requires_grad else ", frozen"
        described.append([name, f"parameter {_about(parameter)}{frozen}"])
    for name, buffer in model.named_buffers():
        described.append([name, f"buffer {_about(buffer)}"])
    return described


def _copy_from_root(context: DistributedContext, tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's values into the tensors of every rank, many tensors per message."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    kinds = [(tensor.dtype, tensor.numel() * tensor.element_size()) for tensor in filled]
    # The same grouping as of gradients: it depends on dtypes and sizes alone, so all ranks share it.
    for positions in buckets.plan(kinds, _COPY_BYTES):
        group = [filled[position] for position in positions]
        sizes = [tensor.numel() for tensor in group]
        if context.is_master:
            context.broadcast(torch.cat([tensor.detach().cpu().reshape(-1) for tensor in group]), 0)
            continue
        arrived: Tensor = context.broadcast(None, 0)
        if arrived.numel() != sum(sizes) or arrived.dtype != group[0].dtype:
            raise DisagreementError(
                f"rank 0 sent {_about(arrived)}, and rank {context.rank} has {_about(group[0])} "
                f"and {len(group) - 1} more to fill with it",
                remedy="keep the same buffers, with the same shapes, on every rank",
            )
        for tensor, piece in zip(group, torch.split(arrived, sizes), strict=True):
            # .data: a graph that is kept for another backward must not find this tensor modified.
            tensor.data.copy_(piece.view(tensor.shape))


def _about(tensor: Tensor) -> str:
    text = describe(tensor)
    # The order of elements in memory is part of what travels.
    return text if tensor.is_contiguous() else f"{text} with strides {list(tensor.stride())}"
