"""`nn.SyncBatchNorm` through the front doors that start workers: the same bits, also after a kill."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.frontends import overrides
from paceline.frontends.ddp_trainer.ddp_trainer import PyTorchDDPTrainer
from paceline.frontends.orchestrator.orchestrator import DistributedTrainingOrchestrator
from paceline.frontends.orchestrator.orchestrator_config import TrainingConfig

X = torch.randn(50, 5, generator=torch.Generator().manual_seed(0))
DATA = X, X.sum(1, keepdim=True).sin()
QUIET: dict[str, Any] = {"threads": 1, "device": "cpu", "progress": False, "seed": 3}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.SyncBatchNorm(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def trained(folder: Path, workers: int, chaos: str | None = None, **given: Any) -> str:
    care = paceline.FaultTolerance(chaos=chaos, backoff=0.01)
    config = paceline.TrainConfig(
        workers=workers,
        shards=4,
        global_batch=12,
        run_dir=str(folder),
        fault_tolerance=care,
        **QUIET,
        **given,
    )
    return paceline.Trainer(build, nn.MSELoss(), optimizer=sgd, config=config).fit(DATA).state_hash


@pytest.mark.parametrize("phase", ["data", "forward", "collective", "backward", "optimizer"])
def test_a_kill_in_any_phase_leaves_no_trace(tmp_path: Path, phase: str) -> None:
    expected = trained(tmp_path / "alone", 1, epochs=3)
    assert trained(tmp_path / "killed", 3, f"kill rank=1 step=7 phase={phase}", epochs=3) == expected


def test_a_run_continues_on_another_number_of_workers(tmp_path: Path) -> None:
    expected = trained(tmp_path / "alone", 1, epochs=3)
    trained(tmp_path / "run", 2, max_steps=6)
    assert trained(tmp_path / "run", 4, epochs=3, resume="auto") == expected


def test_counts_per_gpu() -> None:
    """Accumulation steps make up for the GPU that is not there: 4 slices of a batch either way."""
    found = set()
    for gpus in (1, 2):
        trainer = PyTorchDDPTrainer(
            build,
            num_gpus=gpus,
            batch_size=3,
            gradient_accumulation_steps=4 // gpus,
            epochs=2,
            optimizer=sgd,
            loss_fn=nn.MSELoss(),
        )
        with overrides.in_force(overrides.Overrides(options=QUIET)):
            found.add(trainer.fit(DATA).state_hash)
    assert len(found) == 1


def test_the_orchestrator(tmp_path: Path) -> None:
    async def train(workers: int) -> str:
        settings = TrainingConfig(
            batch_size=12 // workers,
            epochs=2,
            shards=4,
            seed=3,
            threads=1,
            run_dir=str(tmp_path / str(workers)),
        )
        async with DistributedTrainingOrchestrator(workers) as orchestrator:
            result = await orchestrator.train_distributed(
                settings, model=build, dataset=DATA, objective=nn.MSELoss(), optimizer=sgd
            )
        found: str = result["state_hash"]
        return found

    assert asyncio.run(train(1)) == asyncio.run(train(3))
