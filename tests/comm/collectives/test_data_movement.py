"""Collectives that move data, and reduce and reduce_scatter: every root, uneven sizes, any plain data."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tests.comm.messages import MESSAGES, same
from tests.comm.ranks import combined, whole_numbers
from torch import Tensor

from paceline.comm.context import DistributedContext
from paceline.comm.ops import ReduceOp
from paceline.testing.thread_transport import run_ranks

RANKS = (1, 2, 3, 5, 8)


def piece(rank: int) -> Tensor:
    """Of another size on every rank, none on rank 0."""
    return torch.arange(rank * 3, dtype=torch.float32) + rank


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_any_plain_data_travels(message):
    def one(ctx: DistributedContext) -> list[Any]:
        return [
            ctx.broadcast(message if ctx.rank == 1 else None, root_rank=1),
            *ctx.all_gather(message),
            ctx.scatter([message] * 3 if ctx.rank == 2 else None, root_rank=2),
            *ctx.all_to_all([message] * 3),
            *(ctx.gather(message) or []),
        ]

    for of_rank in run_ranks(3, one):
        expected = message.resolve_conj() if isinstance(message, Tensor) else message
        for arrived in of_rank:
            if isinstance(arrived, Tensor):
                arrived = arrived.resolve_conj()
            assert same(arrived, expected), arrived


def test_what_arrives_is_memory_of_its_own():
    def one(ctx: DistributedContext) -> list[float]:
        mine = torch.full((4,), float(ctx.rank))
        arrived = ctx.all_gather(mine)
        for rank, tensor in enumerate(arrived):
            if rank != ctx.rank:
                tensor += 10
        ctx.barrier()
        assert mine.tolist() == [float(ctx.rank)] * 4
        array = ctx.broadcast(np.ones(3) if ctx.rank == 0 else None)
        array += 1
        return list(array)

    assert run_ranks(3, one) == [[2.0] * 3] * 3


@pytest.mark.parametrize("ranks", RANKS)
def test_broadcast_from_every_root(ranks):
    def one(ctx: DistributedContext) -> list[Any]:
        return [
            ctx.broadcast(piece(root + 1) if ctx.rank == root else "ignored", root_rank=root)
            for root in range(ranks)
        ]

    for of_rank in run_ranks(ranks, one):
        assert same(of_rank, [piece(root + 1) for root in range(ranks)])


@pytest.mark.parametrize("ranks", RANKS)
def test_gather_uneven_pieces_on_every_root(ranks):
    def one(ctx: DistributedContext) -> list[Any]:
        return [ctx.gather(piece(ctx.rank), root_rank=root) for root in range(ranks)]

    for rank, of_rank in enumerate(run_ranks(ranks, one)):
        for root, arrived in enumerate(of_rank):
            assert same(arrived, [piece(r) for r in range(ranks)] if rank == root else None)


@pytest.mark.parametrize("ranks", RANKS)
def test_scatter_uneven_chunks_from_every_root(ranks):
    def one(ctx: DistributedContext) -> list[Any]:
        return [
            ctx.scatter([piece(r) for r in range(ranks)] if ctx.rank == root else None, root_rank=root)
            for root in range(ranks)
        ]

    for rank, of_rank in enumerate(run_ranks(ranks, one)):
        assert same(of_rank, [piece(rank)] * ranks)


@pytest.mark.parametrize("rows", [0, 1, 5, 6, 17])
@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_scatter_and_all_to_all_cut_by_rows(kind, rows):
    table = torch.arange(rows * 2.0).reshape(rows, 2)
    data: Any = table if kind == "tensor" else table.numpy()

    def one(ctx: DistributedContext) -> tuple[Any, list[Any]]:
        return ctx.scatter(data if ctx.rank == 0 else None), ctx.all_to_all(data)

    results = run_ranks(3, one)
    sizes = [len(mine) for mine, _ in results]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    join: Any = torch.cat if kind == "tensor" else np.concatenate
    assert same(join([mine for mine, _ in results]), data)
    for mine, exchanged in results:
        assert same(exchanged, [mine] * 3)


@pytest.mark.parametrize("ranks", RANKS)
def test_all_gather_and_all_to_all_of_uneven_pieces(ranks):
    def one(ctx: DistributedContext) -> tuple[Any, Any]:
        chunks = [piece(ctx.rank + peer) for peer in range(ranks)]
        return ctx.all_gather(piece(ctx.rank)), ctx.all_to_all(chunks)

    for rank, (gathered, exchanged) in enumerate(run_ranks(ranks, one)):
        assert same(gathered, [piece(r) for r in range(ranks)])
        assert same(exchanged, [piece(rank + peer) for peer in range(ranks)])


def test_messages_longer_than_the_rings():
    def one(ctx: DistributedContext) -> bool:
        mine = torch.full((300_000,), float(ctx.rank))
        gathered = ctx.all_gather(mine)
        exchanged = ctx.all_to_all([mine[: 100_000 * (peer + 1)] for peer in range(3)])
        sent = ctx.broadcast(mine if ctx.rank == 2 else None, root_rank=2)
        return (
            all(torch.equal(tensor, torch.full((300_000,), float(r))) for r, tensor in enumerate(gathered))
            and all(tensor.numel() == 100_000 * (ctx.rank + 1) for tensor in exchanged)
            and torch.equal(sent, torch.full((300_000,), 2.0))
        )

    assert run_ranks(3, one) == [True] * 3


@pytest.mark.parametrize("ranks", RANKS)
def test_reduce_to_every_root(ranks):
    cases = list(
        itertools.product(range(ranks), (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MAX), (0, 7, 40_000))
    )

    def one(ctx: DistributedContext) -> list[Any]:
        return [
            ctx.reduce(whole_numbers(ctx.rank, size, torch.float32), root, op) for root, op, size in cases
        ]

    results = run_ranks(ranks, one)
    for position, (root, op, size) in enumerate(cases):
        expected = combined(op, [whole_numbers(rank, size, torch.float32) for rank in range(ranks)])
        for rank, of_rank in enumerate(results):
            assert same(of_rank[position], expected if rank == root else None)


def test_reduce_returns_the_kind_it_was_given():
    def one(ctx: DistributedContext) -> list[Any]:
        return [
            ctx.reduce([1.0, 2.0], 1),
            ctx.reduce(np.ones(2, dtype="f4"), 1),
            ctx.reduce(3, 1, "max"),
            ctx.reduce([torch.ones(1), torch.ones(2)], 1),
        ]

    nothing, results = run_ranks(2, one)
    assert nothing == [None] * 4
    assert same(results[:3], [[2.0, 4.0], np.full(2, 2, dtype="f4"), 3])
    assert same(results[3], [torch.full((1,), 2.0), torch.full((2,), 2.0)])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_reduce_scatter_of_uneven_chunks(ranks, dtype):
    ops = [op for op in ReduceOp if op is not ReduceOp.AVERAGE or dtype.is_floating_point]

    def one(ctx: DistributedContext) -> list[Tensor]:
        chunks = [whole_numbers(ctx.rank, 3 * peer, dtype, seed=peer) for peer in range(ranks)]
        return [ctx.reduce_scatter(chunks, op) for op in ops]

    for rank, of_rank in enumerate(run_ranks(ranks, one)):
        contributions = [whole_numbers(peer, 3 * rank, dtype, seed=rank) for peer in range(ranks)]
        assert same(of_rank, [combined(op, contributions) for op in ops])


def test_reduce_scatter_cuts_by_rows_and_keeps_the_kind():
    def one(ctx: DistributedContext) -> list[Any]:
        table = torch.arange(10.0).reshape(5, 2)
        return [ctx.reduce_scatter(table), ctx.reduce_scatter(table.numpy()), ctx.reduce_scatter([1.0, 2.0])]

    first, second = run_ranks(2, one)
    doubled = torch.arange(10.0).reshape(5, 2) * 2
    assert same(first, [doubled[:2], doubled[:2].numpy(), 2.0])
    assert same(second, [doubled[2:], doubled[2:].numpy(), 4.0])


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_no_rank_leaves_a_barrier_before_all_have_come(ranks):
    arrived: list[int] = []
    lock = threading.Lock()

    def one(ctx: DistributedContext) -> list[int]:
        seen = []
        for turn in range(5):
            with lock:
                arrived.append(ctx.rank)
            ctx.barrier()
            with lock:
                seen.append(len(arrived))
            assert seen[-1] >= ranks * (turn + 1)
            ctx.barrier()
        return seen

    run_ranks(ranks, one)


def test_alone_every_collective_returns_at_once():
    def one(ctx: DistributedContext) -> list[Any]:
        return [
            ctx.broadcast(1),
            ctx.scatter([2]),
            ctx.gather(3),
            ctx.all_gather(4),
            ctx.all_to_all([5]),
            ctx.reduce(6.0),
            ctx.reduce_scatter([7.0]),
            ctx.barrier(),
            ctx.all_reduce(8.0, "average"),
        ]

    assert run_ranks(1, one) == [[1, 2, [3], [4], [5], 6.0, 7.0, None, 8.0]]
    assert run_ranks(1, lambda ctx: (ctx.rank, ctx.world_size, ctx.is_master)) == [(0, 1, True)]
