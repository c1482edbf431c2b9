"""Hugging Face Accelerate around the hand-written loop.

Started from the environment: `accelerate launch --cpu --num_processes 2` silently runs a single process, so
the number of processes is checked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor

from bench.train.loader import loader
from bench.train.turns import Block
from bench.train.workload import WORKLOADS, loss_of


def prepare(workers: int, *, workload: str) -> Block:
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    )
    if accelerator.num_processes != workers:
        raise RuntimeError(f"Accelerate runs {accelerator.num_processes} processes, not {workers}")
    work = WORKLOADS[workload]
    model = work.model()
    prepared = accelerator.prepare(
        model, work.optimizer(model.parameters()), loader(work.data(workers), work.batch)
    )
    model, optimizer, data = prepared
    batches = _endless(data)

    def block(warmup: int, steps: int) -> dict[str, Any]:
        total = torch.zeros(())
        started = 0.0
        for step in range(warmup + steps):
            if step == warmup:
                started = time.perf_counter()
            images, labels = next(batches)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, images, labels)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
        return {"seconds": time.perf_counter() - started, "loss": total.item() / (warmup + steps)}

    return block


def _endless(data: Any) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from data
