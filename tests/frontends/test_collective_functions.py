"""The plain functions on the default group: Paceline's forms and torch's, with real ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.comm.ops import ReduceOp
from paceline.core.errors import UsageError
from paceline.frontends import collective_functions as group
from paceline.frontends.spawn import spawn

WORKERS = 3


def check(fn: Any, *args: Any) -> None:
    """Runs assertions on every rank."""
    spawn(fn, *args, workers=WORKERS, threads=1, timeout=60)


def ones(rank: int, size: int = 2) -> torch.Tensor:
    return torch.full((size,), float(rank + 1))


def _all_reduce(ctx: Any) -> None:
    tensor = ones(ctx.rank)
    assert group.all_reduce(tensor) is tensor
    assert tensor.tolist() == [6.0, 6.0]
    parameter = torch.nn.Parameter(ones(ctx.rank))
    assert group.all_reduce(parameter, ReduceOp.AVERAGE, "canonical") is parameter
    assert parameter.tolist() == [2.0, 2.0]
    crossing = torch.arange(4.0).reshape(2, 2).t()
    group.all_reduce(crossing, op=torch.distributed.ReduceOp.MAX)
    assert crossing.tolist() == [[0.0, 2.0], [1.0, 3.0]]
    several = [ones(ctx.rank), ones(ctx.rank, 1)]
    assert group.all_reduce(several, torch.distributed.ReduceOp.AVG) is several
    assert [part.tolist() for part in several] == [[2.0, 2.0], [2.0]]
    array = np.ones(2)
    assert group.all_reduce(array, "sum").tolist() == [3.0, 3.0]
    assert array.tolist() == [1.0, 1.0]
    assert group.all_reduce(ctx.rank + 1, ReduceOp.PRODUCT) == 6
    later = ones(ctx.rank)
    handle = group.all_reduce(later, async_op=True)
    assert handle.wait(20) is later
    assert handle.done()
    assert later.tolist() == [6.0, 6.0]


def _reduce_and_broadcast(ctx: Any) -> None:
    tensor = ones(ctx.rank)
    reduced = group.reduce(tensor, dst=1)
    assert (reduced is tensor) if ctx.rank == 1 else (reduced is None)
    assert tensor.tolist() == ([6.0, 6.0] if ctx.rank == 1 else ones(ctx.rank).tolist())
    assert group.reduce([1.0], 2, ReduceOp.MAX) == ([1.0] if ctx.rank == 2 else None)

    tensor = ones(ctx.rank)
    assert group.broadcast(tensor, src=2) is tensor
    assert tensor.tolist() == [3.0, 3.0]
    assert group.broadcast({"epoch": ctx.rank}, 1) == {"epoch": 1}
    later = ones(ctx.rank)
    assert group.broadcast(later, root_rank=1, async_op=True).wait() is later
    assert later.tolist() == [2.0, 2.0]
    fresh = group.broadcast(ones(0) if ctx.rank == 0 else None)
    assert fresh.tolist() == [1.0, 1.0]


def _gathers(ctx: Any) -> None:
    assert group.all_gather(f"rank {ctx.rank}") == ["rank 0", "rank 1", "rank 2"]
    outputs = [torch.empty(2) for _ in range(WORKERS)]
    assert group.all_gather(outputs, ones(ctx.rank)) is outputs
    assert [output.tolist() for output in outputs] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    outputs = [torch.empty(rank + 1) for rank in range(WORKERS)]
    group.all_gather(outputs, ones(ctx.rank, ctx.rank + 1), async_op=True).wait()
    assert [output.tolist() for output in outputs] == [[1.0], [2.0] * 2, [3.0] * 3]

    assert group.gather(ctx.rank, 1) == ([0, 1, 2] if ctx.rank == 1 else None)
    outputs = [torch.empty(2) for _ in range(WORKERS)]
    group.gather(ones(ctx.rank), outputs if ctx.rank == 2 else None, dst=2)
    if ctx.rank == 2:
        assert [output.tolist() for output in outputs] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def _scatters(ctx: Any) -> None:
    chunks = ["a", ["b"], {"c": 3}]
    assert group.scatter(chunks if ctx.rank == 1 else None, root_rank=1) == chunks[ctx.rank]
    assert group.scatter(chunks if ctx.rank == 1 else None, 1) == chunks[ctx.rank]
    whole = torch.arange(7.0)
    assert torch.equal(torch.cat(group.all_gather(group.scatter(whole))), whole)
    assert torch.equal(whole, torch.arange(7.0))

    output = torch.zeros(2)
    parts = [ones(rank) for rank in range(WORKERS)]
    assert group.scatter(output, parts if ctx.rank == 0 else None) is output
    assert output.tolist() == ones(ctx.rank).tolist()
    output = torch.zeros(2)
    group.scatter(output, parts if ctx.rank == 2 else None, src=2, async_op=True).wait()
    assert output.tolist() == ones(ctx.rank).tolist()

    mine = [ones(rank) for rank in range(WORKERS)]
    assert group.reduce_scatter(mine).tolist() == [3.0 * (ctx.rank + 1)] * 2
    assert group.reduce_scatter(mine, ReduceOp.MAX).tolist() == ones(ctx.rank).tolist()
    output = torch.empty(2)
    assert group.reduce_scatter(output, mine, torch.distributed.ReduceOp.AVG) is output
    assert output.tolist() == ones(ctx.rank).tolist()

    assert group.all_to_all([10 * ctx.rank + peer for peer in range(WORKERS)]) == [
        10 * peer + ctx.rank for peer in range(WORKERS)
    ]
    outputs = [torch.empty(2) for _ in range(WORKERS)]
    assert group.all_to_all(outputs, [ones(ctx.rank)] * WORKERS) is outputs
    assert [output.tolist() for output in outputs] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def _messages(ctx: Any) -> None:
    if ctx.rank == 0:
        group.send({"to": 1}, 1)
        group.send(ones(0), dst=2)
        group.send(ones(0), dst=2, tag=7)
        assert {group.recv(), group.recv(source_rank=-1)} == {1, 2}
    else:
        if ctx.rank == 1:
            assert group.recv(0) == {"to": 1}
        else:
            tensor = torch.empty(2)
            assert group.recv(tensor, src=0) is tensor
            assert tensor.tolist() == [1.0, 1.0]
            assert group.recv(torch.empty(2), 0, tag=7, async_op=True).wait().tolist() == [1.0, 1.0]
        group.send(ctx.rank, dest_rank=0)
    group.barrier()
    group.barrier(async_op=True).wait()


@pytest.mark.parametrize("function", [_all_reduce, _reduce_and_broadcast, _gathers, _scatters, _messages])
def test_every_form(function):
    check(function)


def _refused_before_anything_travels(ctx: Any) -> None:
    outputs = [torch.empty(2) for _ in range(WORKERS)]
    cases: list[tuple[Any, str]] = [
        (lambda: group.all_gather(outputs[:2], ones(0)), "2 outputs for 3 ranks"),
        (lambda: group.all_gather(torch.empty(6), ones(0)), "Tensor for 3 ranks"),
        (lambda: group.all_gather(outputs, ones(0, 5)), r"float32\[5\] does not fit into float32\[2\]"),
        (lambda: group.reduce_scatter(torch.empty(3), outputs), r"does not fit into float32\[3\]"),
        (lambda: group.broadcast(ones(0), 1, src=2), "name two ranks"),
        (lambda: group.broadcast(ones(0), src=9), "root_rank=9"),
        (lambda: group.recv(0, src=1), "name two ranks"),
        (lambda: group.recv("x"), "cannot receive into a str"),
        (lambda: group.send("x"), "to which rank"),
        (lambda: group.all_reduce(ones(0), "median"), "median"),
        (lambda: group.all_reduce(ones(0), torch.distributed.ReduceOp.BAND), "band"),
        (lambda: group.all_reduce(ones(0), 3), "op=3"),
        (lambda: group.barrier(group="world"), "group is a str"),  # type: ignore[arg-type]
    ]
    for call, words in cases:
        with pytest.raises(UsageError, match=words):
            call()
    group.barrier(group=ctx)


def test_mistakes_are_refused_before_anything_travels():
    check(_refused_before_anything_travels)


def _does_not_fit(ctx: Any) -> str:
    try:
        group.broadcast(ones(0) if ctx.rank == 0 else torch.ones(2, dtype=torch.float64))
    except UsageError as error:
        return error.message
    return "sent"


def test_what_does_not_fit_is_not_converted():
    told = spawn(_does_not_fit, workers=2, threads=1)
    assert told == ["sent", "broadcast: float32[2] does not fit into float64[2]"]
