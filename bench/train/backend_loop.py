"""One loop over two backends of torch.distributed in the same processes: DDP or FSDP2 over "paceline" and
over Gloo.

Each backend has a model, an optimizer and batches of its own. They take turns of a few steps, behind a
barrier, so that whatever else this machine does slows both alike. With DDP a third one takes part whose
gradients are not exchanged at all: what a backend that needs no time would reach."""

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

BACKENDS = ("paceline", "gloo")
NO_EXCHANGE = "no exchange"
_SHARDED_FROM = 100_000


def prepare(workers: int, *, workload: str, loop: str) -> Block:
    import paceline.torch_backend  # noqa: F401

    distributed.init_process_group("gloo")
    groups = {backend: distributed.new_group(backend=backend) for backend in BACKENDS}
    work = WORKLOADS[workload]
    steps = {backend: _step(work, workers, loop, group) for backend, group in groups.items()}
    if loop == "ddp":
        steps[NO_EXCHANGE] = _step(work, workers, loop, groups["gloo"], exchange=False)

    def block(rounds: int, turn: int) -> dict[str, Any]:
        times: dict[str, list[float]] = {backend: [] for backend in steps}
        order = list(steps)
        for _ in range(rounds):
            for backend in order:
                distributed.barrier()
                steps[backend]()  # the caches hold the other backend's weights
                started = time.perf_counter()
                for _ in range(turn):
                    steps[backend]()
                times[backend].append((time.perf_counter() - started) / turn)
            order.reverse()
        return {"times": times}

    return block


def _step(
    work: Workload, workers: int, loop: str, group: Any, *, exchange: bool = True
) -> Callable[[], None]:
    model = work.model()
    parallel: nn.Module
    optimizer: torch.optim.Optimizer
    if loop == "fsdp":
        parallel = _sharded(model, group)
        # The fused form does not take sharded parameters on the CPU.
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01, momentum=0.9)
    else:
        parallel = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
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


def _sharded(model: nn.Module, group: Any) -> nn.Module:
    """Shard every large layer by itself, and the rest with the whole model."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and layer.weight.numel() > _SHARDED_FROM:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
