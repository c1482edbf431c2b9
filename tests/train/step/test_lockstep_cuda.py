"""Steps whose shards are computed together, on a GPU, where autograd has one thread that must never wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paceline

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.leaky("torch keeps its CUDA context until the process ends"),
]


def convolutions() -> nn.Module:
    inner = nn.Conv2d(2, 8, 3), nn.SyncBatchNorm(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.SyncBatchNorm(8)
    return nn.Sequential(nn.Unflatten(1, (2, 6, 6)), *inner, nn.Flatten(), nn.Linear(32, 2))


def hash_with(workers: int, device: Any, precision: Any) -> str:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(50, 72, generator=generator), torch.randint(0, 2, (50,), generator=generator)
    config = paceline.TrainConfig(
        workers=workers,
        shards=4,
        global_batch=12,
        epochs=2,
        device=device,
        precision=precision,
        threads=1,
        progress=False,
        run_dir=False,
    )
    trainer = paceline.Trainer(
        convolutions, nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1), config=config
    )
    return trainer.fit(data).state_hash


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_number_of_workers_changes_no_bit(precision: str) -> None:
    assert len({hash_with(workers, "cuda", precision) for workers in (1, 2, 3)}) == 1
