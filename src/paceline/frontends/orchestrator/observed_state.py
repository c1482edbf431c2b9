"""Observable state of a training: workers, shards with their checksums, metrics and versions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, final

import numpy as np
import torch
import xxhash
from torch import Tensor

from paceline.core import events
from paceline.core.errors import PlatformError
from paceline.data.arrays import ArraySource

_CHUNK_BYTES = 1 << 20


class WorkerState(Enum):
    """State of a worker, according to the run's journal."""

    CREATED = "created"  # only a number so far
    IDLE = "idle"  # can be started at once
    STARTING = "starting"
    TRAINING = "training"
    FAILED = "failed"  # gone; a replacement may be on its way
    STOPPED = "stopped"  # the run is over


@final
@dataclass(frozen=True)
class WorkerNode:
    """One slot of the job. A replacement takes the slot of the worker that was lost, with another pid.

    last_heartbeat  seconds since 1970 of its last heartbeat; 0: none yet
    failures        how many processes of this slot were lost
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
class DataShard:
    """Slice of every step that one worker computes, and a part of the data with its checksum.

    range     the numbers of these samples; a step takes its samples from all of the data
    checksum  XXH3 over these samples as they were at the start; None where data is made while it is read
    owner     the worker that computes this shard of every step; None: none at the moment
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
@dataclass(frozen=True, kw_only=True)
class TrainingMetrics(events.StepCommitted):
    """A committed step as the journal has it, and the number of workers that took part in it."""

    workers: int

    @property
    def values(self) -> dict[str, float]:
        """The metrics of the objective, and those of asynchronous SGD."""
        return self.metrics


ModelVersion: TypeAlias = events.CheckpointSaved
"""A durable checkpoint as the journal has it; `stall` is how long training stood still for it."""


def checksum(source: Any, samples: range) -> str | None:
    """Return the XXH3 of these samples of data in memory (tensors, arrays, mapped files).

    None for data that is made while it is read: reading it twice may give two answers. Works in chunks, so
    that the thread that does it releases the interpreter often.
    """
    if not isinstance(source, ArraySource):
        return None
    digest = xxhash.xxh3_64()
    for column in source.columns:
        rows = column[samples.start : samples.stop]
        if isinstance(rows, Tensor):
            if rows.layout is not torch.strided or rows.is_quantized:
                return None
            rows = rows.detach().cpu().resolve_conj().resolve_neg()
            if rows.dtype is torch.bfloat16:
                rows = rows.view(torch.int16)
            rows = rows.numpy()
        array = np.asarray(rows)
        if array.dtype.hasobject:
            return None
        digest.update(f"{array.dtype.str}{array.shape[1:]}".encode())
        each = max(1, array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64)))
        step = max(1, _CHUNK_BYTES // each)
        for start in range(0, len(array), step):
            digest.update(np.ascontiguousarray(array[start : start + step]).view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def verify(source: Any, shard: DataShard) -> bool:
    """Compare a shard with its checksum; False if it has none. PlatformError if its samples changed."""
    if shard.checksum is None:
        return False
    found, samples = checksum(source, shard.range), shard.range
    if found != shard.checksum:
        raise PlatformError(
            f"shard {shard.index}, samples {samples.start} to {samples.stop - 1}, changed while it was "
            f"trained on: its checksum is {found} and was {shard.checksum}",
            remedy="do not write to the data during training; if none was written, suspect memory or disk",
            shard=shard.index,
        )
    return True
