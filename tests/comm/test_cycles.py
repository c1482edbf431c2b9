"""Groups come and go; nothing stays."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from tests.comm.ranks import LARGE, processes

from paceline.comm.context import DistributedContext
from paceline.core.errors import DisagreementError
from paceline.testing import leaks
from paceline.testing.thread_transport import run_ranks


def _work(ctx: Any, turn: int) -> float:
    total = ctx.all_reduce(torch.full((10,), float(turn)))
    if turn % 10 == 0:
        shared = ctx.empty(LARGE)
        ctx.all_reduce(shared.fill_(1), out=shared)
        ctx.all_gather(ctx.all_reduce([1.0], async_op=True).wait(10))
        ctx.send(turn, 1 - ctx.rank, async_op=True).wait(10)
        ctx.receive(async_op=True).wait(10)
    return float(total[0])


def test_sixty_groups_of_processes_leave_nothing():
    processes(_work, 0)  # what is started once and kept: the warm server
    before = leaks.snapshot()
    for turn in range(60):
        assert processes(_work, turn) == [2.0 * turn] * 2
    assert leaks.since(before) == []


def test_groups_of_threads_leave_nothing_even_without_the_collector():
    """Mappings and descriptors go with the context, not some time later."""
    before = leaks.snapshot()
    gc.disable()
    try:
        for turn in range(20):
            run_ranks(2, _work, turn)
        now = leaks.snapshot()
    finally:
        gc.enable()
    assert now.descriptors == before.descriptors
    assert now.threads == before.threads


def test_a_group_that_broke_leaves_nothing():
    def one(ctx: DistributedContext) -> str:
        try:
            ctx.all_reduce(torch.ones(2 + ctx.rank))
        except Exception as error:
            return type(error).__name__
        return ""

    before = leaks.snapshot()
    for _ in range(5):
        assert run_ranks(2, one) == ["DisagreementError"] * 2
    assert leaks.since(before) == []


def test_a_broken_group_goes_away_without_the_collector():
    """The error that broke it stays; the group's memory does not."""

    def one(ctx: DistributedContext) -> tuple[weakref.ref[Any], str]:
        try:
            ctx.all_reduce(torch.ones(2 + ctx.rank))
        except DisagreementError as error:
            ctx.close(error)
            return weakref.ref(ctx.transport), error.message
        raise AssertionError("no rank noticed")

    gc.disable()
    try:
        found = run_ranks(2, one)
        assert [transport() for transport, _ in found] == [None, None]
    finally:
        gc.enable()
