"""Callbacks of futures that use the group themselves, as torch's own communication hooks do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.comm.torch_process_group.torch_ranks import gloo_group, torch_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

LARGE = 2_000_000


def low_rank(rank: int) -> float:
    """Train with PowerSGD, whose callbacks wait for collectives; return the largest difference from Gloo."""
    gloo = gloo_group()
    inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))

    def trained(group: Any, bucket_cap_mb: float) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 700), nn.ReLU(), nn.Linear(700, 500))
        parallel = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_cap_mb)
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            parallel(inputs).square().mean().backward()
            optimizer.step()
        return [value.clone() for value in model.state_dict().values()]

    # With two buckets the callbacks of one run beside the other, which Gloo's order of calls does not bear.
    ours, same, theirs = trained(dist.group.WORLD, 0.1), trained(dist.group.WORLD, 25), trained(gloo, 25)
    assert all(torch.equal(one, other) for one, other in zip(same, theirs, strict=True))
    return max((one - other).abs().max().item() for one, other in zip(ours, theirs, strict=True))


def test_power_sgd_trains_as_with_gloo():
    assert max(torch_ranks(low_rank)) < 1e-3


def in_one_order(rank: int) -> list[Any]:
    """The call of a callback comes right behind the call that it is of, on the rank that has queued another
    one by then as on the rank that has not."""
    gloo = gloo_group()

    def again(future: torch.futures.Future[Any]) -> Any:
        (summed,) = future.value()
        work = dist.all_reduce(summed, async_op=True)
        assert work is not None
        return work.get_future().wait()[0][0].item()

    second = torch.ones(5)
    if rank == 1:
        dist.barrier(gloo)
    first = dist.all_reduce(torch.full((LARGE,), rank + 1.0), async_op=True).get_future().then(again)
    if rank == 1:
        first.wait()
    work = dist.all_reduce(second, async_op=True)
    if rank == 0:
        dist.barrier(gloo)
    work.wait()
    last = torch.ones(2)
    dist.all_reduce(last)
    return [first.wait(), second[0].item(), last[0].item()]


def test_a_callback_may_wait_for_a_collective_of_its_group():
    assert torch_ranks(in_one_order) == [[6.0, 2.0, 2.0]] * 2


def messages_in_a_chain(rank: int) -> Any:
    """Each callback posts the next receive of the same source and tag, and one waits for it."""
    if rank == 0:
        for number in range(3):
            dist.send(torch.tensor([float(number)]), 1)
        dist.barrier()
        dist.send(torch.tensor([9.0]), 1)
        return None
    parts = [torch.zeros(1) for _ in range(4)]

    def second(_: Any) -> Any:
        work = dist.irecv(parts[1], 0)
        assert work is not None
        work.wait()
        return dist.irecv(parts[2], 0)

    first = dist.irecv(parts[0], 0)
    assert first is not None
    first.get_future().then(second).wait().wait()
    first = dist.irecv(parts[3], 0)
    assert first is not None
    dist.barrier()  # the receive that is posted holds nobody up
    first.wait()
    return [part.item() for part in parts]


def test_a_callback_may_wait_for_a_message_of_its_source():
    assert torch_ranks(messages_in_a_chain)[1] == [0.0, 1.0, 2.0, 9.0]
