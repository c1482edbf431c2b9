"""Hugging Face Accelerate around the hand-written loop.

Started from the environment: `accelerate launch --cpu --num_processes 2` silently runs a single process, so
the number of processes is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor

from bench.train.loader import loader
from bench.train.timed import timed
from bench.train.turns import Block
from bench.train.workload import WORKLOADS


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
    return timed(model, optimizer, batches, accelerator.backward)


def _endless(data: Any) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from data
