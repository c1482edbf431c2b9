"""Scaling of a learning rate with the batch: the rules, for a caller who asks and for a batch that grows."""

from __future__ import annotations

import math
from typing import Literal

from paceline.core.errors import ConfigError

ScalingRule = Literal["sqrt", "linear"]


def scale_learning_rate(base_lr: float, base_batch: int, batch: int, rule: ScalingRule = "sqrt") -> float:
    """Return the learning rate for `batch` samples a step, where `base_lr` is good for `base_batch`.

    "sqrt" multiplies by the square root of batch / base_batch, as is usual for Adam; "linear" by the ratio
    itself, as is usual for SGD. No trainer calls it by itself: a learning rate is scaled where the caller
    asks for it.
    """
    for name, value in (("base_lr", base_lr), ("base_batch", base_batch), ("batch", batch)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"scale_learning_rate: {name}={value!r} is not a positive number",
                remedy="give the learning rate, the batch that it is good for, and the new batch",
                key=name,
            )
    if rule not in ("sqrt", "linear"):
        raise ConfigError(
            f"scale_learning_rate: rule={rule!r} is no rule", remedy='use "sqrt" or "linear"', key="rule"
        )
    return base_lr * scaling_factor(rule, batch / base_batch)


def scaling_factor(rule: str, ratio: float) -> float:
    """Return the factor of the learning rate for a batch that is `ratio` times as large; "none" is 1."""
    if rule == "none":
        return 1.0
    return math.sqrt(ratio) if rule == "sqrt" else ratio
