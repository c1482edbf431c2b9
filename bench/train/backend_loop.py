"""A loop over one backend of torch.distributed: DDP or FSDP2 over "paceline" or over Gloo.

Beside these two: Gloo in processes that keep freed memory, as those of "paceline" do, which tells how much of
a ratio that is; and, with DDP, gradients that are not exchanged at all, with the memory kept: what a backend
that needs no time would reach."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.train.ddp_loop import sampled
from bench.train.turns import Block
from bench.train.workload import WORKLOADS, Workload, loss_of
from paceline.core.freed_memory import keep_freed_memory

PACELINE, GLOO, GLOO_KEPT, NO_EXCHANGE = "paceline", "gloo", "gloo, memory kept", "no exchange"
CONTENDERS = {"ddp": (PACELINE, GLOO, GLOO_KEPT, NO_EXCHANGE), "fsdp": (PACELINE, GLOO, GLOO_KEPT)}
_SHARDED_FROM = 100_000


def prepare(workers: int, *, workload: str, loop: str, contender: str) -> Block:
    if contender == PACELINE:
        import paceline.torch_backend  # noqa: F401
    elif contender != GLOO:
        keep_freed_memory()
    distributed.init_process_group(PACELINE if contender == PACELINE else "gloo")
    step = _step(WORKLOADS[workload], workers, loop, exchange=contender != NO_EXCHANGE)

    def block(warmup: int, steps: int) -> dict[str, Any]:
        for _ in range(warmup):
            step()
        distributed.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        return {"seconds": time.perf_counter() - started}

    return block


def _step(work: Workload, workers: int, loop: str, *, exchange: bool) -> Callable[[], None]:
    model = work.model()
    parallel: nn.Module
    optimizer: torch.optim.Optimizer
    if loop == "fsdp":
        parallel = _sharded(model)
        # The fused form does not take sharded parameters on the CPU.
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01, momentum=0.9)
    else:
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if not exchange:
            parallel.register_comm_hook(None, lambda state, bucket: _kept(bucket.buffer()))
        optimizer = work.optimizer(parallel.parameters())
    batches = sampled(work.data(workers), work.batch, workers)

    def step() -> None:
        images, labels = next(batches)
        optimizer.zero_grad(set_to_none=True)
        loss_of(parallel, images, labels).backward()
        optimizer.step()

    return step


def _kept(bucket: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Leave a bucket as this rank has it."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket)
    return done


def _sharded(model: nn.Module) -> nn.Module:
    """Shard every large layer by itself, and the rest with the whole model."""
    mesh = DeviceMesh.from_group(distributed.group.WORLD, "cpu")
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and layer.weight.numel() > _SHARDED_FROM:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
