"""What statistics over the global batch cost: a step with nn.SyncBatchNorm against one with BatchNorm.

Interleaved, one thread per worker, 4 shards, medians of the steps of several runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from bench.report import Report, main

ROUNDS = 5
WARMUP = 5
STEPS = 25
BATCH = 64


def mlp(norm: Callable[[int], nn.Module]) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(64, 128), norm(128), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(128, 128), norm(128), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def conv(norm: Callable[[int], nn.Module]) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), norm(after), nn.ReLU()]
        if before != after:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10))


CASES: dict[str, tuple[Callable[[Callable[[int], nn.Module]], nn.Module], tuple[int, ...], Any]] = {
    "MLP, 4 layers of norm": (mlp, (64,), nn.BatchNorm1d),
    "small conv net, 4 layers of norm": (conv, (3, 32, 32), nn.BatchNorm2d),
}


def data(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8 * BATCH, *shape, generator=generator)
    return rows, torch.randint(0, 10, (len(rows),), generator=generator)


def seconds_a_step(model: Callable[[], nn.Module], shape: tuple[int, ...], workers: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        config = paceline.TrainConfig(
            workers=workers,
            shards=4,
            global_batch=BATCH,
            max_steps=STEPS,
            threads=1,
            device="cpu",
            progress=False,
            run_dir=f"{folder}/run",
            checkpoint=paceline.CheckpointConfig(enabled=False),
        )
        trainer = paceline.Trainer(
            model, nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.AdamW(p, 1e-3), config=config
        )
        history = trainer.fit(data(shape))
    return median(record.seconds for record in history.steps[WARMUP:])


def run() -> Report:
    """Milliseconds a step, by the kind of layer."""
    columns = ("model", "workers", "BatchNorm ms a step", "SyncBatchNorm ms a step", "ratio", "spread")
    report = Report("sync_norm_cost", "What statistics over the global batch cost", columns)
    for name, (make, shape, kind) in CASES.items():
        for workers in (1, 2):
            times: dict[Any, list[float]] = {kind: [], nn.SyncBatchNorm: []}
            for _ in range(ROUNDS):
                for norm, found in times.items():
                    found.append(seconds_a_step(partial(make, norm), shape, workers))
            within, over_all = times.values()
            ratios = sorted(a / b for a, b in zip(over_all, within, strict=True))
            report.rows.append(
                (
                    name,
                    str(workers),
                    f"{median(within) * 1e3:.2f}",
                    f"{median(over_all) * 1e3:.2f}",
                    f"{median(ratios):.2f}",
                    f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
                )
            )
    return report


if __name__ == "__main__":
    main(run)
