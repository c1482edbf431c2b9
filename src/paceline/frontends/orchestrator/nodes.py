"""What can be looked at while it trains: workers and shards, as frozen values.

Must not know where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import final


class WorkerState(Enum):
    """What a worker is doing, as far as the run's journal tells."""

    CREATED = "created"  # only a number so far
    IDLE = "idle"  # can be started at once
    STARTING = "starting"
    TRAINING = "training"
    FAILED = "failed"  # gone; a replacement may be on its way
    STOPPED = "stopped"  # the run is over


@final
@dataclass(frozen=True)
class WorkerNode:
    """One seat of the job. A replacement takes the seat of the worker that was lost, with another pid.

    last_heartbeat  seconds since 1970 at which it was last heard; 0: never
    failures        how often a process in this seat was lost
    shards          numbers of the shards that it computes
    speed           samples per second that it computes, a running mean; 0 until it is known
    """

    id: int
    state: WorkerState = WorkerState.CREATED
    host: str = ""
    pid: int | None = None
    last_heartbeat: float = 0.0
    failures: int = 0
    shards: tuple[int, ...] = ()
    speed: float = 0.0


@final
@dataclass(frozen=True)
class Pulse:
    """What the supervisor knows of the process `pid` in the seat of `worker`.

    heard          seconds since 1970
    shard_seconds  a running mean of its time per shard, without what it waits for others; 0: none yet
    """

    worker: int
    pid: int
    heard: float
    shard_seconds: float


@final
@dataclass(frozen=True)
class DataShard:
    """A part of the data that one worker answers for.

    range     the numbers of its samples
    checksum  XXH3 over these samples as they were at the start; None where data is made while it is read
    owner     the worker that computes this shard of every step; None: nobody right now
    moves     how often it went to another worker
    verified  how often the samples were compared with the checksum
    """

    index: int
    range: range
    checksum: str | None = None
    owner: int | None = None
    moves: int = 0
    verified: int = 0

    def __len__(self) -> int:
        return len(self.range)


@final
@dataclass(frozen=True)
class TrainingMetrics:
    """One committed step; `samples` are those of the step, `workers` those that took part."""

    step: int
    epoch: int
    loss: float
    samples: int
    seconds: float
    workers: int
    learning_rate: float = 0.0
    values: dict[str, float] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class ModelVersion:
    """A checkpoint that is durable: `stall` is how long training stood still for it."""

    version: int
    step: int
    bytes: int
    stall: float
    seconds: float
