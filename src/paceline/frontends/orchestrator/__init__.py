"""`paceline.DistributedTrainingOrchestrator`: train from inside an event loop, and observe the training.

    orchestrator         what users call; the only part that knows asyncio
    orchestrator_config  its settings
    job_preparation      from the user's arguments to a job that can be started
    sync_job             the processes of synchronous training (aggregate/async_sgd has those of ASYNC_SGD)
    run_tracker          the run's journal as workers, shards, metrics and versions; results as plain dicts
    observed_state       these workers, shards, metrics and versions, and the shards' checksums
    synthetic_task       a model and a task of given sizes

Importing it imports torch, so that no event loop waits for that later.
"""

from __future__ import annotations

from paceline.aggregate.async_sgd.staleness import Staleness
from paceline.frontends.orchestrator.observed_state import (
    DataShard,
    ModelVersion,
    TrainingMetrics,
    WorkerNode,
    WorkerState,
)
from paceline.frontends.orchestrator.orchestrator import DistributedTrainingOrchestrator
from paceline.frontends.orchestrator.orchestrator_config import (
    AggregationStrategy,
    TrainingConfig,
    register_aggregation,
)
from paceline.train.step.aggregation_registry import Aggregation

__all__ = [
    "Aggregation",
    "AggregationStrategy",
    "DataShard",
    "DistributedTrainingOrchestrator",
    "ModelVersion",
    "Staleness",
    "TrainingConfig",
    "TrainingMetrics",
    "WorkerNode",
    "WorkerState",
    "register_aggregation",
]
