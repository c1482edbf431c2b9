"""Measure how training scales with workers: a small built-in model, the same global batch for every number
of workers, steps after the warm-up. `paceline bench scaling` prints it.

Efficiency is the speed of n workers over n times that of the smallest number measured, divided by it; a
worker more than there are cores cannot help, and is counted all the same.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import nn

from paceline.frontends.trainer import Trainer
from paceline.train.settings.fault_tolerance import FaultTolerance
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig

_FEATURES, _HIDDEN, _CLASSES = 256, 1024, 10
_WARM_UP = 5


@final
@dataclass(frozen=True)
class ScalingRow:
    """One number of workers. `efficiency`: 1.0 where twice the workers are twice as fast."""

    workers: int
    samples_per_second: float
    step_seconds: float
    efficiency: float


def measure_scaling(
    workers: Sequence[int], *, steps: int = 30, batch: int = 256, rounds: int = 2
) -> list[ScalingRow]:
    """Train with each number of workers, in turns, and compare the medians of the best round of each."""
    counts = sorted({*workers})
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in counts:
            times[count].append(_median_step(count, max(counts), steps, batch))
    base = counts[0]
    speed = {count: batch / min(times[count]) for count in counts}
    return [
        ScalingRow(
            workers=count,
            samples_per_second=speed[count],
            step_seconds=min(times[count]),
            efficiency=speed[count] / speed[base] / (count / base),
        )
        for count in counts
    ]


def _median_step(workers: int, most: int, steps: int, batch: int) -> float:
    """Return the seconds of the median step. Shards are as many as the most workers: all compute alike."""
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(batch * 4, _FEATURES, generator=generator),
        torch.randint(0, _CLASSES, (batch * 4,), generator=generator),
    )
    with tempfile.TemporaryDirectory(prefix="paceline-scaling-") as folder:
        config = TrainConfig(
            workers=workers,
            shards=most,
            threads=1,
            global_batch=batch,
            max_steps=steps + _WARM_UP,
            run_dir=str(Path(folder) / "run"),
            progress=False,
            checkpoint=CheckpointConfig(enabled=False),
            fault_tolerance=FaultTolerance(),
        )
        history = Trainer(
            _model,
            nn.CrossEntropyLoss(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01),
            config=config,
        ).fit(data)
    return statistics.median(record.seconds for record in history.steps[_WARM_UP:])


def _model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(_FEATURES, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, _CLASSES),
    )
