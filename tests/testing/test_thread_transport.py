"""Ranks as threads: results, failures and their order."""

from __future__ import annotations

import threading

import pytest
import torch

from paceline.comm.context import DistributedContext
from paceline.core.errors import CommTimeoutError
from paceline.testing.thread_transport import run_ranks


def test_results_come_by_rank() -> None:
    def main(ctx: DistributedContext, offset: int) -> tuple[int, float]:
        return ctx.rank + offset, ctx.all_reduce(torch.ones(3))[0].item()

    assert run_ranks(4, main, 10) == [(10 + rank, 4.0) for rank in range(4)]


def test_the_cause_comes_first() -> None:
    def main(ctx: DistributedContext) -> None:
        if ctx.rank == 2:
            raise KeyError("mine")
        ctx.barrier()

    with pytest.raises(KeyError, match="mine"):
        run_ranks(3, main)


def test_ranks_that_do_not_end() -> None:
    release = threading.Event()

    def main(ctx: DistributedContext) -> None:
        if ctx.rank == 0:
            release.wait()
        else:
            try:
                ctx.receive(0)
            finally:
                release.set()

    with pytest.raises(CommTimeoutError) as caught:
        run_ranks(2, main, timeout=0.5)
    assert caught.value.waiting_for


def test_one_rank() -> None:
    assert run_ranks(1, lambda ctx: ctx.world_size) == [1]
