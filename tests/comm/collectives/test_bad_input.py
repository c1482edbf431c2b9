"""Mistakes are found where they are made, before anything travels: the group goes on undisturbed."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tests.comm.ranks import raised, refused_then_works

from paceline.comm.context import DistributedContext
from paceline.core.errors import PacelineError, UsageError
from paceline.core.shm_segment_layout import create_segment
from paceline.testing.thread_transport import run_ranks


@pytest.mark.parametrize("world_size", [0, -1, 1.5, "2", True, 1 << 20])
def test_bad_world_sizes(world_size):
    with pytest.raises(UsageError, match="world_size") as caught:
        DistributedContext(world_size, 0)
    assert caught.value.remedy


@pytest.mark.parametrize("rank", [-1, 2, 7, 0.5, "0", True])
def test_ranks_outside_the_group(rank):
    with pytest.raises(UsageError, match="rank=") as caught:
        DistributedContext(2, rank)
    assert "from 0 to 1" in caught.value.remedy


@pytest.mark.parametrize("timeout", [0, -1, "soon", None, float("nan"), True])
def test_bad_timeouts_of_the_group(timeout):
    with pytest.raises(UsageError, match="timeout"):
        DistributedContext(1, 0, timeout=timeout)


@pytest.mark.parametrize("hosts", [[[0]], [[0, 1], [1]], [[0, 1, 2]], [[0], [2]], [], [["a"], [0, 1]], 5])
def test_bad_host_groups(hosts):
    def one(ctx: DistributedContext) -> None:
        with pytest.raises(UsageError, match="hosts"):
            DistributedContext.from_transport(ctx.transport, hosts=hosts)

    run_ranks(2, one)


def test_a_segment_that_is_none_or_of_another_size():
    with open(os.devnull, "rb") as nothing, pytest.raises(UsageError, match="not a Paceline segment"):
        DistributedContext.from_segment(nothing.fileno(), 0, 1)
    segment = create_segment(3)
    try:
        with pytest.raises(UsageError, match="made for 3 ranks"):
            DistributedContext.from_segment(segment, 0, 2)
        with pytest.raises(UsageError, match="rank"):
            DistributedContext.from_segment(segment, 3, 3)
    finally:
        os.close(segment)


@pytest.mark.parametrize("algorithm", ["bogus", "", None, 3, "Ring", ["ring"]])
@pytest.mark.parametrize(
    "data", [torch.ones(3), torch.ones(3, dtype=torch.bfloat16), [1.0], torch.ones(60_000)]
)
def test_unknown_algorithms(algorithm, data):
    refused_then_works(lambda ctx: ctx.all_reduce(data, "sum", algorithm), "algorithm")


@pytest.mark.parametrize("op", ["mean", "", None, 3, torch.add, ["sum"]])
def test_unknown_operations(op):
    refused_then_works(lambda ctx: ctx.all_reduce(torch.ones(3), op), "op=")
    refused_then_works(lambda ctx: ctx.reduce(torch.ones(3), 0, op), "op=")
    refused_then_works(lambda ctx: ctx.reduce_scatter([torch.ones(3)] * 2, op), "op=")
    refused_then_works(lambda ctx: ctx.canonical_sum({0: torch.ones(3)}, shards=2, op=op), "op=")


@pytest.mark.parametrize("root", [-1, 2, "0", 0.0, None, True])
def test_roots_out_of_range(root):
    refused_then_works(lambda ctx: ctx.broadcast(1, root), "root_rank")
    refused_then_works(lambda ctx: ctx.scatter([1, 2], root_rank=root), "root_rank")
    refused_then_works(lambda ctx: ctx.gather(1, root_rank=root), "root_rank")
    if root is not None:  # no buffer
        refused_then_works(lambda ctx: ctx.gather(1, root), "root_rank")
    refused_then_works(lambda ctx: ctx.reduce(1.0, root), "root_rank")


@pytest.mark.parametrize(
    "chunks", [[1], [1, 2, 3], 5, "ab", None, torch.tensor(1.0), np.array(1.0), {0: 1, 1: 2}]
)
def test_chunks_that_are_not_one_per_rank(chunks):
    refused_then_works(lambda ctx: ctx.scatter(chunks), "scatter")
    refused_then_works(lambda ctx: ctx.all_to_all(chunks), "all_to_all")
    refused_then_works(lambda ctx: ctx.reduce_scatter(chunks), "reduce_scatter")


@pytest.mark.parametrize("timeout", [-1.0, "soon", float("nan")])
def test_bad_timeouts_of_a_call(timeout):
    calls: list[Any] = [
        lambda ctx: ctx.barrier(timeout=timeout),
        lambda ctx: ctx.all_reduce(torch.ones(3), timeout=timeout),
        lambda ctx: ctx.all_reduce([1.0], timeout=timeout),
        lambda ctx: ctx.all_gather(1, timeout=timeout),
        lambda ctx: ctx.receive(1, timeout=timeout),
        lambda ctx: ctx.send(1, 1, timeout=timeout),
        lambda ctx: ctx.barrier(timeout=timeout, async_op=True),
    ]
    for call in calls:
        refused_then_works(call, "timeout")


def test_a_row_of_mistakes_leaves_no_trace():
    """Every kind of call, wrong on one rank, right afterwards, in one group."""

    def one(ctx: DistributedContext) -> list[Any]:
        results = []
        for turn in range(3):
            if ctx.rank == turn:
                for mistake in (
                    lambda: ctx.all_reduce("x"),
                    lambda: ctx.all_reduce(torch.ones(2), "sum", "bogus"),
                    lambda: ctx.broadcast(object(), root_rank=ctx.rank),
                    lambda: ctx.gather(1, 9),
                    lambda: ctx.canonical_sum({9: torch.ones(1)}, shards=3),
                ):
                    raised(UsageError, mistake)
            results.append(
                (
                    ctx.all_reduce(torch.ones(2), "sum", "ring").tolist(),
                    ctx.broadcast(ctx.rank, root_rank=turn),
                )
            )
        return results

    assert run_ranks(3, one) == [[([3.0, 3.0], turn) for turn in range(3)]] * 3


def test_a_closed_context_says_so():
    def one(ctx: DistributedContext) -> None:
        ctx.barrier()
        ctx.close()
        for call in (ctx.barrier, lambda: ctx.all_reduce(torch.ones(2)), lambda: ctx.send(1, 1 - ctx.rank)):
            assert "closed" in str(raised(UsageError, call))

    run_ranks(2, one)


def test_errors_travel_between_processes_unchanged():
    def one(ctx: DistributedContext) -> PacelineError:
        return raised(UsageError, ctx.all_reduce, torch.ones(3), "sum", "bogus")

    (error,) = run_ranks(1, one)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert "auto, direct, ring, tree, hierarchical, canonical" in str(again)
