"""Tensors and arrays that a rank passes are filled in place and returned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.comm.context import DistributedContext
from paceline.core.errors import UsageError
from paceline.data.partition import DataPartitioner
from paceline.testing.thread_transport import run_ranks


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_broadcast_fills_in_place(kind: Any) -> None:
    def rank(ctx: DistributedContext) -> None:
        data = kind([1.0, 2.0, 3.0]) * (ctx.rank + 1)
        assert ctx.broadcast(data, 1) is data
        assert data.tolist() == [2.0, 4.0, 6.0]
        waited = kind([float(ctx.rank)])
        assert ctx.broadcast(waited, root_rank=2, async_op=True).wait() is waited
        assert waited.tolist() == [2.0]
        # Without memory to fill the value comes back.
        assert ctx.broadcast("text" if ctx.rank == 0 else None) == "text"

    run_ranks(3, rank)


def test_a_buffer_that_does_not_fit_is_refused_where_it_is() -> None:
    def rank(ctx: DistributedContext) -> None:
        if ctx.rank == 0:
            ctx.broadcast(torch.zeros(3))
        else:
            with pytest.raises(UsageError, match=r"broadcast: float32\[3\] does not fit into int64\[3\]"):
                ctx.broadcast(torch.zeros(3, dtype=torch.int64))
        fixed = np.zeros(2)
        fixed.flags.writeable = False
        if ctx.rank == 0:
            ctx.broadcast(fixed)
        else:
            with pytest.raises(UsageError, match="read-only"):
                ctx.broadcast(fixed)
        ctx.barrier()  # the group is whole

    run_ranks(2, rank)


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_scatter_and_gather_take_a_buffer(kind: Any) -> None:
    def rank(ctx: DistributedContext) -> None:
        send = kind([[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]) if ctx.rank == 1 else None
        recv = kind([0.0, 0.0])
        assert ctx.scatter(send, recv, 1) is recv
        assert recv.tolist() == [10.0 * ctx.rank, 10.0 * ctx.rank + 1]
        row = kind([[0.0, 0.0]])
        assert ctx.scatter(send, row, root_rank=1).shape == (1, 2)

        stacked = kind([[0.0, 0.0]] * 3)
        result = ctx.gather(recv, stacked, 2)
        if ctx.rank == 2:
            assert result is stacked
            assert stacked.tolist() == [[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]
        else:
            assert result is None
        joined = kind([0.0] * 6)
        ctx.gather(recv, joined, root_rank=0)
        assert joined.tolist() == ([0.0, 1.0, 10.0, 11.0, 20.0, 21.0] if ctx.rank == 0 else [0.0] * 6)
        # A rank in the place of the buffer, as before.
        found = ctx.gather(ctx.rank, 1)
        assert found == ([0, 1, 2] if ctx.rank == 1 else None)
        if ctx.rank == 0:
            with pytest.raises(UsageError, match=r"gather: float\d+\[4\] for 3 ranks"):
                ctx.gather(recv, kind([0.0] * 4))
        else:
            ctx.gather(recv)

    run_ranks(3, rank)


def test_totals_are_attributes() -> None:
    def rank(ctx: DistributedContext) -> None:
        ctx.enable_profiling()
        ctx.all_reduce(torch.ones(1000))
        stats = ctx.get_communication_stats()
        assert stats.bytes_sent == stats["total"]["bytes_sent"] > 0
        assert stats.messages_count == stats["total"]["messages"]

    run_ranks(2, rank)


def test_total_samples_is_another_name() -> None:
    assert DataPartitioner(total_samples=10, world_size=4).get_partition(3) == (8, 10)
    with pytest.raises(UsageError, match="both are given"):
        DataPartitioner(10, 4, total_samples=10)
    with pytest.raises(UsageError, match="neither is given"):
        DataPartitioner(world_size=4)
    with pytest.raises(UsageError, match="total_samples=-1"):
        DataPartitioner(total_samples=-1, world_size=2)
