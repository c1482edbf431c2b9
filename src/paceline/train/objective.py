"""The user's objective as one thing: from a model and a batch to a loss and metrics.

A loss module (or a function of torch.nn.functional) takes (output, target) of a batch that is a pair; any
other function takes (model, batch) and returns the loss, or the loss and a dict of metrics. Losses are means
over the samples of the batch. Must not know how batches come about.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.core.errors import UsageError


@dataclass(frozen=True)
class Scored:
    """A batch's loss (a scalar tensor) and what else was measured, means over the batch's samples."""

    loss: Tensor
    metrics: Mapping[str, Tensor | float]
    output: Any = None


@final
class Objective:
    def __init__(self, objective: Callable[..., Any]) -> None:
        if not callable(objective):
            raise UsageError(
                f"the objective is a {type(objective).__name__}",
                remedy="pass a loss module such as nn.MSELoss() or a function (model, batch) -> loss",
            )
        reduction = getattr(objective, "reduction", "mean") if isinstance(objective, nn.Module) else "mean"
        if reduction != "mean":
            raise UsageError(
                f'{type(objective).__name__}(reduction="{reduction}"): a step weights the mean losses of its '
                "micro-batches by their samples",
                remedy='use reduction="mean", or a function (model, batch) -> loss that returns a mean',
            )
        self._objective = objective
        inner = objective
        while isinstance(inner, partial):
            inner = inner.func
        self.takes_pairs = isinstance(inner, nn.Module) or (
            getattr(inner, "__module__", "") in ("torch.nn.functional", "torch._C._nn", "torch")
        )
        if not self.takes_pairs:
            self._check_signature(objective)
        self._classifies = isinstance(inner, nn.CrossEntropyLoss | nn.NLLLoss) or (
            self.takes_pairs and getattr(inner, "__name__", "") in ("cross_entropy", "nll_loss")
        )

    def to(self, device: torch.device) -> None:
        if isinstance(self._objective, nn.Module):
            self._objective.to(device)

    def score(self, model: Callable[..., Any], batch: Any) -> Scored:
        if self.takes_pairs:
            inputs, target = split_pair(batch)
            output = model(inputs)
            return Scored(self._checked(self._objective(output, target)), {}, output)
        result = self._objective(model, batch)
        if isinstance(result, tuple):
            if len(result) != 2 or not isinstance(result[1], Mapping):
                raise UsageError(
                    f"the objective returned a tuple of {len(result)}",
                    remedy="return loss, or (loss, {name: value})",
                )
            loss, metrics = result
            return Scored(self._checked(loss), metrics)
        return Scored(self._checked(result), {})

    def evaluate(self, model: Callable[..., Any], batch: Any) -> Scored:
        """As `score`, and the accuracy where the loss shows that classes are predicted."""
        scored = self.score(model, batch)
        if self._classifies and isinstance(scored.output, Tensor) and scored.output.ndim >= 2:
            _, target = split_pair(batch)
            if isinstance(target, Tensor) and not target.is_floating_point():
                right = (scored.output.argmax(1) == target).float().mean()
                return Scored(scored.loss, {**scored.metrics, "accuracy": right}, scored.output)
        return scored

    @staticmethod
    def _checked(loss: Any) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, Tensor)
                else f"a {type(loss).__name__}"
            )
            raise UsageError(
                f"the objective returned {what} as its loss",
                remedy="return a tensor with one number, the mean over the batch's samples",
            )
        return loss.reshape(())

    @staticmethod
    def _check_signature(objective: Callable[..., Any]) -> None:
        try:
            signature = inspect.signature(objective)
        except (TypeError, ValueError):
            return
        try:
            signature.bind(None, None)
        except TypeError as error:
            raise UsageError(
                f"the objective {getattr(objective, '__name__', objective)}{signature} "
                f"cannot be called with (model, batch): {error}",
                remedy="write def objective(model, batch): ... return loss",
            ) from error


def split_pair(batch: Any) -> tuple[Any, Any]:
    """(input, target) of a batch, or the user's mistake."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    keys = f" with keys {list(batch)}" if isinstance(batch, Mapping) else ""
    size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    raise UsageError(
        "a loss module needs batches that are (input, target); "
        f"this one is a {type(batch).__name__}{size}{keys}",
        remedy="use a function as objective: def objective(model, batch): ... return loss",
    )
