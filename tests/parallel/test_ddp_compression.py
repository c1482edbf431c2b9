"""Compressed gradients in DistributedDataParallel: equal on all ranks, and no obstacle to training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.parallel.models import DDP, ranks
from torch import Tensor, nn

from paceline.comm.compression import PowerSGD, cast_gradients, quantize_gradients, sparsify_gradients

STEPS = 150
MAKE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "bf16": lambda: cast_gradients("bf16"),
    "int8": lambda: quantize_gradients(8),
    "int4": lambda: quantize_gradients(4),
    "topk": lambda: sparsify_gradients(0.9),
    "powersgd": lambda: PowerSGD(rank=2, min_compression=1.0),
}


def _fit(ctx: Any, names: list[str]) -> dict[str, tuple[float, list[Tensor], list[str]]]:
    results = {}
    for name in names:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        compression = MAKE[name]()
        ddp = DDP(model, 0.001, compression=compression, overlap=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(ctx.rank)
        x = torch.randn(64, 8, generator=generator)
        y = x[:, :1] * x[:, 1:2] + x.sum(1, keepdim=True)
        for _ in range(STEPS):
            optimizer.zero_grad()
            ((ddp(x) - y) ** 2).mean().backward()
            optimizer.step()
        error = ctx.all_reduce(float(((ddp(x) - y) ** 2).mean()), "average")
        names_kept = [] if compression is None else sorted(compression.state_dict())
        results[name] = (error, [p.detach() for p in ddp.parameters()], names_kept)
    return results


@pytest.fixture(scope="module")
def fitted() -> list[Any]:
    return ranks(_fit, list(MAKE), workers=2)


@pytest.mark.parametrize("name", list(MAKE))
def test_all_ranks_hold_the_same_weights(fitted, name):
    first, second = (result[name][1] for result in fitted)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", [name for name in MAKE if name != "none"])
def test_the_loss_comes_close_to_the_uncompressed_one(fitted, name):
    plain = fitted[0]["none"][0]
    assert plain < 0.5
    assert fitted[0][name][0] < 1.5 * plain + 0.02


def test_every_bucket_has_a_residual_of_its_own(fitted):
    assert "residual.ddp.bucket0" in fitted[0]["int8"][2]
    assert "residual.ddp.bucket1" in fitted[0]["int8"][2]
    assert any(name.startswith("residual.ddp.bucket1.") for name in fitted[0]["powersgd"][2])
