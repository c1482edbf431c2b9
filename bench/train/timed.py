"""The hand-written step and its clock, one for the plain loop, DDP and Accelerate: all are timed alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bench.train.turns import Block
from bench.train.workload import loss_of


def timed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> Block:
    """Steps that do not count, then steps that do."""

    def block(warmup: int, steps: int) -> dict[str, Any]:
        total = torch.zeros(())
        started = 0.0
        for step in range(warmup + steps):
            if step == warmup:
                started = time.perf_counter()
            images, labels = next(batches)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, images, labels)
            backward(loss)
            optimizer.step()
            total += loss.detach()
        return {"seconds": time.perf_counter() - started, "loss": total.item() / (warmup + steps)}

    return block
