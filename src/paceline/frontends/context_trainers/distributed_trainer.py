"""`DistributedTrainer`: the base of trainers whose ranks each bring their part of the data."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from numbers import Real
from typing import Any

from torch import Tensor

from paceline.comm.context import DistributedContext
from paceline.comm.ops import ReduceOp
from paceline.core.errors import UsageError
from paceline.core.wording import with_article
from paceline.frontends.context_trainers.strategies import (
    AggregationMethod,
    TrainingStrategy,
    check_method,
    check_strategy,
)

EpochCallback = Callable[[int, float], object]


class DistributedTrainer(ABC):
    """Trains one model on all ranks of a context; the ranks call the same methods in the same order.

    A subclass trains (`train_epoch`) and gives its parameters as one flat vector; exchanging, aggregating and
    callbacks are here.
    """

    def __init__(
        self, context: DistributedContext, strategy: TrainingStrategy = TrainingStrategy.DATA_PARALLEL
    ) -> None:
        if not isinstance(context, DistributedContext):
            raise UsageError(
                f"the context of a trainer is {with_article(context)}",
                remedy="pass the DistributedContext of this rank, as paceline.spawn does",
            )
        self.context = context
        self.strategy = check_strategy(strategy)
        self.mixed_precision = False
        self.loss_scale: float | None = None
        self._callbacks: list[EpochCallback] = []

    @abstractmethod
    def train_epoch(self, local_data: Any, local_labels: Any) -> float:
        """Train one pass over the data of all ranks, of which this rank passes its part; return the mean loss
        over all of them."""

    @abstractmethod
    def get_parameters(self) -> Tensor:
        """Return all parameters as one flat vector, the same on every rank."""

    @abstractmethod
    def set_parameters(self, parameters: Any) -> None:
        """Replace all parameters by those of a flat vector."""

    @abstractmethod
    def predict(self, data: Any) -> Any:
        """Return the model's outputs for a row or rows, in the kind that was passed."""

    def synchronize_model(self, root_rank: int = 0) -> None:
        """Give every rank the root's parameters."""
        own = self.get_parameters()
        copied = own.detach().clone() if isinstance(own, Tensor) else copy.deepcopy(own)
        self.set_parameters(self.context.broadcast(copied, root_rank))

    def aggregate_gradients(
        self,
        local_gradient: Any,
        method: AggregationMethod = AggregationMethod.SYNCHRONOUS,
        alpha: float = 0.5,
    ) -> Any:
        """Return the gradient that this rank applies, in the kind that was passed.

        SYNCHRONOUS: the average over all ranks. ELASTIC_AVERAGING: `alpha` x this rank's + (1 - `alpha`) x
        the average, so that ranks may differ.
        """
        check_method(method)
        own_weight = _number(alpha)
        if not 0.0 <= own_weight <= 1.0:
            raise UsageError(
                f"alpha={alpha!r} is not between 0 and 1", remedy="it is the weight of this rank's gradient"
            )
        average = self.context.all_reduce(local_gradient, ReduceOp.AVERAGE)
        if method is AggregationMethod.SYNCHRONOUS:
            return average
        if not isinstance(local_gradient, list | tuple):
            return own_weight * local_gradient + (1.0 - own_weight) * average
        return type(average)(
            own_weight * own + (1.0 - own_weight) * other
            for own, other in zip(local_gradient, average, strict=True)
        )

    def register_callback(self, callback: EpochCallback) -> None:
        """Call `callback(epoch, loss)` on this rank after each epoch, counted from 1. What it raises ends the
        call of `train_epoch`; the epoch is done."""
        if not callable(callback):
            raise UsageError(
                f"the callback is {with_article(callback)}", remedy="pass a function of (epoch, loss)"
            )
        self._callbacks.append(callback)

    def set_mixed_precision(self, enabled: bool = True) -> None:
        """Compute forward and backward passes in half precision: bf16, or fp16 with `set_loss_scaling`."""
        if not isinstance(enabled, bool):
            raise UsageError(f"mixed precision of {enabled!r}", remedy="pass True or False")
        self.mixed_precision = enabled

    def set_loss_scaling(self, scale: float | None) -> None:
        """Scale the loss of mixed precision by this, dynamically from there on, and use fp16; None: bf16."""
        self.loss_scale = None if scale is None else positive_number("the loss scale", scale)

    def notify_callbacks(self, epoch: int, loss: float) -> None:
        """Call what `register_callback` got; `train_epoch` of a subclass does so at its end."""
        for callback in self._callbacks:
            callback(epoch, loss)


def positive_number(name: str, value: object) -> float:
    """Return a finite number above 0 that a user passed, NumPy's included; refuse any other by its name."""
    number = _number(value)
    if not 0.0 < number < math.inf:
        raise UsageError(f"{name}={value!r}", remedy="pass a positive number")
    return number


def _number(value: object) -> float:
    """Return a real number as a float; NaN for what is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    return float(value)
