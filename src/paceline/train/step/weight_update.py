"""Apply a summed gradient to the model: unscale, clip, change by modifiers, learning rate, optimizer.

The second half of a step, the commit. Every rank does the same to the same numbers, so every rank ends with
the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.core.errors import UsageError
from paceline.train.precision import LossScaler

_NARROW = (torch.float16, torch.bfloat16)

ChangeGradients = Callable[[Mapping[str, Parameter]], None]


@dataclass(frozen=True)
class AppliedUpdate:
    """Result of an update; the norm may still be on the device, and is None when it was not needed."""

    norm: Tensor | None
    skipped: bool  # an overflow of fp16, or a gradient of no use: the parameters are as they were
    learning_rate: float
    measured: Tensor | None = None  # the norm before modifiers changed the gradient, where it was asked for


@final
class WeightUpdate:
    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        optimizers: Sequence[Optimizer],
        *,
        clip_norm: float | None,
        scaler: LossScaler | None,
        change_gradients: ChangeGradients | None = None,
        scheduled: bool = False,
        log_norm_every: int = 0,
    ) -> None:
        """`scheduled`: schedulers write learning rates to the groups, and the factor multiplies those.
        `log_norm_every`: measure the gradient's norm every so many steps also where nothing needs it."""
        self._parameters, self._optimizers, self._clip_norm = parameters, optimizers, clip_norm
        self.scaler = scaler
        self._change = change_gradients
        self._scheduled, self._log_norm_every = scheduled, log_norm_every
        self._watched: list[tuple[int, Any]] | None = None
        self.applying = False  # while it does, and nothing else may, call the optimizers
        # The learning rates that the schedule multiplies; a resumed run finds them in the groups.
        for group in self._groups():
            group.setdefault("initial_lr", float(group["lr"]))

    def apply(
        self,
        factor: float,
        *,
        step: int = 1,
        need_norm: bool = False,
        active: Sequence[Optimizer] | None = None,
    ) -> AppliedUpdate:
        """Take one optimizer step with learning rates of `factor` times the initial ones, or times those that
        schedulers wrote. `step`: its number. `active`: the optimizers that step; None: all of them."""
        self.applying = True
        logged = self._log_norm_every > 0 and step % self._log_norm_every == 0
        try:
            return self._apply(factor, need_norm, logged, self._optimizers if active is None else active)
        finally:
            self.applying = False

    def skip(self) -> AppliedUpdate:
        """Leave the weights, the optimizers and the loss scale as they are."""
        return AppliedUpdate(None, True, _learning_rate(self._optimizers))

    def _apply(
        self, factor: float, need_norm: bool, logged: bool, active: Sequence[Optimizer]
    ) -> AppliedUpdate:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        overflow = False
        if self.scaler is not None:
            _scale(gradients, 1.0 / self.scaler.scale)
            overflow = bool(gradients) and not math.isfinite(float(total_norm(gradients)))
            if overflow:
                self.scaler.update(overflow)
                return AppliedUpdate(None, True, _learning_rate(active))
        measured = norm = total_norm(gradients) if need_norm else None
        if self._change is not None:
            self._change(self._parameters)
            gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if (self._clip_norm is not None or logged) and (norm is None or self._change is not None):
            norm = total_norm(gradients)
        if self._clip_norm is not None and norm is not None:
            # As torch's clip_grad_norm_: a product instead of a branch, so that a GPU is not waited for.
            _scale(gradients, torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0))
        if self.scaler is not None:
            # Not earlier: a modifier may have failed because of another rank, and the step is done again.
            self.scaler.update(overflow)
        groups = self._groups()
        self._check_untouched(groups)
        bases = [_rate_of(group) if self._scheduled else group["initial_lr"] for group in groups]
        if not self._scheduled or factor != 1.0:
            for group, base in zip(groups, bases, strict=True):
                _set_rate(group, base * factor)
        self.watch()
        for optimizer in active:
            optimizer.step()
        rate = _learning_rate(active)
        if self._scheduled and factor != 1.0:
            # A scheduler computes its next rate from its last one, which the factor is no part of.
            for group, base in zip(groups, bases, strict=True):
                _set_rate(group, base)
            self.watch()
        return AppliedUpdate(norm, False, rate, measured)

    def watch(self) -> None:
        """Notice changes of groups and learning rates by other code from now on."""
        self._watched = [_marks(group) for group in self._groups()]

    def _check_untouched(self, groups: Sequence[dict[str, Any]]) -> None:
        now = [_marks(group) for group in groups]
        if self._watched is None or now == self._watched:
            return
        kinds = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        if [size for size, _ in now] != [size for size, _ in self._watched]:
            raise UsageError(
                f"the parameter groups of {kinds} changed during the run",
                remedy="give all groups to the optimizer before; what will be trained later can have a "
                "learning rate of zero until then, or be a run of its own",
            )
        odd = next(
            i for i, (mine, theirs) in enumerate(zip(now, self._watched, strict=True)) if mine != theirs
        )
        raise UsageError(
            f"the learning rate of group {odd} of {kinds} is {float(groups[odd]['lr']):.6g}, and that is not "
            "what the run's schedule wrote: something else changes it, and it would be written over",
            remedy="give a function of the step as TrainConfig(schedule=...), or one that builds torch's "
            "scheduler as scheduler=..., which the run steps; leave scheduler.step() and assignments to "
            "param_groups out",
        )

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


def _learning_rate(active: Sequence[Optimizer]) -> float:
    return float(active[0].param_groups[0]["lr"])


def _rate_of(group: Mapping[str, Any]) -> Any:
    rate = group["lr"]
    return rate.clone() if isinstance(rate, Tensor) else rate


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _marks(group: Mapping[str, Any]) -> tuple[int, Any]:
    """Return marks that show whether a group was changed; a tensor's version does so without waiting for its
    device."""
    rate = group["lr"]
    return len(group["params"]), (id(rate), rate._version) if isinstance(rate, Tensor) else rate


def sum_is_finite(loss: Tensor, parameters: Iterable[Parameter]) -> bool:
    """Return whether the summed loss is finite, and the summed gradient of the parameters (none where loss
    scaling watches it). All ranks have the same bits of both. Waits for the device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return math.isfinite(float(loss)) and math.isfinite(float(total_norm(gradients)))


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients together, from the norms of each: the same bits wherever they lie."""
    if not gradients:
        return torch.zeros(())
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    wide = [g for g in dense if g.dtype not in _NARROW]
    narrow = [g for g in dense if g.dtype in _NARROW]
    norms = [*torch._foreach_norm(wide)] if wide else []
    if narrow:
        # A norm of 16 bits would be rounded to three digits, or be infinite.
        norms += torch._foreach_norm(narrow, dtype=torch.float32)
    together: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return together


def _scale(gradients: Sequence[Tensor], factor: float | Tensor) -> None:
    dense = [g for g in gradients if not g.is_sparse]
    if dense:
        torch._foreach_mul_(dense, factor)
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.mul_(factor)
