"""Models on a GPU: gradients stay there, travel through the host, and are the same bits on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.parallel.models import DDP, TINY_BUCKETS, Net, batch, canonical_average, equal, grads, loss, ranks
from torch import Tensor

from paceline.comm.compression import PowerSGD, quantize_gradients

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _average(ctx: Any, overlap: bool) -> tuple[list[Tensor], list[Tensor]]:
    torch.use_deterministic_algorithms(True)
    x = batch(ctx.rank).cuda()
    alone = Net().cuda()
    loss(alone(x)).backward()
    ddp = DDP(Net().cuda(), TINY_BUCKETS, overlap=overlap)
    # Not the default stream: what the reduction wrote must be seen from there too.
    with torch.cuda.stream(torch.cuda.Stream()):
        loss(ddp(x)).backward()
        averaged = grads(ddp)
    torch.cuda.synchronize()
    assert all(grad is not None and grad.is_cuda for grad in averaged)
    return _host(grads(alone)), _host(averaged)


def _host(tensors: list[Tensor | None]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_are_the_canonical_average(overlap, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    results = ranks(_average, overlap)
    expected = [canonical_average(list(parts)) for parts in zip(*(own for own, _ in results), strict=True)]
    for _, averaged in results:
        assert equal(averaged, expected)


def _train(ctx: Any) -> list[list[Tensor]]:
    weights = []
    for compression in (None, quantize_gradients(8), PowerSGD()):
        ddp = DDP(Net().cuda(), compression=compression)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            loss(ddp(batch(ctx.rank, step).cuda())).backward()
            optimizer.step()
        weights.append([value.cpu() for value in ddp.state_dict().values()])
    return weights


def test_weights_and_buffers_stay_equal():
    first, second = ranks(_train)
    for mine, theirs in zip(first, second, strict=True):
        assert equal(mine, theirs)
