"""Errors name ranks by their labels, the slots of a supervised view, and never by the view index."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.comm.views import Job

from paceline.comm.collectives.shard_sums import ShardOwnership
from paceline.comm.context import DistributedContext
from paceline.comm.state_transfer import receive_state, send_state
from paceline.core.errors import (
    CommTimeoutError,
    CorruptDataError,
    DisagreementError,
    GroupInterruptedError,
    PeerLostError,
)
from paceline.testing.thread_transport import run_ranks

SLOTS = (0, 2, 3)


def disagree(ctx: DistributedContext) -> DisagreementError:
    with pytest.raises(DisagreementError) as caught:
        ctx.all_reduce(torch.ones(3 + (ctx.rank == 1)))
    return caught.value


def wait_too_short(ctx: DistributedContext, done: threading.Barrier) -> CommTimeoutError | None:
    error = None
    if ctx.rank == 0:
        with pytest.raises(CommTimeoutError) as caught:
            ctx.receive(2, timeout=0.2)
        error = caught.value
    done.wait(30)
    return error


def lose(ctx: DistributedContext) -> PeerLostError | None:
    if ctx.rank == 2:
        ctx.close(ValueError("out of beans"))
        return None
    with pytest.raises(PeerLostError) as caught:
        ctx.barrier(timeout=20)
    return caught.value


def damage(ctx: DistributedContext) -> CorruptDataError:
    data = torch.full((ctx.world_size * 4000,), 1.0)
    ownership = ShardOwnership(3, ((0,), (1,), (2,)))

    def spoil() -> None:
        if ctx.rank == 1:
            data[:] += 1.0

    with pytest.raises(CorruptDataError) as caught:
        ctx.fold_partials([data], ownership, torch.empty_like(data), checksum=True, after_checksum=spoil)
    return caught.value


def hold_differently(ctx: DistributedContext) -> DisagreementError:
    blocks = ((1,), (0,), (2,)) if ctx.rank == 2 else ((0,), (1,), (2,))
    data = torch.ones(5)
    with pytest.raises(DisagreementError) as caught:
        ctx.fold_partials([data], ShardOwnership(3, blocks), torch.empty_like(data))
    return caught.value


def in_threads(fn, *args):
    return run_ranks(3, fn, *args, labels=SLOTS)


def over_hosts(fn, *args):
    with Job(4) as job:
        return job.view(SLOTS, ("a", "b", "c"), 1, lambda ctx: fn(ctx, *args))


def over_two_hosts(fn, *args):
    with Job(4) as job:
        return job.view(SLOTS, ("a", "a", "b"), 1, lambda ctx: fn(ctx, *args))


@pytest.fixture(params=[in_threads, over_hosts, over_two_hosts])
def run(request):
    return request.param


def test_a_disagreement_lists_slots(run):
    for error in run(disagree):
        assert set(error.calls) == set(SLOTS)
        assert "rank 3:" in str(error)
        assert "rank 1" not in str(error)


def test_the_shards_in_the_text_of_a_call_are_listed_by_slot(run):
    for error in run(hold_differently):
        assert "fold_partials(shards=3, by rank {0: [0], 2: [1], 3: [2]}" in str(error)


def test_a_timeout_names_the_slot_that_is_late(run):
    error = run(wait_too_short, threading.Barrier(3))[0]
    assert error.waiting_for == (3,)
    assert "receive(source_rank=3)" in str(error)
    assert "rank 0 waited" in str(error)
    assert "rank 1" not in str(error)


def test_an_operation_that_is_awaited_names_the_slot(run):
    def one(ctx: DistributedContext) -> str:
        if ctx.rank == 0:
            receiving = ctx.receive(2, async_op=True)
            with pytest.raises(CommTimeoutError) as caught:
                receiving.wait(0.0)
            ctx.send("go", 2)
            assert receiving.wait(30) == "done"
            return str(caught.value)
        if ctx.rank == 2:
            ctx.receive(0)
            ctx.send("done", 0)
        return ""

    assert "receive(source_rank=3) was still under way" in run(one)[0]


def test_a_lost_rank_is_named_by_its_slot(run):
    for error in run(lose)[:2]:
        assert error.ranks == (3,)
        assert "rank 3 failed" in str(error)


def test_damaged_data_is_named_by_its_slot(run):
    for error in run(damage):
        assert error.rank == 2
        assert "rank 2" in str(error)
        assert "rank 1" not in str(error)


def test_roots_and_interruptions_name_slots():
    def one(ctx: DistributedContext) -> str:
        assert ctx.broadcast(ctx.rank, root_rank=1) == 1  # arguments are view indexes
        ctx.barrier()
        ctx.interrupt("the view is over")
        with pytest.raises(GroupInterruptedError) as caught:
            ctx.barrier()
        return str(caught.value)

    texts = run_ranks(3, one, labels=SLOTS)
    assert [f"rank {slot} was taken out" in text for slot, text in zip(SLOTS, texts, strict=True)] == [
        True
    ] * 3


def test_a_state_transfer_works_by_view_index_and_talks_in_slots():
    def one(ctx: DistributedContext) -> float:
        if ctx.rank == 2:
            send_state(ctx, [1], {"w": torch.full((5,), 4.0)}, {})
        elif ctx.rank == 1:
            tensors, _ = receive_state(ctx, 2)
            return float(tensors["w"][0])
        return 4.0

    assert run_ranks(3, one, labels=SLOTS) == [4.0] * 3


def test_a_view_that_does_not_form_names_slots():
    with Job(4) as job:
        with pytest.raises(Exception, match="rank 2 at view 1") as caught:
            job.open(0, (0, 2), ("a", "b"), 1, forming_seconds=0.2)
        assert "rank 1" not in str(caught.value)
