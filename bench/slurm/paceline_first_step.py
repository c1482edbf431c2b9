"""The same training with Paceline: five steps of 64 samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import paceline

STEPS = 5


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-2)


if __name__ == "__main__":
    data = torch.randn(320, 64), torch.randint(0, 10, (320,))
    config = paceline.TrainConfig(global_batch=64, max_steps=STEPS, threads=1, device="cpu", progress=False)
    paceline.Trainer(build, nn.CrossEntropyLoss(), optimizer=adam, config=config).fit(data)
