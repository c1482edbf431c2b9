"""The best loop one writes by hand for one process: what a single worker is measured against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.train.timed import timed
from bench.train.turns import Block
from bench.train.workload import WORKLOADS


def prepare(workers: int, *, workload: str) -> Block:
    work = WORKLOADS[workload]
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    batches = _batches(work.data(workers), work.batch)
    return timed(model, optimizer, batches)


def _batches(data: tuple[Tensor, Tensor], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled anew each epoch."""
    images, labels = data
    while True:
        for ids in torch.randperm(len(labels)).split(size):
            yield images.index_select(0, ids), labels.index_select(0, ids)
