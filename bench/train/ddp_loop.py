"""The best loop one writes by hand with torch's DistributedDataParallel over Gloo.

Gradients are views of the buckets, zero_grad drops them, the sampler's order is turned into tensors once an
epoch and a batch is one gather from memory: no DataLoader, no item that is collated, no copy to spare.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

from bench.train.turns import Block
from bench.train.workload import WORKLOADS, loss_of


def prepare(workers: int, *, workload: str) -> Block:
    distributed.init_process_group("gloo")
    work = WORKLOADS[workload]
    model = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)
    optimizer = work.optimizer(model.parameters())
    batches = sampled(work.data(workers), work.batch, workers)

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


def sampled(data: tuple[Tensor, Tensor], size: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's batches, epoch after epoch."""
    images, labels = data
    sampler = DistributedSampler(TensorDataset(labels), workers, distributed.get_rank(), shuffle=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for ids in torch.tensor(list(sampler)).split(size):
            yield images.index_select(0, ids), labels.index_select(0, ids)
        epoch += 1
