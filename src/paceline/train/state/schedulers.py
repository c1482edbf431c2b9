"""Torch's learning rate schedulers: built over the optimizers of a run, stepped once an epoch or once a step
on every rank alike, and kept with the run's state.

A scheduler is a function of what it has counted and, for ReduceLROnPlateau, of evaluations, whose bits every
rank has. So all ranks step their own and nothing is exchanged. It is stepped where the position of the run
moves, in the commit of a step or in the duty that turns the epoch, and its state is exported with that
position: no checkpoint and no state transfer can hold the one without the other. See
docs/design/0027-torch-schedulers.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.core.errors import ConfigError, UsageError
from paceline.core.wording import counted, with_article
from paceline.train.settings.run_length import RunLength, told
from paceline.train.settings.train_config import TrainConfig
from paceline.train.state.optimizer_values import from_plain, is_tool, on_device, tensors_in, to_plain

SchedulerFactory = Callable[..., LRScheduler | Sequence[LRScheduler]]
GivenScheduler = SchedulerFactory | Sequence[SchedulerFactory | LRScheduler | None]
"""A function of the optimizer, or of the list of several; or one for each. Built already: in a session."""

_FUNCTIONS = ("lr_lambdas", "_scale_fn_custom")
_EXAMPLE = "scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)"


@final
class TorchSchedulers:
    """The schedulers of one run on one rank; there may be none."""

    def __init__(self, made: Sequence[LRScheduler], config: TrainConfig) -> None:
        self._made = list(made)
        self._by_step = config.scheduler_interval == "step"
        self._metric = config.scheduler_metric

    def __bool__(self) -> bool:
        return bool(self._made)

    @property
    def evaluates_epochs(self) -> bool:
        """Whether an evaluation is due at the end of each epoch for a scheduler's sake."""
        return not self._by_step and any(isinstance(one, ReduceLROnPlateau) for one in self._made)

    def after_step(self, step: int) -> None:
        """Count a step that changed the weights."""
        if self._by_step:
            self._step(step, None)

    def after_epoch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count an epoch that ended with this step; `metrics` are those of its evaluation."""
        if not self._by_step:
            self._step(step, None)
            self._step(step, metrics)

    def after_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count an evaluation between two steps: what a scheduler by step that watches a metric follows."""
        if self._by_step:
            self._step(step, metrics)

    def _step(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Step those that watch a metric with it, or, where it is None, all others."""
        for scheduler in self._made:
            watches = isinstance(scheduler, ReduceLROnPlateau)
            if watches is (metrics is None):
                continue
            # Torch warns where it has seen no optimizer step in this process: it may have resumed at the end
            # of an epoch, or all steps of the epoch were skipped.
            setattr(scheduler.optimizer, "_opt_called", True)  # noqa: B010 - not declared by torch
            arguments: list[Any] = [] if metrics is None else [self._watched(metrics)]
            try:
                scheduler.step(*arguments)
            except Exception as error:  # of the scheduler, or of a function that it was given
                raise UsageError(
                    f"{type(scheduler).__name__} cannot be stepped after step {step}: "
                    f"{str(error) or type(error).__name__}",
                    remedy="build it for as many steps or epochs as the run has; a function can ask for them "
                    "by name: lambda optimizer, total_steps: ...; a run that is resumed keeps the scheduler "
                    "that it began with",
                ) from error

    def _watched(self, metrics: Mapping[str, float]) -> float:
        if self._metric not in metrics:
            raise UsageError(
                f"scheduler_metric={self._metric!r}, and the evaluation has "
                f"{', '.join(sorted(metrics)) or 'no metrics'}",
                remedy="return the metric from the objective, or name one of those that are there",
            )
        return metrics[self._metric]

    # state

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the schedulers' state (rates that are tensors), by name; not copied."""
        return {
            path: tensor
            for number, scheduler in enumerate(self._made)
            for path, tensor in tensors_in(_state_of(scheduler), f"scheduler/{number}")
        }

    def plain_state(self) -> list[dict[str, Any]]:
        """Return what is not a tensor, scheduler by scheduler."""
        return [
            {
                "type": type(scheduler).__name__,
                "state": to_plain(_state_of(scheduler), f"scheduler/{number}", type(scheduler).__name__),
            }
            for number, scheduler in enumerate(self._made)
        ]

    def load(self, saved: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> None:
        """Load saved state; the optimizers' groups, with the rates, are loaded by themselves."""
        here, there = [type(one).__name__ for one in self._made], [one["type"] for one in saved]
        if here != there:
            raise UsageError(
                f"the checkpoint was written with {_kinds(there)}, this run has {_kinds(here)}",
                remedy="resume with the same scheduler, or start a new run from the exported weights",
            )
        for scheduler, one in zip(self._made, saved, strict=True):
            state = from_plain(one["state"], tensors.__getitem__)
            scheduler.load_state_dict(on_device(state, torch.device("cpu")))


def build(
    given: GivenScheduler | None,
    optimizers: Sequence[Optimizer],
    config: TrainConfig,
    length: RunLength,
    *,
    validation: bool,
) -> TorchSchedulers:
    """Return the schedulers of these optimizers, refused where they cannot work."""
    made = [] if given is None else _made(given, optimizers, length)
    for scheduler in made:
        _check(scheduler, optimizers, config, validation)
    return TorchSchedulers(made, config)


def _made(given: GivenScheduler, optimizers: Sequence[Optimizer], length: RunLength) -> list[Any]:
    if isinstance(given, Sequence):
        if len(given) != len(optimizers):
            raise UsageError(
                f"{counted(len(given), 'scheduler function')} for {counted(len(optimizers), 'optimizer')}",
                remedy="give one function for each optimizer, or None where its rate stays",
            )
        pairs = zip(given, optimizers, strict=True)
        parts = [_called(one, optimizer, length) for one, optimizer in pairs if one is not None]
    else:
        parts = [_called(given, optimizers[0] if len(optimizers) == 1 else list(optimizers), length)]
    return [one for part in parts for one in (part if isinstance(part, Sequence) else [part])]


def _called(function: Any, argument: Optimizer | list[Optimizer], length: RunLength) -> Any:
    if isinstance(function, LRScheduler):
        return function  # of a session, whose optimizer was there before
    return function(argument, **told(function, length, "scheduler"))


def _check(scheduler: Any, optimizers: Sequence[Optimizer], config: TrainConfig, validation: bool) -> None:
    if not isinstance(scheduler, LRScheduler):
        number = isinstance(scheduler, int | float)
        raise UsageError(
            f"the scheduler function returned {with_article(scheduler)}",
            remedy="a function from the step to a factor is TrainConfig(schedule=...)"
            if number
            else f"return a scheduler of torch.optim.lr_scheduler, or a list of them: {_EXAMPLE}",
        )
    kind = type(scheduler).__name__
    if not any(scheduler.optimizer is optimizer for optimizer in optimizers):
        raise UsageError(
            f"{kind} is the scheduler of another optimizer than the run's",
            remedy=f"build it over the optimizer that the function is called with: {_EXAMPLE}",
        )
    if not isinstance(scheduler, ReduceLROnPlateau):
        return
    if not validation:
        raise ConfigError(
            f"{kind} follows the {config.scheduler_metric} of evaluations, and there is no validation data",
            remedy="give fit(train, val) validation data, or use a scheduler that follows steps or epochs",
        )
    if config.scheduler_interval == "step" and config.evaluate_every is None:
        raise ConfigError(
            f'{kind} with scheduler_interval="step" is stepped after each evaluation between steps, and '
            "evaluate_every is not set",
            remedy='set evaluate_every, or scheduler_interval="epoch"',
            key="scheduler_interval",
        )


def _state_of(scheduler: LRScheduler) -> dict[str, Any]:
    return _without_tools(scheduler.state_dict())


def _without_tools(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a scheduler remembers. Functions and modules are its tools: every rank builds them anew."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if name == "_schedulers":  # of SequentialLR and ChainedScheduler: states again
            found[name] = [_without_tools(inner) for inner in value]
        elif name in _FUNCTIONS:
            # What loads these expects them, with None for a function that is not saved.
            found[name] = (
                [None if is_tool(one) else one for one in value] if isinstance(value, list) else None
            )
        elif not is_tool(value):
            found[name] = value
    return found


def _kinds(names: Sequence[str]) -> str:
    return ", ".join(names) or "no scheduler"
