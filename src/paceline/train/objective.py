"""The user's objective as one thing: from a model and a batch to a loss and metrics.

A loss module (or a function of torch.nn.functional) takes (output, target) of a batch that is a pair; any
other function takes (model, batch), or (model, batch, step) with a `StepInfo`, and returns the loss, or the
loss and a dict of metrics. Losses are means over the samples of the batch. A loss module learns nothing and
remembers nothing: its gradients are not summed, and each worker has a copy that sees other samples.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.errors import UsageError
from paceline.core.wording import with_article
from paceline.train.step_info import StepInfo

_RULE = (
    "try: an objective that is a function is called with (model, batch), a loss module or a function of "
    "torch.nn.functional with (output, target)"
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OUTPUTS = re.compile("out|outputs?|preds?|predictions?|logits|y_pred|y_hat")
_TARGETS = re.compile("targets?|y|y_true|labels?|truth|expected")
# What the records of steps, of evaluations and of versions call the loss.
_TAKEN = ("loss", "train_loss")
# Both are means over the samples; the second is what the definition of KLDivLoss asks for.
_MEANS = ("mean", "batchmean")


@dataclass(frozen=True)
class ObjectiveResult:
    """A batch's loss (a scalar tensor) and what else was measured, means over the batch's samples."""

    loss: Tensor
    metrics: Mapping[str, Tensor | float]
    output: Any = None


@final
class Objective:
    def __init__(self, objective: Callable[..., Any]) -> None:
        if not callable(objective):
            raise UsageError(
                f"the objective is {with_article(objective)}",
                remedy="pass a loss module such as nn.MSELoss() or a function (model, batch) -> loss",
            )
        self._objective = objective
        inner, settings = objective, dict[str, Any]()
        while isinstance(inner, partial):
            settings = {**inner.keywords, **settings}
            inner = inner.func
        self._module = inner if isinstance(inner, nn.Module) else None
        self._buffers: dict[str, Tensor] | None = None
        self._worked = False  # a function of the user's own was called and returned
        self._takes_step = False
        self.takes_pairs = isinstance(inner, nn.Module) or (
            getattr(inner, "__module__", "") in ("torch.nn.functional", "torch._C._nn", "torch")
        )
        if self.takes_pairs:
            _check_reduction(inner, settings)
        else:
            self._takes_step = self._check_signature(objective)
        named = [] if self._module is None else self._module.named_parameters()
        learned = [name for name, parameter in named if parameter.requires_grad]
        if learned:
            raise UsageError(
                f"{', '.join(learned[:5])}{' ...' if len(learned) > 5 else ''} of the loss "
                f"{type(inner).__name__} would never be trained: only the model's parameters are",
                remedy="make them part of the model and use a function (model, batch) -> loss, or freeze "
                "them with requires_grad_(False)",
            )
        self._classifies = isinstance(inner, nn.CrossEntropyLoss | nn.NLLLoss) or (
            self.takes_pairs and getattr(inner, "__name__", "") in ("cross_entropy", "nll_loss")
        )

    def to(self, device: torch.device) -> None:
        if self._module is not None:
            self._module.to(device)
            self._buffers = {name: buffer.detach().clone() for name, buffer in self._module.named_buffers()}

    def check_unchanged(self) -> None:
        """Refuse a loss module whose buffers are not what they were when it was placed."""
        if not self._buffers or self._module is None:
            return
        now = dict(self._module.named_buffers())
        changed = [name for name, kept in self._buffers.items() if not _same(kept, now.get(name))]
        if changed:
            raise UsageError(
                f"{', '.join(changed)} of the loss {type(self._module).__name__} changed while it was used: "
                "every worker has a copy of the loss that sees its own samples only, and none is saved",
                remedy="keep what changes in the model, and use a function (model, batch) -> loss; "
                "a network inside of the loss may need eval()",
            )

    def score(self, model: Callable[..., Any], batch: Any, info: StepInfo) -> ObjectiveResult:
        if self.takes_pairs:
            inputs, target = split_pair(batch)
            output = model(inputs)
            return ObjectiveResult(self._checked(self._objective(output, target)), {}, output)
        try:
            result = self._objective(model, batch, *((info,) if self._takes_step else ()))
        except (TypeError, AttributeError) as error:
            if not self._worked and type(model).__name__ in str(error):
                error.add_note(_RULE)
            raise
        self._worked = True
        if isinstance(result, tuple):
            if len(result) != 2 or not isinstance(result[1], Mapping):
                raise UsageError(
                    f"the objective returned a tuple of {len(result)}",
                    remedy="return loss, or (loss, {name: value})",
                )
            loss, metrics = result
            check_metrics(metrics)
            return ObjectiveResult(self._checked(loss), metrics)
        return ObjectiveResult(self._checked(result), {})

    def evaluate(self, model: Callable[..., Any], batch: Any, info: StepInfo) -> ObjectiveResult:
        """Return what `score` returns, and the accuracy where the loss shows that classes are predicted."""
        scored = self.score(model, batch, info)
        if self._classifies and isinstance(scored.output, Tensor) and scored.output.ndim >= 2:
            _, target = split_pair(batch)
            if isinstance(target, Tensor) and target.shape == scored.output.shape:
                target = target.argmax(1)  # probabilities of the classes, such as one-hot rows
            if isinstance(target, Tensor) and not target.is_floating_point():
                right = (scored.output.argmax(1) == target).float().mean()
                return ObjectiveResult(scored.loss, {**scored.metrics, "accuracy": right}, scored.output)
        return scored

    @staticmethod
    def _checked(loss: Any) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shaped = isinstance(loss, Tensor)
            what = f"a tensor of shape {tuple(loss.shape)}" if shaped else with_article(loss)
            raise UsageError(
                f"the objective returned {what} as its loss",
                remedy="return a tensor with one number, the mean over the batch's samples",
            )
        return loss.reshape(())

    @staticmethod
    def _check_signature(objective: Callable[..., Any]) -> bool:
        """Refuse a function that cannot be called with (model, batch) or (model, batch, step); return
        whether it takes the step: its third parameter has no default, or is named `step`."""
        try:
            signature = inspect.signature(objective)
        except (TypeError, ValueError):
            return False
        third = [one for one in signature.parameters.values() if one.kind in _POSITIONAL][2:3]
        takes_step = any(one.default is one.empty or one.name == "step" for one in third)
        what = f"the objective {getattr(objective, '__name__', objective)}{signature}"
        try:
            signature.bind(*(None,) * (3 if takes_step else 2))
        except TypeError as error:
            raise UsageError(
                f"{what} cannot be called with (model, batch): {error}",
                remedy="write def objective(model, batch): ... return loss, or (model, batch, step) for one "
                "that depends on the step",
            ) from error
        output, target = [*(name.lower() for name in signature.parameters), "", ""][:2]
        if _OUTPUTS.fullmatch(output) and _TARGETS.fullmatch(target):
            raise UsageError(
                f"{what} looks like a loss of (output, target), and a function is called with (model, batch)",
                remedy="pass a loss module or a function of torch.nn.functional, which are called with "
                "(output, target), or write lambda model, batch: loss(model(batch[0]), batch[1])",
            )
        return takes_step


def _check_reduction(loss: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    reduction = settings.get("reduction", getattr(loss, "reduction", "mean"))
    if settings.get("size_average") is False:
        reduction = "sum"
    if reduction not in _MEANS:
        name = type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", "the loss")
        raise UsageError(
            f'{name}(reduction="{reduction}"): a step weights the mean losses of its micro-batches by their '
            "samples",
            remedy='use reduction="mean", or a function (model, batch) -> loss that returns a mean',
        )


def _same(kept: Tensor, now: Tensor | None) -> bool:
    if now is None or kept.shape != now.shape or kept.dtype != now.dtype:
        return False
    if kept.is_floating_point():
        kept, now = kept.nan_to_num(), now.nan_to_num()
    return torch.equal(kept, now)


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Refuse metrics that are not single numbers, or whose names are taken, by name."""
    for name, value in metrics.items():
        if name in _TAKEN:
            raise UsageError(
                f"the metric {name!r} has the name of the loss itself, which keep_best and early stopping "
                "watch",
                remedy=f'give it a name of its own, such as "{name}_of_part"',
            )
        if isinstance(value, float | int) or (
            isinstance(value, Tensor | np.generic | np.ndarray)
            and value.shape in ((), (1,))
            and value.dtype != object
        ):
            continue
        shaped = isinstance(value, Tensor | np.ndarray)
        what = f"has shape {tuple(value.shape)}" if shaped else f"is {with_article(value)}"
        raise UsageError(
            f"the metric {name!r} {what}",
            remedy="return one number for each metric, the mean over the batch's samples",
        )


def split_pair(batch: Any) -> tuple[Any, Any]:
    """Return (input, target) of a batch; refuse a batch that is no pair."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    keys = f" with keys {list(batch)}" if isinstance(batch, Mapping) else ""
    size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    raise UsageError(
        f"a loss module needs batches that are (input, target); "
        f"this one is {with_article(batch)}{size}{keys}",
        remedy="use a function as objective: def objective(model, batch): ... return loss",
    )
