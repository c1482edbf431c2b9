"""Numbers of fewer bits: the forward pass under autocast, and the loss scale that fp16 needs.

fp16 cannot hold gradients under 6e-8, so the loss is multiplied by a scale before the backward pass and the
gradients are divided by it afterwards. The scale follows the usual rule: an overflow anywhere in the global
gradient skips the step and multiplies the scale by `backoff`; `growth_interval` good steps in a row multiply
it by `growth`. It is a function of the global gradient alone, hence the same on every rank.

With powers of two, which the defaults are, scaling and unscaling are exact wherever nothing overflows or
underflows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch

from paceline.core.errors import UnavailableError, UsageError
from paceline.core.wording import counted
from paceline.train.settings.train_config import LossScaling

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LARGEST = torch.finfo(torch.float32).max
# No loss needs a scale this small: when it is reached, the gradients are not finite with any.
_SMALLEST = 2.0**-40


def autocast(precision: str, device: torch.device | str) -> AbstractContextManager[object]:
    """Return what the forward pass and the loss run under; weights, gradients and optimizer stay in float32.

    The cache of cast weights is on, as gradient accumulation wants it; leave the context between shards.
    """
    kind = torch.device(device).type
    if precision not in _DTYPES:
        return nullcontext()
    if precision == "bf16" and kind == "cuda" and not torch.cuda.is_bf16_supported():
        raise UnavailableError(
            f"{torch.cuda.get_device_name(device)} cannot compute in bf16", remedy='use precision="fp16"'
        )
    return torch.autocast(kind, dtype=_DTYPES[precision])


@final
class LossScaler:
    """The scale of the loss and how many good steps it has seen; plain Python, the same on every rank."""

    def __init__(self, settings: LossScaling) -> None:
        self._settings = settings
        self.scale = settings.initial  # what the loss is multiplied by and the gradients are divided by
        self.good_steps = 0  # without an overflow since the scale last changed

    def update(self, found_inf: bool) -> None:
        """Adapt the scale after a step. `found_inf`: the global gradient held values that are not finite."""
        if found_inf:
            self.good_steps = 0
            self.scale *= self._settings.backoff
            if self.scale < _SMALLEST:
                raise UsageError(
                    f"the gradients overflow even with a loss scale of {self.scale:.3g}: "
                    "the loss or the weights are not finite",
                    remedy='lower the learning rate, set clip_norm, or use precision="bf16"',
                )
            return
        self.good_steps += 1
        if self.good_steps >= self._settings.growth_interval:
            self.good_steps = 0
            grown = self.scale * self._settings.growth
            # Beyond float32 the scaled loss could not be written down at all.
            if grown <= _LARGEST:
                self.scale = grown

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        scale, good_steps = float(state["scale"]), int(state["good_steps"])
        if not 0.0 < scale <= _LARGEST or good_steps < 0:
            raise UsageError(
                f"a saved loss scale of {scale} after {counted(good_steps, 'good step')} cannot be",
                remedy="resume from another checkpoint",
            )
        self.scale, self.good_steps = scale, good_steps
