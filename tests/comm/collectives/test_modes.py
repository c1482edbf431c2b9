"""Torch's modes and odd tensors: none of them may reach what a context keeps between calls."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from contextlib import closing
from typing import Any

import pytest
import torch

from paceline.comm.collectives.reduction import Reducer, ReductionPlan
from paceline.comm.context import DistributedContext
from paceline.comm.cost import LinkCosts
from paceline.comm.ops import ReduceOp
from paceline.comm.transport.shm.transport import ShmTransport
from paceline.core.errors import UsageError
from paceline.core.shm_segment_layout import create_segment
from paceline.testing.thread_transport import run_ranks

ALGORITHMS = ("direct", "canonical", "ring", "tree")
SIZES = (3, 50_000, 600_000)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_call_in_inference_mode_leaves_nothing_of_it_behind(algorithm: str) -> None:
    def ranks(ctx: DistributedContext) -> list[float]:
        sums = []
        for size in SIZES:
            with torch.inference_mode():
                ctx.all_reduce(torch.ones(size), algorithm=algorithm)
            sums.append(float(ctx.all_reduce(torch.ones(size), algorithm=algorithm)[-1]))
        return sums

    assert run_ranks(2, ranks) == [[2.0] * len(SIZES)] * 2


def test_out_from_inference_mode_is_refused_outside_of_it() -> None:
    def ranks(ctx: DistributedContext) -> float:
        with torch.inference_mode():
            out = torch.ones(4)
        with pytest.raises(UsageError, match="inference mode"):
            ctx.all_reduce(out, out=out)
        return float(ctx.all_reduce(torch.ones(1))[0])

    assert run_ranks(2, ranks) == [2.0, 2.0]


def operations(ctx: DistributedContext, tensor: torch.Tensor) -> list[torch.Tensor]:
    peer = 1 - ctx.rank
    ctx.send(tensor, peer)
    return [
        ctx.receive(peer),
        ctx.broadcast(tensor),
        ctx.all_gather(tensor)[peer],
        ctx.scatter([tensor, tensor] if ctx.is_master else None),
        ctx.all_to_all([tensor, tensor])[peer],
        ctx.reduce_scatter([tensor, tensor]),
        *(ctx.all_reduce(tensor, algorithm=algorithm) for algorithm in ALGORITHMS),
        ctx.all_reduce(tensor, out=tensor, algorithm="ring"),
    ]


@pytest.mark.parametrize("rows", [0, 1])
def test_one_element_or_none_with_any_stride(rows: int) -> None:
    def ranks(ctx: DistributedContext) -> list[list[int]]:
        return [list(result.shape) for result in operations(ctx, torch.ones(rows, 3)[:, 0])]

    assert run_ranks(2, ranks) == [[[rows]] * 11] * 2


def test_the_default_device_does_not_matter() -> None:
    def ranks(ctx: DistributedContext) -> list[Any]:
        small, large = torch.ones(3), torch.ones(600_000)
        with torch.device("meta"):
            return [
                ctx.all_gather({"a": 1}),
                float(ctx.all_reduce(small)[0]),
                float(ctx.all_reduce(large, out=large)[0]),
                float(ctx.all_reduce(small, algorithm="ring")[0]),
                ctx.all_reduce([1.0]),
                float(ctx.canonical_sum({ctx.rank: small}, shards=2)[0]),
            ]

    assert run_ranks(2, ranks) == [[[{"a": 1}, {"a": 1}], 2.0, 2.0, 2.0, [2.0], 2.0]] * 2


def test_plans_of_shapes_that_change_do_not_pile_up() -> None:
    segment = create_segment(1)
    transport = ShmTransport(segment, 0, 1)
    os.close(segment)
    with closing(transport):
        reducer = Reducer(transport, LinkCosts())

        def plan(number: int) -> ReductionPlan:
            return reducer.plan(torch.ones(1), f"float32[{number}]", ReduceOp.SUM, "direct", None, False)

        first = plan(0)
        for number in range(1, 4096):
            plan(number)
        assert plan(0) is first
        last = plan(4096)
        assert plan(0) is not first
        assert plan(4096) is last


def test_out_that_overlaps_the_data_in_part_is_refused() -> None:
    def ranks(ctx: DistributedContext) -> float:
        memory = torch.ones(103)
        with pytest.raises(UsageError, match="shares part"):
            ctx.all_reduce(memory[:100], out=memory[3:])
        return float(ctx.all_reduce(memory[:50], out=memory[50:100])[0])

    assert run_ranks(2, ranks) == [2.0, 2.0]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_an_average_that_torch_cannot_divide_is_refused_first() -> None:
    def ranks(ctx: DistributedContext) -> float:
        with pytest.raises(UsageError, match="complex32"):
            ctx.all_reduce(torch.ones(2, dtype=torch.complex32), ReduceOp.AVERAGE)
        return float(ctx.all_reduce(torch.ones(1))[0])

    assert run_ranks(2, ranks) == [2.0, 2.0]


def test_closing_from_another_thread_ends_a_wait() -> None:
    closed = threading.Event()

    def ranks(ctx: DistributedContext) -> str:
        if ctx.rank == 1:
            closed.wait(20)
            return "came late"
        closer = threading.Timer(0.1, ctx.close)
        closer.start()
        try:
            with pytest.raises(UsageError, match="closed by another thread"):
                ctx.barrier(timeout=20)
        finally:
            closer.join()
            closed.set()
        return "told"

    assert run_ranks(2, ranks) == ["told", "came late"]


def test_an_interrupted_group_is_broken_without_interrupting_again() -> None:
    def ranks(ctx: DistributedContext) -> None:
        ctx._queue._break(KeyboardInterrupt())
        with pytest.raises(UsageError, match="KeyboardInterrupt"):
            ctx.all_reduce([1.0])

    run_ranks(1, ranks)


def test_a_state_dict_travels_as_it_is() -> None:
    def ranks(ctx: DistributedContext) -> list[str]:
        model = torch.nn.Linear(2, 2)
        state = ctx.broadcast(model.state_dict())
        assert type(state) is OrderedDict
        model.load_state_dict(state)
        return list(state)

    assert run_ranks(2, ranks) == [["weight", "bias"]] * 2


def test_torch_s_names_of_the_operations() -> None:
    assert [ReduceOp["AVG"], ReduceOp["PROD"]] == [ReduceOp.AVERAGE, ReduceOp.PRODUCT]
