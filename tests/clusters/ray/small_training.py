"""The training of the tests of RayTrainer; imports no Ray, whose warnings are errors in tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import paceline

SETTINGS = {"lr": 0.05, "batch_size": 24, "epochs": 3, "hidden": 8, "seed": 5, "threads": 1, "device": "cpu"}


def build(config: dict[str, Any]) -> nn.Module:
    return nn.Sequential(nn.Linear(6, config["hidden"]), nn.ReLU(), nn.Linear(config["hidden"], 3))


def data(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randn(count, 6, generator=generator)
    return samples, samples[:, :3].argmax(1)


def one_process(lr: float) -> paceline.History:
    """Train without Ray."""
    trainer = paceline.Trainer(
        lambda: build(SETTINGS),
        nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr),
        config=paceline.TrainConfig(
            global_batch=24, epochs=3, seed=5, threads=1, device="cpu", run_dir=False, progress=False
        ),
    )
    return trainer.fit(data(0, 96), data(1, 48))
