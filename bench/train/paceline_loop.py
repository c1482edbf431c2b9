"""Paceline's Trainer on a workload, and clocks inside its main rank."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline
from bench.train.workload import SEED, Workload
from paceline.train.callbacks import Modifier, Observer, SavedCheckpoint
from paceline.train.history import History, StepRecord
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig


@dataclass(frozen=True)
class Clocked:
    """A finished run: when each step ended and what each checkpoint cost in the background."""

    ends: list[float]
    saves: list[dict[str, float]]
    history: History

    def seconds(self, first: int, last: int) -> float:
        """From the end of step `first` to the end of step `last`, counted from 1."""
        return self.ends[last - 1] - self.ends[first - 1]


class StepClock(Observer):
    """Notes when steps end and leaves it in a file, since the main rank is another process. For the CPU: on a
    GPU records arrive behind the steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ends: list[float] = []
        self.saves: list[dict[str, float]] = []

    def on_step(self, record: StepRecord) -> None:
        self.ends.append(time.perf_counter())

    def on_checkpoint(self, saved: SavedCheckpoint) -> None:
        self.saves.append({"step": saved.step, "seconds": saved.seconds, "bytes": saved.bytes})

    def on_end(self, history: History) -> None:
        self.path.write_text(json.dumps({"ends": self.ends, "saves": self.saves}))


class DeviceClock(Modifier):
    """Waits for the device and notes the time before certain forward passes, counted from 0, and so measures
    whole steps however far the host runs ahead. Changes no batch."""

    def __init__(self, path: Path, first: int, last: int) -> None:
        self.path = path
        self.first = first
        self.last = last
        self.passes = 0
        self.started = 0.0

    def change_batch(self, batch: Any) -> Any:
        if self.passes in (self.first, self.last):
            torch.cuda.synchronize()
            now = time.perf_counter()
            if self.passes == self.first:
                self.started = now
            else:
                self.path.write_text(json.dumps(now - self.started))
        self.passes += 1
        return batch


def train(work: Workload, workers: int, steps: int, every: int | None = None) -> Clocked:
    """A workload in exact mode with one shard a worker; with a checkpoint each `every` steps when given."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        clock = StepClock(Path(folder, "clock.json"))
        trainer = paceline.Trainer(
            work.model(),
            nn.CrossEntropyLoss(),
            optimizer=work.optimizer,
            config=_config(work, workers, steps, every, Path(folder, "run")),
            callbacks=[clock],
        )
        history = trainer.fit(work.data(workers))
        noted = json.loads(clock.path.read_text())
    return Clocked(noted["ends"], noted["saves"], history)


def _config(work: Workload, workers: int, steps: int, every: int | None, run_dir: Path) -> TrainConfig:
    return TrainConfig(
        workers=workers,
        shards=workers,  # what the peers compute: one pass per worker
        global_batch=work.batch * workers,
        max_steps=steps,
        seed=SEED,
        threads=1,
        device="cpu",
        progress=False,
        run_dir=str(run_dir),
        checkpoint=CheckpointConfig(
            enabled=every is not None, every_steps=every, every_epochs=None, at_end=False
        ),
    )


def seconds_a_step(work: Workload, workers: int, warmup: int, steps: int) -> float:
    return train(work, workers, warmup + steps).seconds(warmup, warmup + steps) / steps
