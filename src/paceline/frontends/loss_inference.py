"""The loss and the optimizer of a training where the caller gives none: chosen by a few targets.

    whole numbers        cross-entropy, nn.CrossEntropyLoss
    one-hot rows         the same, of whole numbers too, as nn.functional.one_hot makes them
    booleans             binary cross-entropy of logits
    all other numbers    squared error, nn.MSELoss

The optimizer is AdamW. Pure but for `first_targets`, which reads samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from paceline.core.errors import UsageError
from paceline.core.wording import with_article
from paceline.data.seeding import set_aside
from paceline.data.sources import Source
from paceline.train.objective import split_pair

_GIVE_LOSS = "give loss_fn=, such as nn.CrossEntropyLoss()"
_CLASSES = (torch.int64, torch.uint8)  # that torch's cross-entropy takes
_LOOKED_AT = 4  # samples: enough to tell one-hot rows from numbers that happen to be 0 and 1


@final
@dataclass(frozen=True)
class InferredLoss:
    """A loss, its name in words, and the reason for it."""

    loss: nn.Module
    name: str
    reason: str


@final
class FunctionLoss(nn.Module):
    """A function of (output, target) as a loss module, which `Trainer` calls with these two."""

    def __init__(self, function: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, output: Any, target: Any) -> Any:
        return self._function(output, target)


@final
class BooleanLoss(nn.Module):
    """Binary cross-entropy of logits for targets that are booleans."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(output, target.to(output.dtype))


@final
class WholeNumberLoss(nn.CrossEntropyLoss):
    """Cross-entropy for whole numbers that torch's own refuses: one-hot rows of them, and classes of another
    type than int64."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target.to(input.dtype if target.shape == input.shape else torch.int64))


def as_objective(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return what `Trainer` takes for a loss of (output, target). Loss modules and torch's own functions stay
    as they are, and so does a function whose first argument is called `model`: that is an objective."""
    if not callable(loss_fn):
        raise UsageError(f"loss_fn is {with_article(loss_fn)}", remedy=_GIVE_LOSS)
    inner = loss_fn
    while isinstance(inner, partial):
        inner = inner.func
    if (
        isinstance(inner, nn.Module)
        or (getattr(inner, "__module__", None) or "").partition(".")[0] == "torch"
    ):
        return loss_fn
    try:
        first = next(iter(inspect.signature(loss_fn).parameters), "")
    except (TypeError, ValueError):
        first = ""
    return loss_fn if first == "model" else FunctionLoss(loss_fn)


def default_optimizer(learning_rate: float, weight_decay: float | None = None) -> Callable[[Any], AdamW]:
    """Return the optimizer for a training that names none, as a function of the parameters."""
    if weight_decay is None:
        return partial(AdamW, lr=learning_rate)
    return partial(AdamW, lr=learning_rate, weight_decay=weight_decay)


def first_targets(source: Source) -> Any:
    """Return the targets of the first samples, collated; the caller's generators stay as they are."""
    if source.size is None:
        raise UsageError(
            "there is no loss_fn, and an iterable dataset is not read before the run begins",
            remedy=_GIVE_LOSS,
        )
    with set_aside():
        batch = source.fetch(np.arange(min(_LOOKED_AT, source.size), dtype=np.int64))
    if batch.data is None:
        raise UsageError(
            "the training data holds 0 samples: there is no loss_fn, and no sample to infer a loss from",
            remedy="give data with at least one sample",
        )
    return split_pair(batch.data)[1]


def infer_loss(targets: Any) -> InferredLoss:
    """Return the loss that goes with a batch of targets."""
    if not isinstance(targets, Tensor) or targets.is_complex():
        what = f"of {targets.dtype}" if isinstance(targets, Tensor) else with_article(targets)
        raise UsageError(f"there is no loss_fn, and the targets are {what}", remedy=_GIVE_LOSS)
    if targets.dtype == torch.bool:
        return InferredLoss(BooleanLoss(), "binary cross-entropy of logits", "the targets are booleans")
    whole = not targets.is_floating_point()
    if targets.ndim == 2 and targets.shape[1] > 1 and _are_one_hot(targets):
        loss = WholeNumberLoss() if whole else nn.CrossEntropyLoss()
        return InferredLoss(loss, "cross-entropy", "the targets are one-hot rows")
    if whole:
        loss = nn.CrossEntropyLoss() if targets.dtype in _CLASSES else WholeNumberLoss()
        return InferredLoss(loss, "cross-entropy", "the targets are whole numbers")
    name = str(targets.dtype).removeprefix("torch.")
    return InferredLoss(nn.MSELoss(), "squared error", f"the targets are {name} numbers")


def _are_one_hot(rows: Tensor) -> bool:
    zeros, ones = rows == 0, rows == 1
    return bool((zeros | ones).all()) and bool((ones.sum(1) == 1).all())
