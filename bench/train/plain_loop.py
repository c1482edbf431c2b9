"""The best loop one writes by hand for one process: what a single worker is measured against."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.train.turns import Block
from bench.train.workload import WORKLOADS, loss_of


def prepare(workers: int, *, workload: str) -> Block:
    work = WORKLOADS[workload]
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    batches = _batches(work.data(workers), work.batch)

    def block(warmup: int, steps: int) -> dict[str, Any]:
        total = torch.zeros(())
        started = 0.0
        for step in range(warmup + steps):
            if step == warmup:
                started = time.perf_counter()
            images, labels = next(batches)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, images, labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        return {"seconds": time.perf_counter() - started, "loss": total.item() / (warmup + steps)}

    return block


def _batches(data: tuple[Tensor, Tensor], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled anew each epoch."""
    images, labels = data
    while True:
        for ids in torch.randperm(len(labels)).split(size):
            yield images.index_select(0, ids), labels.index_select(0, ids)
