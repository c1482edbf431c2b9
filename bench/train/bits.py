"""Runs whose final bits are compared: three models, their data and settings, and one run of one of them.

`python -m bench.train.bits CASE ...` is a run in a process of its own, so that it can be killed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from bench.train import models
from paceline.train.history import History
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig

SEED = 7
GLOBAL_BATCH = 48
# 24 full batches and one of 5: fewer samples than shards, so some shards of an epoch's last step are empty.
SAMPLES = 24 * GLOBAL_BATCH + 5
EPOCHS = 3
STEPS = 25 * EPOCHS
# Not a divisor of any shard's size: the last forward pass of a shard is a short one.
MICRO_BATCH = 3


@dataclass(frozen=True)
class Case:
    """A model with its optimizer, data and settings."""

    name: str
    title: str
    build: Callable[[], nn.Module]
    objective: Any
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    data: Callable[[int], tuple[Tensor, Tensor]]
    shards: int
    settings: dict[str, Any] = field(default_factory=dict)


def vectors(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(samples, 20, generator=generator),
        torch.randint(5, (samples,), generator=generator),
    )


def images(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return (
        torch.randn(samples, 3, 12, 12, generator=generator),
        torch.randint(5, (samples,), generator=generator),
    )


def sentences(samples: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(61, (samples, 17), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = model(*batch)
    return loss


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=2e-3)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


CASES = {
    case.name: case
    for case in (
        Case(
            "mlp",
            "MLP, dropout, Adam",
            models.mlp_dropout,
            nn.CrossEntropyLoss(),
            adam,
            vectors,
            shards=6,
        ),
        Case(
            "resnet",
            "ResNet, BatchNorm, momentum",
            models.resnet_small,
            nn.CrossEntropyLoss(),
            momentum,
            images,
            shards=12,
        ),
        Case(
            "transformer",
            "transformer, tied weights, AdamW, bf16, clipping",
            models.gpt_small,
            next_token_loss,
            adamw,
            sentences,
            shards=6,
            settings={"precision": "bf16", "clip_norm": 1.0},
        ),
    )
}


def fit(case: Case, *, workers: int, run_dir: str, **settings: Any) -> History:
    """One run of a case; `settings` are further ones of TrainConfig."""
    torch.manual_seed(SEED)
    config = {
        "shards": case.shards,
        "global_batch": GLOBAL_BATCH,
        "epochs": EPOCHS,
        "seed": SEED,
        "threads": 1,
        "device": "cpu",
        "progress": False,
        "checkpoint": CheckpointConfig(enabled=False),
        **case.settings,
        **settings,
    }
    trainer = paceline.Trainer(
        case.build(),
        case.objective,
        optimizer=case.optimizer,
        config=TrainConfig(workers=workers, run_dir=run_dir, **config),
    )
    return trainer.fit(case.data(SAMPLES))


def saving(every_steps: int) -> CheckpointConfig:
    return CheckpointConfig(every_steps=every_steps, every_epochs=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--every", type=int, default=4, help="steps between two checkpoints")
    options = parser.parse_args()
    history = fit(
        CASES[options.case],
        workers=options.workers,
        run_dir=options.run_dir,
        micro_batch=options.micro_batch,
        checkpoint=saving(options.every),
    )
    print(history.state_hash)


if __name__ == "__main__":
    main()
