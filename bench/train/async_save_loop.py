"""The hand-written DDP loop with torch.distributed.checkpoint.async_save: what checkpoints cost elsewhere.

Saves talk over a process group of their own, as the background thread must not meet the gradients' group; a
save waits for the one before, so that at most one is in flight. Files are synced, as async_save does.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

from bench.train.ddp_loop import sampled
from bench.train.turns import Block
from bench.train.workload import WORKLOADS, loss_of


def prepare(workers: int, *, workload: str, folder: str) -> Block:
    distributed.init_process_group("gloo")
    saving_group = distributed.new_group(backend="gloo")
    work = WORKLOADS[workload]
    model = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)
    optimizer = work.optimizer(model.parameters())
    batches = sampled(work.data(workers), work.batch, workers)

    def save(step: int, before: Future[Any] | None) -> Future[Any]:
        if before is not None:
            before.result()
        weights, moments = get_state_dict(model, optimizer)
        saving: Any = checkpoint.async_save(
            {"model": weights, "optimizer": moments},
            checkpoint_id=Path(folder, f"step-{step}"),
            process_group=saving_group,
        )
        future: Future[Any] = saving
        return future

    def block(warmup: int, steps: int, every: int = 0) -> dict[str, Any]:
        """`every` is the number of steps between two saves, 0 for none; `stalls` is how long each held up."""
        total = torch.zeros(())
        ends: list[float] = []
        stalls: list[float] = []
        saving: Future[Any] | None = None
        for step in range(1, warmup + steps + 1):
            images, labels = next(batches)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, images, labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if every and step % every == 0:
                asked = time.perf_counter()
                saving = save(step, saving)
                stalls.append(time.perf_counter() - asked)
            ends.append(time.perf_counter())
        if saving is not None:
            saving.result()
        distributed.barrier()
        if distributed.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return {"seconds": ends[-1] - ends[warmup - 1], "stalls": stalls, "ends": ends}

    return block
