"""The learning rate as a pure function of the step and the global batch, and how many steps a run has.

    learning rate = the optimizer's own  x  warmup(step)  x  shape(step)  x  rule(batch / first batch)

Steps count from 0 here. Warmup is (step + 1) / warmup_steps until it reaches 1. A shape that needs an end
goes down over the steps after warmup, p = (step - warmup_steps) / (total_steps - warmup_steps): linear is
1 - p, cosine is (1 + cos(pi p)) / 2, so that the last step still learns something. The rule compensates a
dynamic batch that has grown: the optimizer's learning rate is meant for the batch that it starts with.

Must not know optimizers: it returns a factor.
"""

from __future__ import annotations

import math
from typing import final

from paceline.core.errors import ConfigError, UsageError
from paceline.train.config import TrainConfig

# The mathematics library may differ in the last bit from machine to machine; the learning rate must not.
_DIGITS = 12


def steps_per_epoch(samples: int, global_batch: int, *, drop_last: bool) -> int:
    """Steps of one pass: a short last batch is a step of its own unless it is dropped."""
    return samples // global_batch if drop_last else -(-samples // global_batch)


def total_steps(config: TrainConfig, samples: int | None) -> int | None:
    """Steps of the whole run, whichever of `epochs` and `max_steps` ends it first; None if nobody can know.

    Under a dynamic batch the steps of an epoch depend on the noise that will be measured.
    """
    epochs = 1 if config.epochs is None and config.max_steps is None else config.epochs
    if samples is None or config.dynamic_batch is not None or epochs is None:
        # With an unknown size the epochs may end the run before max_steps does.
        return config.max_steps if epochs is None or config.max_steps is not None else None
    steps = epochs * steps_per_epoch(samples, config.global_batch, drop_last=config.drop_last)
    return steps if config.max_steps is None else min(steps, config.max_steps)


@final
class Schedule:
    """The factor for each step of one run."""

    def __init__(self, config: TrainConfig, total_steps: int | None) -> None:
        if config.schedule in ("linear", "cosine"):
            if total_steps is None:
                raise ConfigError(
                    f'schedule="{config.schedule}" goes down to the end of the run, and the end is not known',
                    remedy='set max_steps, or use schedule="constant" or a function',
                )
            if total_steps <= config.warmup_steps:
                raise ConfigError(
                    f"warmup_steps={config.warmup_steps} of total_steps={total_steps} leave no step "
                    f'for schedule="{config.schedule}"',
                    remedy=f"set warmup_steps below {total_steps}",
                )
        self._schedule = config.schedule
        self._warmup = config.warmup_steps
        self._total = total_steps
        self._rule = config.lr_rule
        self._batch = config.first_batch

    def factor(self, step: int, global_batch: int | None = None) -> float:
        """The factor of the learning rate in step `step`, counted from 0, of `global_batch` samples."""
        return self._warmed(step) * self._shape(step) * self._batch_rule(global_batch)

    def _warmed(self, step: int) -> float:
        return (step + 1) / self._warmup if step < self._warmup else 1.0

    def _shape(self, step: int) -> float:
        if not isinstance(self._schedule, str):
            return self._own(step)
        if self._schedule == "constant" or self._total is None:
            return 1.0
        # A run that is asked for more steps than it has stays at the end.
        done = min(max(step - self._warmup, 0), self._total - self._warmup) / (self._total - self._warmup)
        if self._schedule == "linear":
            return 1.0 - done
        return round(0.5 * (1.0 + math.cos(math.pi * done)), _DIGITS)

    def _own(self, step: int) -> float:
        assert not isinstance(self._schedule, str)
        factor = self._schedule(step)
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise UsageError(
                f"the schedule returned {factor!r} for step {step}; a factor is a plain number",
                remedy="return a float: the factor of the optimizer's learning rate",
            )
        if not (math.isfinite(factor) and factor >= 0.0):
            raise UsageError(
                f"the schedule returned {factor!r} for step {step}; a factor is finite and not negative",
                remedy="return 0.0 or more for every step of the run",
            )
        return float(factor)

    def _batch_rule(self, global_batch: int | None) -> float:
        if global_batch is None or self._rule == "none" or global_batch == self._batch:
            return 1.0
        ratio = global_batch / self._batch
        return ratio if self._rule == "linear" else math.sqrt(ratio)
