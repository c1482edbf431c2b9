"""Metrics of a step as the manager's caller gets them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from paceline.train.loop.stepwise_run import StepResult


@final
@dataclass(frozen=True)
class StepMetrics:
    """What is known of a step, the same on every process but for the times.

    loss, accuracy         of all samples of the step; accuracy is None unless the targets are classes
    training_time          seconds of this call
    comm_time              of these, exchanging gradients, waiting for slower processes included
    compute_efficiency     the share of the time in forward, backward and the optimizer
    error_code             0, or DistributedTrainingManager.ERROR_PROCESS_FAILURE
    failed_process_rank    the rank that died; -1: none
    """

    loss: float = math.nan
    accuracy: float | None = None
    learning_rate: float = 0.0
    training_time: float = 0.0
    comm_time: float = 0.0
    compute_efficiency: float = 0.0
    error_code: int = 0
    failed_process_rank: int = -1

    @classmethod
    def of_step(cls, result: StepResult, seconds: float) -> StepMetrics:
        """Return the metrics of a step that was taken, in a call of `seconds`."""
        return cls(
            loss=result.loss,
            accuracy=result.metrics.get("accuracy"),
            learning_rate=result.learning_rate,
            training_time=seconds,
            comm_time=result.comm_time,
            compute_efficiency=result.compute_efficiency,
        )

    @classmethod
    def of_failure(cls, rank: int, code: int, seconds: float = 0.0) -> StepMetrics:
        """Return the metrics of a step that was undone, because the process of `rank` died."""
        return cls(training_time=seconds, error_code=code, failed_process_rank=rank)
