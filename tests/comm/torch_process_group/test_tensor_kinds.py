"""Tensors that are no plain memory: results of functional collectives, other wrappers, and freed storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.torch_process_group.torch_ranks import failure_of, torch_ranks
from torch import Tensor
from torch.distributed import _functional_collectives as functional

SMALL, LARGE = 4, 2_000_000


def results_of_functional_collectives(rank: int, count: int) -> list[Any]:
    group: Any = dist.group.WORLD

    def made(waited: bool) -> Any:
        result = functional.all_reduce(torch.full((count,), rank + 1.0), "sum", group)
        assert type(result) is functional.AsyncCollectiveTensor
        if waited:
            result.trigger_wait()
        return result

    def of_this_rank(waited: bool) -> Any:
        """Return 2 on rank 0 and 4 on rank 1."""
        parts = torch.arange(1.0, 3.0).repeat_interleave(count)
        result = functional.reduce_scatter_tensor(parts, "sum", 0, group)
        if waited:
            result.trigger_wait()
        return result

    found: list[Tensor] = []
    for waited in (False, True):
        summed = made(waited)
        dist.all_reduce(summed)
        sent = of_this_rank(waited)
        dist.broadcast(sent, 0)
        part = torch.zeros(count // 2)
        dist.reduce_scatter_tensor(part, made(waited))
        crossed = torch.zeros(count)
        dist.all_to_all_single(crossed, made(waited))
        gathered = torch.zeros(2 * count)
        dist.all_gather_into_tensor(gathered, made(waited))
        got = of_this_rank(waited)
        if rank == 0:
            dist.send(got, 1)
        else:
            dist.recv(got, 0)
        found += [summed, sent, part, crossed, gathered, got]
    return [(tensor.min().item(), tensor.max().item()) for tensor in found]


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_results_of_functional_collectives_are_moved_by_their_values(count):
    expected = [(value, value) for value in (6.0, 2.0, 6.0, 3.0, 3.0, 2.0)] * 2
    assert torch_ranks(results_of_functional_collectives, count) == [expected] * 2


def without_memory(rank: int) -> list[Any]:
    freed = torch.ones(LARGE)
    freed.untyped_storage().resize_(0)
    told = failure_of(lambda: dist.all_reduce(freed))
    summed = torch.ones(1)
    dist.all_reduce(summed)
    return [told, summed.item()]


def test_a_tensor_without_memory_is_refused():
    for (kinds, text, _), summed in torch_ranks(without_memory):
        assert kinds == "UsageError from NoneType"
        assert "all_reduce: a Tensor of 2,000,000 elements has no memory of its own" in text
        assert summed == 2.0
