"""The course of a run: how many steps it has, the learning rate as a pure function of the step and the global
batch, and when a metric that does not improve ends it.

    learning rate = the optimizer's own  x  warmup(step)  x  shape(step)  x  rule(batch / first batch)

Steps count from 0 here. Warmup is (step + 1) / warmup_steps until it reaches 1. A shape that needs an end
goes down over the steps after warmup, p = (step - warmup_steps) / (total_steps - warmup_steps): linear is
1 - p, cosine is (1 + cos(pi p)) / 2, so that the last step still learns something. The rule compensates a
dynamic batch that has grown: the optimizer's learning rate is meant for the batch that it starts with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from paceline.core.errors import UsageError
from paceline.core.wording import counted
from paceline.train.settings.learning_rate_scaling import scaling_factor
from paceline.train.settings.run_length import RunLength, told
from paceline.train.settings.train_config import EarlyStopping, TrainConfig

# The mathematics library may differ in the last bit from machine to machine; the learning rate must not.
_DIGITS = 12


def steps_per_epoch(samples: int, global_batch: int, *, drop_last: bool) -> int:
    """Return the steps of one pass: a short last batch is a step too unless it is dropped."""
    return samples // global_batch if drop_last else -(-samples // global_batch)


def steps_of_epoch(config: TrainConfig, samples: int) -> int:
    """Return the steps of one pass under these settings, whose batch is fixed."""
    steps = steps_per_epoch(samples, config.global_batch, drop_last=config.drop_last)
    return steps if config.limit_batches is None else min(steps, config.limit_batches)


def total_steps(config: TrainConfig, samples: int | None) -> int | None:
    """Return the steps of the whole run, whichever of `epochs` and `max_steps` ends it first; None if that
    cannot be known.

    Under a dynamic batch the steps of an epoch depend on the noise that will be measured.
    """
    epochs = 1 if config.epochs is None and config.max_steps is None else config.epochs
    if samples is None or config.dynamic_batch is not None or epochs is None:
        # With an unknown size the epochs may end the run before max_steps does.
        return config.max_steps if epochs is None or config.max_steps is not None else None
    steps = epochs * steps_of_epoch(config, samples)
    return steps if config.max_steps is None else min(steps, config.max_steps)


def run_length(config: TrainConfig, samples: int | None) -> RunLength:
    """Return how long the run is, as far as that is known."""
    steps = None if samples is None or config.dynamic_batch is not None else steps_of_epoch(config, samples)
    total, epochs = total_steps(config, samples), config.epochs
    if epochs is None:
        epochs = 1 if config.max_steps is None else -(-config.max_steps // steps) if steps else None
    return RunLength(steps, total, epochs)


@final
class Schedule:
    """The factor for each step of one run, whose settings go together (conflicts.py)."""

    def __init__(self, config: TrainConfig, length: RunLength) -> None:
        self._schedule = config.schedule
        self._told = {} if isinstance(self._schedule, str) else told(self._schedule, length, "schedule")
        self._warmup = config.warmup_steps
        self._total = total_steps = length.total_steps
        self._rule = config.lr_rule
        self._batch = config.first_batch
        # conflicts.py refuses these with the arithmetic, before anything is built.
        assert config.schedule not in ("linear", "cosine") or (total_steps or 0) > self._warmup

    def factor(self, step: int, global_batch: int | None = None) -> float:
        """Return the learning rate's factor in step `step`, counted from 0, of `global_batch` samples."""
        warmed = (step + 1) / self._warmup if step < self._warmup else 1.0
        ratio = 1.0 if global_batch is None else global_batch / self._batch
        return warmed * self._shape(step) * scaling_factor(self._rule, ratio)

    def _shape(self, step: int) -> float:
        if not isinstance(self._schedule, str):
            return _checked(self._called(step), step)
        if self._schedule == "constant" or self._total is None:
            return 1.0
        # A run that is asked for more steps than it has stays at the end.
        done = min(max(step - self._warmup, 0), self._total - self._warmup) / (self._total - self._warmup)
        if self._schedule == "linear":
            return 1.0 - done
        return round(0.5 * (1.0 + math.cos(math.pi * done)), _DIGITS)

    def _called(self, step: int) -> object:
        assert not isinstance(self._schedule, str)
        try:
            return self._schedule(step, **self._told)
        except TypeError as error:
            if "is not an Optimizer" not in str(error):
                raise
            raise UsageError(
                f"the schedule builds a torch scheduler, and is called with the number of the step: {error}",
                remedy="give the function to the Trainer or the session: scheduler=lambda optimizer: ...",
            ) from error


def _checked(factor: object, step: int) -> float:
    """Refuse what a user-defined schedule must not return."""
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


@final
class EarlyStopper:
    """Gives up where a metric has not become better for some evaluations in a row. Fed with global metrics
    only, so every rank comes to the same end."""

    def __init__(self, settings: EarlyStopping) -> None:
        self._settings = settings
        self._best: float | None = None
        self._waited = 0
        self.restores = settings.restore_best

    def check(self, metrics: Mapping[str, float]) -> None:
        """Refuse an evaluation without the metric that is watched."""
        if self._settings.metric not in metrics:
            raise UsageError(
                f"early_stopping watches {self._settings.metric!r}, and the evaluation has "
                f"{', '.join(sorted(metrics)) or 'no metrics'}",
                remedy="return the metric from the objective, or watch one of those that are there",
            )

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """Count one evaluation and return the reason to stop, or None. NaN is never an improvement."""
        settings = self._settings
        self.check(metrics)
        value, best = metrics[settings.metric], self._best
        if self.improves(metrics):
            self._best, self._waited = value, 0
            return None
        self._waited += 1
        if self._waited < settings.patience:
            return None
        known = "a number" if best is None else f"{best:.6g}"
        return (
            f"early stopping: {settings.metric} was not better than {known} "
            f"in {counted(self._waited, 'evaluation')}"
        )

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Return whether an evaluation is better than all that were observed, by more than `min_delta`."""
        settings, best = self._settings, self._best
        value = metrics.get(settings.metric, math.nan)
        gain = math.inf if best is None else best - value if settings.mode == "min" else value - best
        return not math.isnan(value) and gain > settings.min_delta

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = None if state["best"] is None else float(state["best"])
        self._waited = int(state["waited"])
