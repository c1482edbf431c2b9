"""What profiling counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.comm.collectives.call_queue import CommunicationStats
from paceline.comm.context import DistributedContext
from paceline.testing.thread_transport import run_ranks


def test_nothing_is_counted_until_it_is_asked_for():
    def one(ctx: DistributedContext) -> Any:
        ctx.all_reduce([1.0])
        before = ctx.get_communication_stats()
        ctx.enable_profiling()
        ctx.all_reduce([1.0])
        ctx.enable_profiling(False)
        ctx.all_reduce([1.0])
        return before, ctx.get_communication_stats()

    for before, after in run_ranks(2, one):
        assert before["operations"] == {}
        assert before["total"]["calls"] == 0
        assert after["operations"]["all_reduce"]["direct"]["calls"] == 1


def test_every_operation_and_algorithm_has_an_entry_of_its_own():
    def one(ctx: DistributedContext) -> Any:
        ctx.enable_profiling()
        for algorithm in ("direct", "ring", "tree", "canonical", "hierarchical", "ring"):
            ctx.all_reduce(torch.ones(8), "sum", algorithm)
        ctx.all_reduce(torch.ones(8))
        ctx.barrier()
        ctx.broadcast(torch.ones(5))
        ctx.all_gather(torch.ones(5))
        ctx.all_to_all([torch.ones(5)] * 2)
        ctx.gather(1)
        ctx.scatter([1, 2])
        ctx.reduce(1.0)
        ctx.reduce_scatter([1.0, 2.0])
        ctx.canonical_sum({ctx.rank: torch.ones(2)}, shards=2)
        if ctx.rank == 0:
            ctx.send(torch.ones(100), 1)
        else:
            ctx.receive(0)
        return ctx.get_communication_stats()

    for rank, stats in enumerate(run_ranks(2, one)):
        operations = stats["operations"]
        calls = {name: tally["calls"] for name, tally in operations["all_reduce"].items()}
        assert calls == {"direct": 2, "ring": 2, "tree": 1, "canonical": 1, "hierarchical": 1}
        message = "send" if rank == 0 else "receive"
        assert set(operations) == {
            "all_reduce",
            "barrier",
            "broadcast",
            "all_gather",
            "all_to_all",
            "gather",
            "scatter",
            "reduce",
            "reduce_scatter",
            "canonical_sum",
            message,
        }
        assert stats["total"]["calls"] == 7 + 10
        entry = operations[message]["-"]
        assert entry["calls"] == 1
        assert entry["bytes_sent" if rank == 0 else "bytes_received"] >= 400
        for of_operation in operations.values():
            for tally in of_operation.values():
                assert tally["seconds"] > 0
                moved = tally["bytes_sent"] + tally["bytes_received"]
                assert tally["bandwidth"] == pytest.approx(moved / tally["seconds"])


def test_moved_bytes_are_counted_as_they_travel():
    def one(ctx: DistributedContext) -> Any:
        ctx.enable_profiling()
        ctx.all_gather(torch.ones(1000))
        ctx.reduce_scatter([torch.ones(1000)] * 3)
        return ctx.get_communication_stats()["operations"]

    for operations in run_ranks(3, one):
        gathered = operations["all_gather"]["-"]
        # Two peers: sizes (16 bytes) first, then a short head and the data.
        assert 2 * (4000 + 16) < gathered["bytes_sent"] < 2 * (4000 + 16 + 100)
        assert gathered["messages"] == 2 * 3
        assert gathered["header_bytes"] == 32 * 6
        reduced = operations["reduce_scatter"]["direct"]
        assert reduced["bytes_sent"] == reduced["bytes_received"] == 2 * 4000


def test_asynchronous_calls_are_counted():
    def one(ctx: DistributedContext) -> Any:
        ctx.enable_profiling()
        for handle in [ctx.all_reduce(torch.ones(100), "sum", "ring", async_op=True) for _ in range(3)]:
            handle.wait(10)
        return ctx.get_communication_stats()["operations"]["all_reduce"]["ring"]

    for tally in run_ranks(2, one):
        assert tally["calls"] == 3
        assert tally["bytes_sent"] == 3 * 400


def test_profiling_does_not_change_results():
    def one(ctx: DistributedContext) -> Any:
        plain = ctx.all_reduce(torch.full((5,), 0.1))
        ctx.enable_profiling()
        return torch.equal(plain, ctx.all_reduce(torch.full((5,), 0.1)))

    assert run_ranks(3, one) == [True] * 3


def test_a_tally_without_time_has_no_bandwidth():
    stats = CommunicationStats()
    stats.record("send", "", (0, 0, 0, 0, 0, 0), (1, 5, 0, 32, 0, 0), 0.0)
    assert stats.report()["total"]["bandwidth"] == 0.0


def test_tallies_add_up():
    stats = CommunicationStats()
    stats.record("all_reduce", "ring", (0, 0, 0, 0, 0, 0), (1, 10, 20, 32, 5, 2), 0.5)
    stats.record("all_reduce", "ring", (1, 10, 20, 32, 5, 2), (2, 11, 22, 64, 5, 3), 0.5)
    stats.record("barrier", "", (2, 11, 22, 64, 5, 3), (2, 11, 22, 64, 5, 4), 1.0)
    plain = stats.report()
    ring = plain["operations"]["all_reduce"]["ring"]
    assert ring == {
        "calls": 2,
        "messages": 2,
        "bytes_sent": 11,
        "bytes_received": 22,
        "header_bytes": 64,
        "bytes_between_hosts": 5,
        "rounds": 3,
        "seconds": 1.0,
        "bandwidth": 33.0,
    }
    assert plain["total"]["calls"] == 3
    assert plain["total"]["seconds"] == 2.0
    stats.clear()
    assert stats.report()["operations"] == {}
