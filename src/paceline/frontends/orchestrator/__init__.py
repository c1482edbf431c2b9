"""`paceline.DistributedTrainingOrchestrator`: train from inside an event loop, and watch while it goes on.

    orchestrator    what users call; the only part that knows asyncio
    preparation     from what the user gave to a job that can be started
    job, async_job  the processes: synchronous training, asynchronous SGD
    tracker         the run's journal as workers, shards, metrics, versions

Importing it imports torch, so that no event loop waits for that later. Must not know the inside of training.
"""

from __future__ import annotations

from paceline.aggregate.async_sgd import Staleness
from paceline.aggregate.strategy import Aggregation
from paceline.frontends.orchestrator.config import AggregationStrategy, TrainingConfig, register_aggregation
from paceline.frontends.orchestrator.nodes import (
    DataShard,
    ModelVersion,
    TrainingMetrics,
    WorkerNode,
    WorkerState,
)
from paceline.frontends.orchestrator.orchestrator import DistributedTrainingOrchestrator

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
