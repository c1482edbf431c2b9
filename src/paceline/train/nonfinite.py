"""A loss that is NaN or infinite, where the settings say that the run ends there.

The summed loss is what every rank has after the exchange, so all of them decide alike, before the step is
decided: nothing of it is applied, and the state is that of the step before. Must not know how it is saved.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from paceline.core.errors import UsageError


class NonFiniteLossError(UsageError):
    """The summed loss of a step is not a number that training can go on from; the step was not applied."""


def check(loss: Tensor, step: int) -> None:
    """Refuse the step with this number. Waits for the device that has the loss."""
    value = float(loss)
    if not math.isfinite(value):
        raise NonFiniteLossError(
            f"the loss of step {step} is {value}: the step was not applied, and the run ends "
            '(nonfinite="stop")',
            remedy="look at the samples of this step, at the learning rate and at clip_norm; then go on from "
            "the last version with finite weights (`paceline checkpoint ls` says which are not)",
            step=step,
        )


def is_finite(module: nn.Module) -> bool:
    """Whether all weights and buffers are."""
    with torch.no_grad():
        values = [*module.parameters(), *module.buffers()]
        return all(bool(torch.isfinite(value).all()) for value in values if value.is_floating_point())
