"""The run of the contract, as a program: the caller's process on an engine.

    python -m paceline.testing.engine_contract.run FOLDER GATE ENGINE [resume]

ENGINE is a file with the pickled settings, written by the test, or `-` for one process without an engine.
Steps are slow until the file GATE is there, so that a test has time for what it does; prints the hash.
"""

from __future__ import annotations

import dataclasses
import pickle
import sys
import time
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import nn

from paceline.frontends.trainer import Trainer
from paceline.testing.gauntlet import models
from paceline.train.callbacks import Modifier
from paceline.train.settings.train_config import CheckpointConfig, FaultTolerance, TrainConfig

STEPS: Final = 120
_PAUSE_SECONDS: Final = 0.5


@final
class Unhurried(Modifier):
    """Every step takes a while until a file is there."""

    def __init__(self, gate: Path) -> None:
        self._gate = gate
        self._open = False

    def change_gradients(self, parameters: Any) -> None:
        limit = time.monotonic() + _PAUSE_SECONDS
        while not self._open and time.monotonic() < limit:
            self._open = self._gate.exists()
            time.sleep(0.005)


def config_of(folder: Path) -> TrainConfig:
    """Return the settings of the run, without an engine."""
    return TrainConfig(
        shards=8,
        threads=1,
        global_batch=24,
        max_steps=STEPS,
        seed=11,
        device="cpu",
        progress=False,
        run_dir=str(folder),
        audit_every=20,
        checkpoint=CheckpointConfig(every_steps=10),
        fault_tolerance=FaultTolerance(stragglers="wait"),
    )


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(models.SAMPLES, models.FEATURES, generator=generator)
    return samples, torch.randint(0, models.CLASSES, (models.SAMPLES,), generator=generator)


def fit(config: TrainConfig, gate: Path) -> str:
    """Train, and return the hash of the weights."""
    trainer = Trainer(
        models.with_batch_norm,
        nn.CrossEntropyLoss(),
        optimizer=_adam,
        config=config,
        callbacks=[Unhurried(gate)],
    )
    return str(trainer.fit(data()).state_hash)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-2)


def main(folder: str, gate: str, engine: str, resume: str = "") -> None:
    config = config_of(Path(folder))
    if engine != "-":
        config = dataclasses.replace(config, engine=pickle.loads(Path(engine).read_bytes()))
    else:
        config = dataclasses.replace(config, fault_tolerance=FaultTolerance(enabled=False))
    if resume:
        config = dataclasses.replace(config, resume=resume)
    print(f"hash {fit(config, Path(gate))}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
