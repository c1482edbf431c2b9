"""`nn.SyncBatchNorm` over all shards of a step: the layer, its statistics and its gradient.

In a step of `lockstep.py` every shard's forward pass waits where it calls such a layer. The statistics of
each shard are computed by themselves, gathered, and combined in the order of the shards, in double precision:
which rank has computed which shard changes no bit. One autograd node stands for the call in all shards of the
rank, because its backward pass needs the gradients of all of them before it can go on with any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from paceline.core.errors import UsageError
from paceline.train.step import shard_turns

SumOverShards = Callable[[Tensor], Tensor]
"""From one row of each shard of this rank to the sum of the rows of all shards."""

_in_step: set[int] = set()  # layers, by id, of models that compute a step now


@final
@dataclass(frozen=True)
class NormCall:
    """A shard's call of a layer, with the shard's own leaves for its weight and bias."""

    layer: nn.SyncBatchNorm
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    needs_gradient: bool

    @staticmethod
    def of(layer: nn.SyncBatchNorm, x: Tensor) -> NormCall:
        given = (x, layer.weight, layer.bias)
        needed = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given)
        return NormCall(layer, *given, needed)


@final
@dataclass(frozen=True)
class GlobalStatistics:
    """Statistics of the global batch, by channel; `var` is that of the samples, not an estimate."""

    count: int
    mean: Tensor
    var: Tensor


def synced_layers(module: nn.Module) -> dict[str, nn.SyncBatchNorm]:
    return {name: child for name, child in module.named_modules() if isinstance(child, nn.SyncBatchNorm)}


@contextmanager
def over_all_shards(layers: Sequence[nn.SyncBatchNorm]) -> Iterator[None]:
    """Have these layers wait for all shards inside a step; elsewhere they are what they were."""
    for layer in layers:
        # An attribute of the object, which hides the method of its class for the time of the run. No closure:
        # a user's code may pickle or copy the model during a run.
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


@contextmanager
def in_step(layers: Sequence[nn.SyncBatchNorm]) -> Iterator[None]:
    """Refuse calls of these layers meanwhile that belong to no shard's forward pass."""
    numbers = set(map(id, layers))
    _in_step.update(numbers)
    try:
        yield
    finally:
        _in_step.difference_update(numbers)


def _forward(layer: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    turn = shard_turns.current()
    if turn is None or not layer.training:
        if layer.training and id(layer) in _in_step:
            raise UsageError(
                "a SyncBatchNorm was called in a step, and not by a shard's forward pass: by code that "
                "computes activations again in the backward pass, or by another thread",
                remedy="keep layers of SyncBatchNorm out of torch.utils.checkpoint and of threads",
            )
        plain: Tensor = type(layer).forward(layer, x)
        return plain
    layer._check_input_dim(x)
    layer._check_non_zero_input_channels(x)
    normalised, found = turn.meet(NormCall.of(layer, x))
    if layer.track_running_stats:
        _move_running(layer, found)
    made: Tensor = normalised
    return made


@torch.no_grad()
def _move_running(layer: nn.SyncBatchNorm, found: GlobalStatistics) -> None:
    """Move the running statistics, as BatchNorm does with a batch that it sees as a whole."""
    mean, var, batches = layer.running_mean, layer.running_var, layer.num_batches_tracked
    if mean is None or var is None or batches is None:
        return
    batches.add_(1)
    factor = layer.momentum if layer.momentum is not None else 1.0 / float(batches)
    unbiased = found.var * (found.count / (found.count - 1))
    for running, now in ((mean, found.mean), (var, unbiased)):
        running.mul_(1.0 - factor).add_(now.to(running), alpha=factor)


# numbers


def shard_row(x: Tensor) -> Tensor:
    """Return mean and variance of one shard's input by channel, one behind the other."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        exact = x.detach().to(_computed_in(x))
        over = [axis for axis in range(x.dim()) if axis != 1]
        mean = exact.mean(over)
        var = (exact - _by_channel(mean, x)).square_().mean(over)
        return torch.cat([mean, var])


def combined(counts: Sequence[int], rows: Sequence[Tensor]) -> GlobalStatistics:
    """Combine the rows of all shards, in their order; `counts` are values per channel."""
    total = sum(counts)
    # An input without values has no mean.
    parts = [(n / total, row.double().chunk(2)) for n, row in zip(counts, rows, strict=True) if n]
    if not parts:
        return GlobalStatistics(0, rows[0].double(), rows[0].double())
    mean = in_order([one * share for share, (one, _) in parts])
    var = in_order([(var + (one - mean).square()) * share for share, (one, var) in parts])
    return GlobalStatistics(total, mean, var)


def in_order(rows: Sequence[Tensor]) -> Tensor:
    """Return the sum of the rows, one added after the other."""
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def _computed_in(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *(1,) * (x.dim() - 2))


@final
class JointNorm(torch.autograd.Function):
    """Normalises the inputs of all shards of a rank by the same statistics.

    `order` goes from one call to the next: it makes the backward passes of all ranks come to the calls in one
    order, also to those that a loss does not depend on.
    """

    @staticmethod
    def forward(
        ctx: Any,
        order: Tensor,
        found: GlobalStatistics,
        sum_over_shards: SumOverShards,
        eps: float,
        *given: Any,
    ) -> Any:
        """`given`: the inputs of the shards, then their weights, then their biases."""
        xs, weights, biases = _thirds(given)
        kind = _computed_in(xs[0])
        mean, var = (one.to(xs[0].device, kind) for one in (found.mean, found.var))
        ctx.save_for_backward(mean, var, *xs, *weights)
        ctx.count, ctx.sum_over_shards, ctx.eps = found.count, sum_over_shards, eps
        made = [
            F.batch_norm(x.to(kind), mean, var, _as(weight, kind), _as(bias, kind), False, 0.0, eps).to(
                x.dtype
            )
            for x, weight, bias in zip(xs, weights, biases, strict=True)
        ]
        return (order.clone(), *made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, order: Tensor, *gradients: Tensor) -> Any:
        mean, var, *kept = ctx.saved_tensors
        xs, weights = kept[: len(kept) // 2], kept[len(kept) // 2 :]
        kind, parts = mean.dtype, []
        for x, weight, gradient in zip(xs, weights, gradients, strict=True):
            parts.append(_backward_of_constants(gradient.to(kind), x.to(kind), weight, mean, var, ctx.eps))
        by_weight, by_bias = (
            ctx.sum_over_shards(torch.stack([torch.cat(part[1:]) for part in parts])).to(mean).chunk(2)
        )
        scale = torch.rsqrt(var + ctx.eps)
        inputs = []
        for x, weight, (fixed, _, _) in zip(xs, weights, parts, strict=True):
            share = (scale if weight is None else scale * weight.to(kind)) / ctx.count
            centred = x.to(kind) - _by_channel(mean, x)
            made = fixed.addcmul_(centred, _by_channel(share * scale * by_weight, x), value=-1.0)
            inputs.append(made.sub_(_by_channel(share * by_bias, x)).to(x.dtype))
        learned = [
            None if weight is None else part[1].to(weight.dtype)
            for weight, part in zip(weights, parts, strict=True)
        ]
        shifts = [
            None if weight is None else part[2].to(weight.dtype)
            for weight, part in zip(weights, parts, strict=True)
        ]
        return (order, None, None, None, *inputs, *learned, *shifts)


def _backward_of_constants(
    gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias of a shard, with the statistics as constants."""
    if not x.numel():
        return torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_batch_norm_backward(
        gradient, x, _as(weight, x.dtype), mean, var, None, None, False, eps, [True, True, True]
    )
    return found


def _thirds(given: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    size = len(given) // 3
    return given[:size], given[size : 2 * size], given[2 * size :]


def _as(values: Tensor | None, kind: torch.dtype) -> Tensor | None:
    return None if values is None else values.to(kind)
