"""One step as a transaction: compute shards, sum them, and only then change anything.

    open        weights of the shards are known; nothing of an abandoned attempt remains
    shard       each shard of this rank's block: same start, own randomness, gradients deposited
    reduce      the sum over all shards is the parameters' gradient on every rank
    (commit)    what follows, the optimizer's step, is update.py's

Until `reduce` returns, parameters, buffers and optimizer are as they were, so the step can be done again,
with the shards dealt in another way. Must not know where batches come from, nor what is done with the
gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.comm.compression import cast_gradients, quantize_gradients, sparsify_gradients
from paceline.comm.compression.base import Compression
from paceline.comm.context import DistributedContext
from paceline.core.errors import UsageError
from paceline.data.plan import deal
from paceline.data.randomness import seed_everything
from paceline.train.compressed_summation import CompressedSummation
from paceline.train.config import GradientCompression, TrainConfig
from paceline.train.gradients import Layout, expose
from paceline.train.module_buffers import ModuleBuffers
from paceline.train.objective import check_metrics
from paceline.train.sparse_gradients import SparseGradients, sparse_parameters
from paceline.train.summation import CanonicalSummation, PlainSummation, Summation
from paceline.train.update import total_norm

MOST_METRICS = 16
_LOSS, _FIRST_METRIC = 0, 1
_WISHES = 4  # numbers of a ballot before the parameters' marks


@dataclass(frozen=True)
class Wishes:
    """What one rank brings to the step besides gradients."""

    stop: bool = False
    saved: bool = False
    save_failed: bool = False


@dataclass(frozen=True)
class Reduced:
    """What all ranks know after the exchange. Loss and metrics may still be on the device."""

    numbers: Tensor  # the loss, then the metrics
    metrics: tuple[str, ...]
    applied: int  # samples
    unused: tuple[str, ...]
    stops: int
    saved: int
    saves_failed: int
    shard_square_norms: Tensor | None


@final
class StepTransaction:
    """Computes and sums steps of one model on one rank; memory is kept from step to step."""

    def __init__(
        self, context: DistributedContext, module: nn.Module, config: TrainConfig, device: torch.device
    ) -> None:
        self._context = context
        self._config = config
        self._device = device
        self.shards = (config.shards or config.workers) if config.mode == "exact" else context.world_size
        self.block = deal(self.shards, context.world_size)[context.rank]
        named = dict(module.named_parameters())
        self._all_names, self._all_parameters = list(named), list(named.values())
        self._learning = [p.requires_grad for p in self._all_parameters]
        trained = {name: p for name, p in named.items() if p.requires_grad}
        sparse = sparse_parameters(module)
        self._dense = {name: p for name, p in trained.items() if name not in sparse}
        self._names, self._parameters = list(self._dense), list(self._dense.values())
        self._sparse = SparseGradients(
            {name: p for name, p in trained.items() if name in sparse}, self.shards
        )
        self.trained: dict[str, Parameter] = trained
        self._buffers = ModuleBuffers(module)
        self._noise = config.dynamic_batch is not None
        self._norms_start = _FIRST_METRIC + MOST_METRICS + self._buffers.size
        # One shard on one worker: autograd's own gradients are the sum, and nothing has to be copied.
        self._direct = self.shards == 1 and context.world_size == 1 and config.compression is None
        tail = self._norms_start + (self.shards if self._noise else 0)
        self._tail = torch.zeros(tail, device=device)
        layout = Layout(self._dense, tail, _WISHES + len(trained))
        self._summation = None if self._direct else _summation(context, layout, config, device)
        self._metric_names: list[str] | None = None
        self._agreed = context.world_size == 1
        self._epoch = self._step = self._planned = self._applied = self._shard_applied = 0
        self._scale = 1.0
        self._loss: Tensor | None = None
        self._metrics: list[Tensor] = []
        self._used: list[bool] = [False] * len(trained)
        self._first_filled = 0

    # one step

    def open(self, epoch: int, step: int, counts: Sequence[int], scale: float = 1.0) -> None:
        """Begins a step whose shards have so many samples; `scale` is what fp16 multiplies the loss by."""
        if [p.requires_grad for p in self._all_parameters] != self._learning:
            self._refuse_freezing()
        planned = sum(counts)
        self._epoch, self._step, self._planned, self._scale = epoch, step, planned, scale
        self._applied = 0
        self._used = [False] * len(self.trained)
        self._first_filled = next((shard for shard, count in enumerate(counts) if count), 0)
        self._sparse.start()
        if self._buffers.size:
            self._buffers.remember()
        if self._summation is not None:
            self._summation.start(self.block, self.shards)
        if isinstance(self._summation, CompressedSummation):
            self._summation.scale = scale

    def start_shard(self, shard: int) -> None:
        """The shard starts from the step's state, with randomness of its own."""
        if self._buffers.size and not self._direct and shard != self.block[0]:
            self._buffers.restore()
        for parameter in self.trained.values():
            parameter.grad = None
        self._loss, self._metrics, self._shard_applied = None, [], 0
        seed_everything(self._config.seed, self._epoch, self._step, shard)

    def backward(self, loss: Tensor, count: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Adds one micro-batch of `count` samples to the current shard; `loss` is their mean."""
        if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
            _refuse_loss(loss)
        weight = count / self._planned
        factor = weight * self._scale
        (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]
        self._shard_applied += count
        with torch.no_grad():
            weighted = loss.detach().reshape(()).float()
            if weight != 1.0:
                weighted = weighted * weight
            self._loss = weighted if self._loss is None else self._loss + weighted
            if metrics or self._metric_names:
                self._add_metrics(metrics or {}, weight)
            elif self._metric_names is None:
                self._metric_names = []

    def finish_shard(self, shard: int) -> None:
        """Deposits the shard's gradients. A shard without samples counts as zeros."""
        self._applied += self._shard_applied
        for position, parameter in enumerate(self.trained.values()):
            self._used[position] |= parameter.grad is not None
        self._sparse.collect(shard)
        if self._summation is None:
            return
        with torch.no_grad():
            self._summation.deposit([p.grad for p in self._parameters], self._shard_tail(shard))

    def reduce(self, wishes: Wishes | None = None) -> Reduced:
        """Sums all shards of all ranks; afterwards the parameters' `grad` is the gradient of the step."""
        wishes = wishes or Wishes()
        if not self._agreed:
            self._agree_on_metrics()
        ballot = [self._applied, wishes.stop, wishes.saved, wishes.save_failed, *self._used]
        names = self._metric_names or ()
        if self._summation is None:
            # A step whose samples were all left out has no numbers.
            nothing = self._tail[_LOSS]
            loss = nothing if self._loss is None else self._loss
            tail = torch.stack([loss, *(self._metrics or [nothing] * len(names))])
        else:
            flat = self._summation.finish(torch.tensor(ballot, dtype=torch.float32))
            if self._context.world_size > 1:
                ballot = [round(number) for number in flat.ballot.tolist()]
            used = dict(zip(self.trained, ballot[_WISHES:], strict=True))
            expose(self._parameters, flat, [used[name] > 0 for name in self._names])
            tail = flat.tail
        self._sparse.reduce(self._context)
        applied, stops, saved, failed, *marks = ballot
        if self._buffers.size and self._summation is not None and applied:
            movement = tail[_FIRST_METRIC + MOST_METRICS : self._norms_start]
            self._buffers.move(movement, applied / self._planned)
        short = self._planned / applied if 0 < applied != self._planned else 1.0
        if short != 1.0:
            # Samples were skipped: what was weighted by the planned number is weighted by the real one.
            grads = [p.grad for p in self.trained.values() if p.grad is not None]
            torch._foreach_mul_(grads, short)
        return Reduced(
            # A copy: the next step writes over what was exchanged.
            tail[: _FIRST_METRIC + len(names)] * short,
            tuple(names),
            applied,
            () if all(marks) else tuple(n for n, mark in zip(self.trained, marks, strict=True) if not mark),
            stops,
            saved,
            failed,
            tail[self._norms_start :].clone() if self._noise else None,
        )

    def abandon(self) -> None:
        """Gives the step up: the model is as it was before `open`."""
        if self._buffers.size:
            self._buffers.restore()
        for parameter in self.trained.values():
            parameter.grad = None

    def close(self) -> None:
        """The module keeps nothing of the memory that gradients were exchanged in."""
        for parameter in self.trained.values():
            parameter.grad = None

    # what compression still owes is part of the run's state

    def residuals(self) -> dict[str, Tensor]:
        return self._summation.residuals() if isinstance(self._summation, CompressedSummation) else {}

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        if isinstance(self._summation, CompressedSummation):
            self._summation.load_residuals(residuals, self.block)

    def _refuse_freezing(self) -> None:
        learns = zip(self._all_names, self._all_parameters, self._learning, strict=True)
        changed = [name for name, parameter, before in learns if parameter.requires_grad != before]
        raise UsageError(
            f"requires_grad of {', '.join(changed[:5])}{' ...' if len(changed) > 5 else ''} changed during "
            f"the run, before step {self._step + 1}: which parameters are trained is fixed when it starts",
            remedy="end the run, change it, and begin another run with these weights; or train them from "
            "the start, with a learning rate of their own",
        )

    # the shard's numbers

    def _add_metrics(self, metrics: Mapping[str, Any], weight: float) -> None:
        check_metrics(metrics)
        names = sorted(metrics)
        if self._metric_names is None:
            if len(names) > MOST_METRICS:
                raise UsageError(
                    f"the objective returned {len(names)} metrics, and {MOST_METRICS} travel with a step",
                    remedy="return the most important ones, and compute the others in evaluation",
                )
            self._metric_names = names
        if names != self._metric_names:
            raise UsageError(
                f"the objective returned metrics {names}, and earlier {self._metric_names or 'none'}",
                remedy="return the same metrics for every batch, from the first on",
            )
        values = [
            torch.as_tensor(metrics[name], device=self._device).detach().reshape(()).float() * weight
            for name in names
        ]
        self._metrics = (
            [a + b for a, b in zip(self._metrics, values, strict=True)] if self._metrics else values
        )

    def _agree_on_metrics(self) -> None:
        """Once, after the first samples: ranks whose first shards were empty learn the names, and different
        names are found out."""
        told = self._context.all_gather([self._metric_names or [], self._applied])
        if not any(applied for _, applied in told):
            return
        named = {tuple(names) for names, applied in told if applied}
        if len(named) > 1:
            raise UsageError(
                f"the objective returned different metrics on different workers: {sorted(named)}",
                remedy="return the same metrics for every batch",
            )
        self._metric_names = list(named.pop())
        self._agreed = True

    def _shard_tail(self, shard: int) -> Tensor:
        tail = self._tail.zero_()
        if self._buffers.size:
            # A negative zero is no movement at all; see module_buffers.py.
            tail[_FIRST_METRIC + MOST_METRICS : self._norms_start] = -0.0
        if self._shard_applied and self._loss is not None:
            tail[_LOSS] = self._loss
            for position, value in enumerate(self._metrics):
                tail[_FIRST_METRIC + position] = value
            if self._buffers.size:
                self._buffers.movement(
                    self._shard_applied / self._planned,
                    counters=shard == self._first_filled,
                    out=tail[_FIRST_METRIC + MOST_METRICS : self._norms_start],
                )
            if self._noise:
                tail[self._norms_start + shard] = self._square_norm(shard)
        return tail

    def _square_norm(self, shard: int) -> Tensor:
        grads = [p.grad for p in self._parameters if p.grad is not None] + self._sparse.values(shard)
        return total_norm(grads).square().to(self._device) / self._scale**2


def _refuse_loss(loss: Any) -> NoReturn:
    if not isinstance(loss, Tensor):
        what = f"the loss is a {type(loss).__name__}"
    elif loss.numel() != 1:
        what = f"the loss is a tensor of shape {tuple(loss.shape)}"
    else:
        what = "the loss does not depend on any parameter that is trained"
    raise UsageError(
        what,
        remedy="give the mean loss of the micro-batch's samples as one number that the model computed, "
        "not detached, not under torch.no_grad()",
    )


def _summation(
    context: DistributedContext, layout: Layout, config: TrainConfig, device: torch.device
) -> Summation:
    if config.mode == "fast":
        return PlainSummation(context, layout, device, _compression(config.compression))
    compression = _compression(config.compression)
    if compression is not None:
        return CompressedSummation(context, layout, device, compression)
    return CanonicalSummation(context, layout, device)


def _compression(settings: GradientCompression | None) -> Compression | None:
    if settings is None:
        return None
    if settings.kind in ("fp16", "bf16"):
        made = cast_gradients(settings.kind)
    elif settings.kind == "top-k":
        made = sparsify_gradients(1.0 - settings.keep)
    else:
        made = quantize_gradients(int(settings.kind.removeprefix("int")))
    return Compression(made.codec, error_feedback=settings.error_feedback)
