"""A model and data for sessions, and a loop over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.one_thread import one_thread as one_thread
from torch import nn
from torch.nn import functional as F

import paceline

X = torch.randn(29, 5, generator=torch.Generator().manual_seed(0))

Y = torch.sin(X[:, :2])


def config(**given: Any) -> paceline.TrainConfig:
    defaults: dict[str, Any] = {
        "shards": 4,
        "global_batch": 12,
        "epochs": 2,
        "micro_batch": 2,
        "threads": 1,
        "progress": False,
        "seed": 5,
        "checkpoint": paceline.CheckpointConfig(every_epochs=None),
    }
    return paceline.TrainConfig(**{**defaults, **given})


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.25), nn.Linear(16, 2))


def own_loop(folder: Path, **given: Any) -> tuple[nn.Module, Any]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with paceline.session(model, optimizer, config(run_dir=folder, **given)) as run:
        for micro in run.microbatches((X, Y)):
            run.backward(F.mse_loss(model(micro.x), micro.y), {"count": micro.count})
    return model, run.history
