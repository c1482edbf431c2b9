"""Paceline's Trainer on a workload, in a process of its own: `python -m bench.recovery.supervised_run JSON`.

What is measured is read from the run's journal, from outside. At the end the process leaves the final hash
beside the run's folder, also when it was asked to stop.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from bench.recovery import workload
from bench.train import models
from paceline.core import journal
from paceline.monitor.audit import audit
from paceline.train.settings.fault_tolerance import FaultTolerance
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig
from paceline.train.state.model_state import state_hash
from paceline.train.stop_signals import STOPPED_EXIT_CODE, Stopped

TINY_BATCH = 4
# Doubled with every failure of a rank, this is still nothing: faults that come from outside, one after
# another, are no sign of a worker that cannot live.
NO_BACKOFF = 1e-20


@dataclass(frozen=True)
class RunSettings:
    """One run. `tiny` is a model that costs next to nothing, for many workers."""

    run_dir: str
    steps: int
    workers: int = workload.WORKERS
    shards: int | None = None
    tiny: bool = False
    supervised: bool = True
    checkpoint_every: int | None = None
    chaos: str | None = None
    audit_every: int = 0
    patience: float = 60.0
    backoff: float = 0.5
    checksums: bool | None = None
    resume: bool = False
    engine: dict[str, Any] | None = None

    @property
    def journal(self) -> Path:
        return Path(self.run_dir, "journal.jsonl")

    @property
    def final(self) -> Path:
        return Path(self.run_dir).with_suffix(".final.json")

    def command(self) -> list[str]:
        """What runs it."""
        return [
            sys.executable,
            "-m",
            "bench.recovery.supervised_run",
            json.dumps(dataclasses.asdict(self)),
        ]

    def final_hash(self) -> str | None:
        return str(json.loads(self.final.read_text())["hash"]) if self.final.exists() else None

    def unproved(self) -> tuple[str, ...]:
        """What `paceline audit` finds wrong: nothing where each step and each sample counted once."""
        return audit(journal.iterate(self.journal)).wrong


def build_tiny() -> nn.Module:
    torch.manual_seed(workload.SEED)
    return models.mlp(20, (32,), 5)


def tiny_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def tiny_data(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(workload.SEED)
    return torch.randn(samples, 20, generator=generator), torch.randint(5, (samples,), generator=generator)


def config_of(settings: RunSettings) -> TrainConfig:
    shards = settings.shards or settings.workers
    every = settings.checkpoint_every
    return TrainConfig(
        workers=settings.workers,
        engine=settings.engine,
        shards=shards,
        global_batch=shards * TINY_BATCH if settings.tiny else workload.GLOBAL_BATCH,
        max_steps=settings.steps,
        seed=workload.SEED,
        threads=1,
        device="cpu",
        progress=False,
        audit_every=settings.audit_every,
        run_dir=settings.run_dir,
        resume="auto" if settings.resume else None,
        checkpoint=CheckpointConfig(
            enabled=every is not None, every_steps=every, every_epochs=None, at_end=False, keep_last=2
        ),
        fault_tolerance=FaultTolerance(
            enabled=settings.supervised,
            max_worker_failures=10_000,
            max_preemptions=10_000,
            patience=settings.patience,
            backoff=settings.backoff,
            checksums=settings.checksums,
            chaos=settings.chaos,
        ),
    )


def train(settings: RunSettings) -> int:
    """Runs it; the exit code says whether it came to its end (0) or was asked to stop (75)."""
    config = config_of(settings)
    trainer = paceline.Trainer(
        build_tiny if settings.tiny else workload.build_model,
        nn.CrossEntropyLoss(),
        optimizer=tiny_optimizer if settings.tiny else workload.build_optimizer,
        config=config,
    )
    data = tiny_data(40 * config.global_batch) if settings.tiny else workload.build_data()
    status = 0
    try:
        trainer.fit(data)
    except Stopped:
        status = STOPPED_EXIT_CODE
    model = trainer.model
    assert isinstance(model, nn.Module)
    settings.final.write_text(json.dumps({"hash": state_hash(model)}))
    return status


if __name__ == "__main__":
    sys.exit(train(RunSettings(**json.loads(sys.argv[1]))))
