"""Names of the ways to spread training and to combine gradients; those to come are refused by name.

Imports no torch.
"""

from __future__ import annotations

from enum import Enum

from paceline.core.errors import UsageError
from paceline.core.wording import with_article


class TrainingStrategy(Enum):
    """What is spread over the ranks. DATA_PARALLEL is there; the others are to come."""

    DATA_PARALLEL = "data_parallel"
    MODEL_PARALLEL = "model_parallel"
    PARAMETER_SERVER = "parameter_server"
    DECENTRALIZED = "decentralized"
    FEDERATED = "federated"


class AggregationMethod(Enum):
    """How the gradients of the ranks become one. ASYNCHRONOUS is to come."""

    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS = "asynchronous"
    ELASTIC_AVERAGING = "elastic_averaging"


def check_strategy(strategy: object) -> TrainingStrategy:
    """Return the strategy if ranks can train by it; refuse any other by its name."""
    if not isinstance(strategy, TrainingStrategy):
        raise UsageError(
            f"the strategy is {with_article(strategy)}", remedy="pass TrainingStrategy.DATA_PARALLEL"
        )
    if strategy is not TrainingStrategy.DATA_PARALLEL:
        raise UsageError(
            f"TrainingStrategy.{strategy.name} is not there yet", remedy="use TrainingStrategy.DATA_PARALLEL"
        )
    return strategy


def check_method(method: object) -> AggregationMethod:
    """Return the method if gradients can be combined by it; refuse any other by its name."""
    if not isinstance(method, AggregationMethod):
        raise UsageError(
            f"the aggregation method is {with_article(method)}", remedy="pass AggregationMethod.SYNCHRONOUS"
        )
    if method is AggregationMethod.ASYNCHRONOUS:
        raise UsageError(
            "AggregationMethod.ASYNCHRONOUS is not there yet for the ranks of a context",
            remedy="use SYNCHRONOUS, or asynchronous SGD of DistributedTrainingOrchestrator "
            "(AggregationStrategy.ASYNC_SGD)",
        )
    return method
