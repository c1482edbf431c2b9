"""What more shards than workers cost: a step with the default number of shards against one shard per worker.

Interleaved, one thread per worker, medians of the steps of several runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

import paceline
from bench.report import Report, main

ROUNDS = 5
WARMUP = 5


@dataclass(frozen=True)
class Case:
    """A model and its data; the learning itself does not matter."""

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    steps: int

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(8 * self.batch, *self.shape, generator=generator)
        return rows, torch.randint(0, 10, (len(rows),), generator=generator)


def mlp(width: int) -> nn.Module:
    layers = nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    return nn.Sequential(*layers)


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )


CASES = (
    Case("MLP of 3,000 parameters", lambda: mlp(32), (64,), 256, 200),
    Case("MLP of 1 M parameters", lambda: mlp(1000), (64,), 256, 40),
    Case("small conv net", conv, (3, 32, 32), 64, 20),
)


def seconds_a_step(case: Case, workers: int, shards: int | None) -> float:
    with tempfile.TemporaryDirectory() as folder:
        config = paceline.TrainConfig(
            workers=workers,
            shards=shards,
            global_batch=case.batch,
            max_steps=case.steps,
            threads=1,
            device="cpu",
            progress=False,
            run_dir=f"{folder}/run",
            checkpoint=paceline.CheckpointConfig(enabled=False),
        )
        trainer = paceline.Trainer(
            case.model, nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.AdamW(p, 1e-3), config=config
        )
        history = trainer.fit(case.data())
    return median(record.seconds for record in history.steps[WARMUP:])


def run() -> Report:
    """Milliseconds a step, by the number of shards."""
    columns = ("model", "batch", "workers", "shards", "ms a step", "against shards = workers", "spread")
    report = Report("default_shards", "What more shards than workers cost", columns)
    for case in CASES:
        for workers in (1, 2, 4):
            counts = sorted({workers, 4, 8})
            times: dict[int, list[float]] = {count: [] for count in counts}
            for _ in range(ROUNDS):
                for count in counts:
                    times[count].append(seconds_a_step(case, workers, count))
            for count in counts:
                ratios = sorted(a / b for a, b in zip(times[count], times[workers], strict=True))
                report.rows.append(
                    (
                        case.name,
                        str(case.batch),
                        str(workers),
                        str(count),
                        f"{median(times[count]) * 1e3:.2f}",
                        f"{median(ratios):.2f}",
                        f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
                    )
                )
    return report


if __name__ == "__main__":
    main(run)
