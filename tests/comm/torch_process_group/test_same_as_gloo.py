"""Every collective of torch.distributed gives on the backend "paceline" what it gives on Gloo."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.torch_process_group.torch_ranks import gloo_group, torch_ranks
from torch import Tensor
from torch.distributed import ReduceOp

SMALL, LARGE = 7, 300_007
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers: exact in every dtype and every order."""
    return ((torch.arange(count) + 3 * rank) % 4 + 1).to(dtype)


def compare(run: Callable[[Any], Any], other: Any) -> None:
    ours, theirs = run(None), run(other)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def reductions(rank: int) -> None:
    gloo = gloo_group()

    def reduced(group: Any, op: Any, dtype: torch.dtype, count: int) -> list[Tensor]:
        summed, at_root = values(rank, count, dtype), values(rank, count, dtype)
        dist.all_reduce(summed, op, group=group)
        dist.reduce(at_root, 1, op, group=group)
        return [summed, at_root] if rank == 1 else [summed]

    for count in (0, 1, SMALL, LARGE):
        for dtype in DTYPES if count == SMALL else (torch.float32, torch.int64):
            for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
                compare(partial(reduced, op=op, dtype=dtype, count=count), gloo)
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        compare(partial(reduced, op=op, dtype=torch.int32, count=SMALL), gloo)
    compare(lambda group: reduced(group, ReduceOp.AVG, torch.float32, SMALL), gloo)
    compare(lambda group: reduced(group, ReduceOp.SUM, torch.complex64, SMALL), gloo)

    def strided(group: Any) -> Tensor:
        """Gloo takes the first elements of the memory in place of a view's; the view's are meant."""
        grid = values(rank, 6 * LARGE).view(6, -1)
        for view, call in (
            (grid[:, ::2], dist.all_reduce),
            (grid.t()[1::2], lambda part, group: dist.broadcast(part, 1, group)),
        ):
            part = view if group is None else view.contiguous()
            call(part, group=group)
            view.copy_(part)
        return grid

    compare(strided, gloo)

    def coalesced(group: Any) -> list[Tensor]:
        tensors = [values(rank, 5), values(rank, LARGE), values(rank, 6).view(2, 3)]
        dist.all_reduce_coalesced(tensors, group=group)
        return tensors

    compare(coalesced, gloo)

    def sparse(group: Any) -> Tensor:
        tensor = torch.sparse_coo_tensor(
            torch.tensor([[rank, 4], [1, rank]]), torch.tensor([1.0, 2.0]), (5, 5)
        )
        dist.all_reduce(tensor, group=group)
        return tensor.to_dense()

    compare(sparse, gloo)


@pytest.mark.parametrize("hosts", [1, 3])
def test_reductions(hosts):
    torch_ranks(reductions, workers=3, hosts=hosts)


def sixteen_bits(rank: int) -> list[Any]:
    """2049 is no fp16: the sum of these depends on whether it is rounded once or after each addition."""
    sparse = torch.tensor([2048.0, 1.0, 1.0][rank : rank + 1], dtype=torch.float16).to_sparse()
    dense = torch.tensor([[2048.0, 1.0, 1.0][rank]], dtype=torch.float16)
    dist.all_reduce(sparse)
    dist.all_reduce(dense)
    return [sparse.dtype, sparse.to_dense().item(), dense.item()]


def test_sparse_sums_of_16_bits_are_rounded_once():
    assert torch_ranks(sixteen_bits, workers=3) == [[torch.float16, 2050.0, 2050.0]] * 3


def movements(rank: int) -> None:
    gloo = gloo_group()
    size = dist.get_world_size()

    def moved(group: Any, count: int, dtype: torch.dtype) -> list[Tensor]:
        mine = values(rank, count, dtype)
        sent = mine.clone()
        dist.broadcast(sent, 2, group=group)
        gathered = [torch.zeros_like(mine) for _ in range(size)]
        dist.all_gather(gathered, mine, group=group)
        at_root = [torch.zeros_like(mine) for _ in range(size)] if rank == 1 else None
        dist.gather(mine, at_root, dst=1, group=group)
        part = torch.zeros_like(mine)
        dist.scatter(part, [mine + peer for peer in range(size)] if rank == 2 else None, src=2, group=group)
        whole = torch.zeros(count * size, dtype=dtype)
        dist.all_gather_into_tensor(whole, mine, group=group)
        slices = values(rank, count * size, dtype)
        summed = torch.zeros(count, dtype=dtype)
        dist.reduce_scatter_tensor(summed, slices, group=group)
        listed = torch.zeros(count, dtype=dtype)
        dist.reduce_scatter(listed, list(slices.chunk(size)) if count else [mine] * size, group=group)
        crossed = torch.zeros(count * size, dtype=dtype)
        dist.all_to_all_single(crossed, slices, group=group)
        return [sent, *gathered, *(at_root or []), part, whole, summed, listed, crossed]

    # Gloo refuses lists with tensors of different sizes.
    outs = [torch.zeros(rank + peer + 1) for peer in range(size)]
    dist.all_to_all(outs, [values(rank, rank + peer + 1) for peer in range(size)])
    assert all(torch.equal(out, values(peer, rank + peer + 1)) for peer, out in enumerate(outs))
    for count in (0, 1, SMALL, LARGE):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            compare(partial(moved, count=count, dtype=dtype), gloo)

    def uneven(group: Any) -> list[Tensor]:
        # Rank r sends (r + peer) % 3 rows to each peer.
        rows_in = [(rank + peer) % 3 for peer in range(size)]
        out = torch.zeros(sum(rows_in), 4)
        given = values(rank, 4 * sum(rows_in)).view(-1, 4)
        dist.all_to_all_single(out, given, rows_in, rows_in, group=group)
        outs = [torch.zeros(5) for _ in range(size)]
        dist.all_to_all(outs, [values(rank + peer, 5) for peer in range(size)], group=group)
        return [out, *outs]

    compare(uneven, gloo)

    def equal_on_some(group: Any, count: int) -> list[Tensor]:
        # Rank 0 says how its rows are cut, equally as well, the others do not.
        rows = [count] * size if rank == 0 else None
        out = torch.zeros(count * size)
        dist.all_to_all_single(out, values(rank, count * size), rows, rows, group=group)
        return [out]

    for count in (1, SMALL, LARGE):
        compare(partial(equal_on_some, count=count), gloo)

    def uneven_on_some(group: Any) -> list[Tensor]:
        # Ranks 1 and 2 exchange a row more than the others do, and rank 0 has equal parts.
        more = [int({rank, peer} == {1, 2}) for peer in range(size)]
        rows = [3 + extra for extra in more] if any(more) else None
        out = torch.zeros(3 * size + sum(more), 1000)
        dist.all_to_all_single(out, values(rank, out.numel()).view(-1, 1000), rows, rows, group=group)
        return [out]

    compare(uneven_on_some, gloo)

    def coalesced(group: Any) -> list[Tensor]:
        outs = [[torch.zeros(3), torch.zeros(2, 2)] for _ in range(size)]
        dist.all_gather_coalesced(outs, [values(rank, 3), values(rank, 4).view(2, 2)], group=group)
        return [tensor for out in outs for tensor in out]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates it, and still has it
        compare(coalesced, gloo)

    def objects(group: Any) -> list[Any]:
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, {"rank": rank, "text": "x" * 100 * rank}, group=group)
        shared = [("from", rank)]
        dist.broadcast_object_list(shared, 1, group=group)
        part: list[Any] = [None]
        dist.scatter_object_list(part, [f"to {peer}" for peer in range(size)], 0, group=group)
        at_root = [None] * size if rank == 1 else None
        dist.gather_object(("of", rank), at_root, 1, group=group)
        told: list[Any] = [None, None]
        if rank == 0:
            dist.send_object_list([{"a": 1}, "x" * 1000], 1, group=group)
        elif rank == 1:
            dist.recv_object_list(told, 0, group=group)
        return [*gathered, *shared, *part, at_root, *told]

    assert objects(None) == objects(gloo)
    dist.barrier()


@pytest.mark.parametrize(("workers", "hosts"), [(3, 1), (3, 3), (4, 2)])
def test_movements(workers, hosts):
    """Through shared memory, over connections, and through both."""
    torch_ranks(movements, workers=workers, hosts=hosts)


def messages(rank: int) -> list[Any]:
    def crossed(group: Any) -> Any:
        """Receives that were posted in the other order than the messages come."""
        tensors = [torch.zeros(3), torch.zeros(LARGE)]
        if rank == 0:
            for tag in (1, 0):
                dist.send(torch.full((len(tensors[tag]),), float(tag)), 1, group=group, tag=tag)
            return tensors
        works = [dist.irecv(tensors[tag], 0, group=group, tag=tag) for tag in (0, 1)]
        for work in works:
            assert work is not None
            work.wait()
        return [tensor.mean().item() for tensor in tensors]

    def beside_a_collective(group: Any) -> Any:
        """A receive that is posted lets the sender end while its rank is in a collective."""
        large = torch.full((4_000_000,), float(rank))
        work = dist.irecv(large, 0, group=group) if rank == 1 else None
        if rank == 0:
            dist.send(large, 1, group=group)
        dist.barrier(group=group)
        if work is not None:
            work.wait()
        return large[0].item()

    def any_source(group: Any) -> Any:
        got = torch.zeros(2)
        if rank == 1:
            return dist.recv(got, group=group), got.tolist()
        dist.send(torch.tensor([5.0, 6.0]), 1, group=group)
        return None

    def both_ways(group: Any) -> Any:
        peer, got = 1 - rank, torch.zeros(LARGE)
        operations = [
            dist.P2POp(dist.isend, torch.full((LARGE,), float(rank)), peer, group),
            dist.P2POp(dist.irecv, got, peer, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return got.mean().item()

    return [call(None) for call in (crossed, beside_a_collective, any_source, both_ways)]


@pytest.mark.parametrize("hosts", [1, 2])
def test_messages(hosts):
    first, second = torch_ranks(messages, hosts=hosts)
    assert second == [[0.0, 1.0], 0.0, (0, [5.0, 6.0]), 0.0]
    assert first[1:] == [0.0, None, 1.0]
