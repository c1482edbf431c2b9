"""Averages of the weights over the steps of a run, as modifiers: `EMA` and `SWA`.

Each rank holds the average and moves it after the update, from the same bits with the same arithmetic; it is
part of every checkpoint and of what a worker that joins receives. Averaged are the parameters that are
trained, 16-bit ones in fp32. **Buffers are not averaged**: the averaged model has those of the trained model,
and so the running statistics of BatchNorm belong to weights that are near the average, not to the average
itself (torch.optim.swa_utils.update_bn measures them anew).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.core.errors import ConfigError, UsageError
from paceline.train.callbacks import Modifier
from paceline.train.state.model_state import model_tensors
from paceline.train.step_info import StepInfo

_NARROW = (torch.float16, torch.bfloat16)


class WeightAverage(Modifier):
    """An average of the trained parameters; derived classes say when and how much a step counts.

    After `fit`, or after the loop of a session, `weights` are all tensors of the averaged model by name. With
    `evaluate=True` the evaluations of the run, and what follows from them (early stopping, the best version),
    are those of the average; the versions hold both.
    """

    def __init__(self, *, evaluate: bool = False) -> None:
        self.evaluate = evaluate
        self.count = 0  # how many times the average has moved
        self._average: dict[str, Tensor] = {}
        self._next = 0  # the step that comes next, in the run that the average is of
        self._weights: dict[str, Tensor] | None = None

    @abstractmethod
    def share(self, step: StepInfo) -> float | None:
        """Return how much the weights after this step count in the average, 0 to 1; None: not at all."""

    @torch.no_grad()
    def after_update(self, parameters: Mapping[str, Parameter], step: StepInfo) -> None:
        """Move the average towards the weights after this step."""
        if step.step < self._next:
            self.count, self._average = 0, {}  # another run begins with the same object
        self._next = step.step + 1
        share = self.share(step)
        if share is None:
            return
        self.count += 1
        fresh = {name: p for name, p in parameters.items() if name not in self._average}
        known = [(self._average[name], p) for name, p in parameters.items() if name not in fresh]
        if known:
            averages, now = [one for one, _ in known], [p.detach().to(one.dtype) for one, p in known]
            torch._foreach_lerp_(averages, now, share)
        for name, parameter in fresh.items():
            wide = torch.float32 if parameter.dtype in _NARROW else parameter.dtype
            self._average[name] = parameter.detach().to(wide, copy=True)

    def evaluation_weights(self) -> Mapping[str, Tensor] | None:
        """Return the average, where evaluations are to use it and it has begun."""
        return self._average if self.evaluate and self._average else None

    def finish(self, module: nn.Module) -> None:
        """Keep what `weights` returns: called at the end of a run, in its process."""
        averaged = {
            name: self._average.get(name, tensor).detach().to("cpu", tensor.dtype, copy=True)
            for name, tensor in model_tensors(module).items()
        }
        self._weights = averaged if self._average else None

    @property
    def weights(self) -> dict[str, Tensor]:
        """All tensors of the averaged model by name, on the CPU: parameters, and the model's own buffers."""
        if self._weights is None:
            raise UsageError(
                f"{type(self).__name__} has no average yet: {self._why_empty()}",
                remedy="give it to Trainer or session as callbacks=[...], and ask after the run",
            )
        return self._weights

    @weights.setter
    def weights(self, weights: dict[str, Tensor] | None) -> None:
        self._weights = weights

    def load_into(self, module: nn.Module) -> None:
        """Give a module of the same kind the averaged weights; one of another kind is refused and stays."""
        theirs, own = model_tensors(module), self.weights
        shapes, others = ({name: one.shape for name, one in item.items()} for item in (theirs, own))
        odd = sorted(name for name in {*shapes, *others} if shapes.get(name) != others.get(name))
        if odd:
            raise UsageError(
                f"the average is of another model than this {type(module).__name__}: "
                f"{', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''} differ",
                remedy="give a module with the parameters, buffers and shapes of the trained one",
            )
        with torch.no_grad():
            for name, tensor in theirs.items():
                tensor.copy_(own[name])

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "next": self._next, "average": self._average} if self._next else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self._next = int(state["count"]), int(state["next"])
        self._average = dict(state["average"])

    def __getstate__(self) -> dict[str, Any]:
        # What an earlier run has left does not travel to the workers of the next.
        return {**vars(self), "_weights": None}

    def _why_empty(self) -> str:
        return "no run with it has come to an end, or none of its steps changed the weights"


@final
class EMA(WeightAverage):
    """The exponential moving average of the weights: after every step it is `decay` times what it was, and
    1 - `decay` times the weights. It begins with the weights after the first step."""

    def __init__(self, decay: float = 0.999, *, evaluate: bool = False) -> None:
        super().__init__(evaluate=evaluate)
        if not isinstance(decay, int | float) or not 0.0 < decay < 1.0:
            raise ConfigError(
                f"EMA(decay={decay!r}): what stays of the average in a step is between 0 and 1",
                remedy="use 0.999, or 0.99 for a short run",
                key="decay",
            )
        self.decay = decay

    def share(self, step: StepInfo) -> float | None:
        return 1.0 - self.decay


@final
class SWA(WeightAverage):
    """Stochastic weight averaging: the mean of the weights after every `every` steps, from `start_step`, or
    the beginning of `start_epoch`, on. Left out, `every` is one epoch."""

    def __init__(
        self,
        *,
        start_step: int | None = None,
        start_epoch: int | None = None,
        every: int | None = None,
        evaluate: bool = False,
    ) -> None:
        super().__init__(evaluate=evaluate)
        if (start_step is None) == (start_epoch is None):
            raise ConfigError(
                f"SWA(start_step={start_step}, start_epoch={start_epoch}): give one of the two",
                remedy="give one of them, such as start_epoch=10",
                key="start_step",
            )
        for name, value, least in (
            ("start_step", start_step, 0),
            ("start_epoch", start_epoch, 0),
            ("every", every, 1),
        ):
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and value >= least):
                raise ConfigError(
                    f"SWA({name}={value!r}): it counts from {least}, in whole numbers",
                    remedy=f"give {least} or more",
                    key=name,
                )
        self.start_step, self.start_epoch, self.every = start_step, start_epoch, every

    def share(self, step: StepInfo) -> float | None:
        every = self.every if self.every is not None else self._epoch(step)
        start = (
            self.start_step if self.start_step is not None else (self.start_epoch or 0) * self._epoch(step)
        )
        done = step.step + 1 - start
        return 1.0 / (self.count + 1) if done > 0 and done % every == 0 else None

    def _epoch(self, step: StepInfo) -> int:
        if step.steps_per_epoch is None:
            raise UsageError(
                "SWA counts in epochs, and the steps of an epoch are not known (an iterable dataset, or a "
                "dynamic batch)",
                remedy="count in steps: SWA(start_step=..., every=...)",
            )
        return step.steps_per_epoch

    def _why_empty(self) -> str:
        begin = "start_step" if self.start_epoch is None else "start_epoch"
        return (
            f"{super()._why_empty()}, or it ended before {begin}={self.start_step or self.start_epoch or 0}"
        )


def averages_in(callbacks: Sequence[object]) -> list[WeightAverage]:
    return [item for item in callbacks if isinstance(item, WeightAverage)]


def finished(callbacks: Sequence[object], module: nn.Module) -> list[dict[str, Tensor] | None]:
    """End the averages of a run, on any rank; return the weights of each."""
    found = averages_in(callbacks)
    for average in found:
        average.finish(module)
    return [average._weights for average in found]


@contextmanager
def evaluated_with(
    parameters: Mapping[str, Parameter], weights: Mapping[str, Tensor] | None
) -> Iterator[None]:
    """Give the parameters other weights for the time of an evaluation; their own come back bit by bit."""
    if weights is None:
        yield
        return
    own = {name: parameters[name].detach().clone() for name in weights}
    try:
        _put(parameters, weights)
        yield
    finally:
        _put(parameters, own)


@torch.no_grad()
def _put(parameters: Mapping[str, Parameter], weights: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        parameters[name].copy_(weight)
