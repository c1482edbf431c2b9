"""The best loop one writes by hand with torch's DistributedDataParallel over Gloo.

Gradients are views of the buckets, zero_grad drops them, the sampler's order is turned into tensors once an
epoch and a batch is one gather from memory: no DataLoader, no item that is collated, no copy to spare.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

from bench.train.timed import timed
from bench.train.turns import Block
from bench.train.workload import WORKLOADS


def prepare(workers: int, *, workload: str) -> Block:
    distributed.init_process_group("gloo")
    work = WORKLOADS[workload]
    model = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)
    optimizer = work.optimizer(model.parameters())
    batches = sampled(work.data(workers), work.batch, workers)
    return timed(model, optimizer, batches)


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
