"""Groups with a backend for each device, on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.torch_process_group.torch_ranks import torch_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _both_devices(rank: int) -> tuple[float, float]:
    here, there = torch.tensor([rank + 1.0]), torch.tensor([rank + 1.0], device="cuda")
    dist.all_reduce(here)
    dist.all_reduce(there)
    return here.item(), there.item()


def _trained(rank: int) -> bool:
    """One step of DDP on the GPU is that of the averaged gradients, on every rank."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).cuda()
    parallel = DistributedDataParallel(model)
    data = torch.arange(24.0).reshape(2, 2, 6).cuda() / 24
    parallel(data[rank]).square().sum().backward()
    alone = nn.Linear(6, 3).cuda()
    alone.load_state_dict(model.state_dict())
    total = sum(alone(data[one]).square().sum() for one in range(dist.get_world_size()))
    (total / dist.get_world_size()).backward()
    assert model.weight.grad is not None
    assert alone.weight.grad is not None
    return torch.allclose(model.weight.grad, alone.weight.grad, atol=1e-6)


def _sharded() -> bool:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Linear(6, 3).cuda()
    before = model.weight.detach().clone()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 6, device="cuda")).sum().backward()
    optimizer.step()
    after: Any = model.weight
    return torch.allclose(after.full_tensor(), before - 0.2, atol=1e-6)


def _alone(rank: int) -> Any:
    return _both_devices(rank), _trained(rank), _sharded(), str(dist.get_backend_config())


def test_nccl_beside_paceline():
    """One rank: NCCL takes one rank for each GPU."""
    (found,) = torch_ranks(_alone, workers=1, backend="cpu:paceline,cuda:nccl")
    assert found == ((1.0, 1.0), True, True, "cpu:paceline,cuda:nccl")


def _together(rank: int) -> Any:
    return _both_devices(rank), _trained(rank)


def test_two_ranks_on_one_gpu_beside_paceline():
    assert torch_ranks(_together, backend="cpu:paceline,cuda:gloo") == [((3.0, 3.0), True)] * 2
