"""Ranks that do not fit together: all get an error that names each rank's call and line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.comm.ranks import LARGE, outcomes, processes

from paceline.comm.context import DistributedContext
from paceline.comm.transport import wait_watch
from paceline.core.errors import CommTimeoutError, DisagreementError, PacelineError, PeerLostError
from paceline.testing.thread_transport import run_ranks

HERE = "test_disagreement.py:"

# (what rank 0 does, what the others do, words in rank 0's call, words in theirs)
Calls = Callable[[DistributedContext], Any]
CASES: dict[str, tuple[Calls, Calls, str, str]] = {
    "shape": (
        lambda ctx: ctx.all_reduce(torch.ones(3)),
        lambda ctx: ctx.all_reduce(torch.ones(4)),
        "float32[3]",
        "float32[4]",
    ),
    "shape of large tensors": (
        lambda ctx: ctx.all_reduce(torch.ones(LARGE)),
        lambda ctx: ctx.all_reduce(torch.ones(LARGE + 1)),
        f"float32[{LARGE}]",
        f"float32[{LARGE + 1}]",
    ),
    "same elements in another shape": (
        lambda ctx: ctx.all_reduce(torch.ones(2, 3)),
        lambda ctx: ctx.all_reduce(torch.ones(3, 2)),
        "float32[2, 3]",
        "float32[3, 2]",
    ),
    "small and large": (
        lambda ctx: ctx.all_reduce(torch.ones(3)),
        lambda ctx: ctx.all_reduce(torch.ones(LARGE)),
        "float32[3]",
        f"float32[{LARGE}]",
    ),
    "large and small": (
        lambda ctx: ctx.all_reduce(torch.ones(LARGE)),
        lambda ctx: ctx.all_reduce(torch.ones(3)),
        f"float32[{LARGE}]",
        "float32[3]",
    ),
    "dtype": (
        lambda ctx: ctx.all_reduce(torch.ones(3)),
        lambda ctx: ctx.all_reduce(torch.ones(3, dtype=torch.int32)),
        "float32[3]",
        "int32[3]",
    ),
    "operation": (
        lambda ctx: ctx.all_reduce(torch.ones(3), "sum"),
        lambda ctx: ctx.all_reduce(torch.ones(3), "max"),
        "SUM",
        "MAX",
    ),
    "algorithm": (
        lambda ctx: ctx.all_reduce(torch.ones(3), "sum", "ring"),
        lambda ctx: ctx.all_reduce(torch.ones(3), "sum", "tree"),
        "ring",
        "tree",
    ),
    "window and messages": (
        lambda ctx: ctx.all_reduce(torch.ones(3), "sum", "direct"),
        lambda ctx: ctx.all_reduce(torch.ones(3), "sum", "ring"),
        "direct",
        "ring",
    ),
    "shape in a ring": (
        lambda ctx: ctx.all_reduce(torch.ones(9), "sum", "ring"),
        lambda ctx: ctx.all_reduce(torch.ones(12), "sum", "ring"),
        "float32[9]",
        "float32[12]",
    ),
    "shape of a large ring": (
        lambda ctx: ctx.all_reduce(torch.ones(400_000), "sum", "ring"),
        lambda ctx: ctx.all_reduce(torch.ones(400_001), "sum", "ring"),
        "float32[400000]",
        "float32[400001]",
    ),
    "root": (
        lambda ctx: ctx.reduce(1.0, root_rank=0),
        lambda ctx: ctx.reduce(1.0, root_rank=1),
        "root_rank=0",
        "root_rank=1",
    ),
    "kind of call": (lambda ctx: ctx.barrier(), lambda ctx: ctx.all_gather(1), "barrier()", "all_gather()"),
    "kind of movement": (
        lambda ctx: ctx.gather(1),
        lambda ctx: ctx.scatter([1] * ctx.world_size),
        "gather(",
        "scatter(",
    ),
    "order": (
        lambda ctx: (ctx.all_gather(1), ctx.barrier()),
        lambda ctx: (ctx.barrier(), ctx.all_gather(1)),
        "all_gather()",
        "barrier()",
    ),
    "shards": (
        lambda ctx: ctx.canonical_sum({0: torch.ones(1)}, shards=3),
        lambda ctx: ctx.canonical_sum({ctx.rank: torch.ones(1)}, shards=4),
        "shards=3",
        "shards=4",
    ),
    "chunks": (
        lambda ctx: ctx.reduce_scatter([torch.ones(1)] * ctx.world_size),
        lambda ctx: ctx.reduce_scatter([torch.ones(2)] * ctx.world_size),
        "float32[1]",
        "float32[2]",
    ),
    "one collective more": (
        lambda ctx: (ctx.all_reduce([1.0]), ctx.all_reduce([1.0, 2.0]), ctx.barrier()),
        lambda ctx: (ctx.all_reduce([1.0]), ctx.barrier()),
        "all_reduce(",
        "barrier()",
    ),
}


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_is_told_what_each_called_and_where(name, ranks):
    first, others, word, other_word = CASES[name]
    start = time.monotonic()
    errors = outcomes(ranks, lambda ctx: first(ctx) if ctx.rank == 0 else others(ctx))
    assert time.monotonic() - start < 5
    for error in errors:
        assert isinstance(error, DisagreementError), error
        assert set(error.calls) == set(range(ranks))
        assert word in error.calls[0]
        assert all(other_word in error.calls[rank] for rank in range(1, ranks))
        assert all(HERE in call for call in error.calls.values())
        assert all(call in str(error) for call in error.calls.values())
        assert error.remedy


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "call", [lambda ctx, root: ctx.broadcast(ctx.rank, root), lambda ctx, root: ctx.gather(ctx.rank, root)]
)
def test_roots_that_differ_are_found_at_the_next_call_at_the_latest(call, ranks):
    """A root that only sends need not wait for any rank, but what it did must not pass for something else."""

    def one(ctx: DistributedContext) -> Any:
        call(ctx, 0 if ctx.rank == 0 else 1)
        ctx.barrier()
        return ctx.all_gather(ctx.rank)

    for error in outcomes(ranks, one):
        assert isinstance(error, DisagreementError), error
        assert any("root_rank" in text for text in error.calls.values())


def test_the_line_is_the_caller_s_own():
    def one(ctx: DistributedContext) -> None:
        if ctx.rank == 0:
            ctx.all_reduce(torch.ones(1))  # line A
        else:
            ctx.all_reduce(torch.ones(2))  # line B

    start = one.__code__.co_firstlineno
    for error in outcomes(2, one):
        assert error.calls[0].endswith(f"{HERE}{start + 2}")
        assert error.calls[1].endswith(f"{HERE}{start + 4}")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A circle is certain sooner; one test below waits as long as all others do."""
    monkeypatch.setattr(wait_watch, "STABLE_SECONDS", 0.2)


@pytest.mark.usefixtures("impatient")
def test_a_collective_against_a_receive_is_a_circle():
    ranks = 4
    start = time.monotonic()
    errors = outcomes(ranks, lambda ctx: ctx.receive(1) if ctx.rank == 0 else ctx.all_reduce([1.0]))
    assert time.monotonic() - start < 5
    for error in errors:
        assert isinstance(error, DisagreementError)
        assert "receive(source_rank=1)" in error.calls[0]
        assert all("all_reduce" in error.calls[rank] for rank in range(1, ranks))
        assert all(HERE in call for call in error.calls.values())


@pytest.mark.usefixtures("impatient")
def test_all_ranks_receive():
    for error in outcomes(3, lambda ctx: ctx.receive((ctx.rank + 1) % 3)):
        assert isinstance(error, DisagreementError)
        assert "circle" in str(error)
        assert [f"source_rank={(rank + 1) % 3}" in error.calls[rank] for rank in range(3)] == [True] * 3


def test_a_send_that_no_rank_takes_is_a_circle():
    def one(ctx: DistributedContext) -> None:
        if ctx.rank == 0:
            ctx.send(torch.ones(1_000_000), 1)
        ctx.barrier()

    for error in outcomes(2, one):
        assert isinstance(error, DisagreementError)
        assert "send(dest_rank=1" in error.calls[0]
        assert "barrier()" in error.calls[1]


@pytest.mark.parametrize(
    "call",
    [
        lambda ctx: ctx.all_reduce([1.0]),
        lambda ctx: ctx.all_reduce(torch.ones(LARGE)),
        lambda ctx: ctx.all_reduce(torch.ones(9), "sum", "ring"),
        lambda ctx: ctx.all_gather(1),
        lambda ctx: ctx.receive(1),
        lambda ctx: ctx.send(torch.ones(1_000_000), 1),
    ],
    ids=["small", "large", "ring", "all_gather", "receive", "send"],
)
def test_a_rank_that_has_returned_is_missing(call):
    start = time.monotonic()
    results = outcomes(3, lambda ctx: None if ctx.rank == 1 else call(ctx))
    assert time.monotonic() - start < 5
    assert results[1] is None
    error = results[0]
    assert isinstance(error, DisagreementError)
    assert "rank 1 finished without taking part" in str(error)
    assert "finished and left" in error.calls[1]
    assert HERE in error.calls[0]


def test_receive_from_any_rank_when_all_have_left():
    results = outcomes(3, lambda ctx: ctx.receive() if ctx.rank == 0 else None)
    assert isinstance(results[0], DisagreementError)
    assert results[1:] == [None, None]


def test_messages_that_were_sent_before_leaving_still_arrive():
    left = threading.Event()

    def one(ctx: DistributedContext) -> Any:
        if ctx.rank == 1:
            ctx.send("last words", 0)
            ctx.close()
            left.set()
            return None
        assert left.wait(10)
        return ctx.receive(1)

    assert run_ranks(2, one)[0] == "last words"


def test_a_peer_that_raises_is_named_with_its_reason():
    entered = threading.Event()

    def one(ctx: DistributedContext) -> Any:
        if ctx.rank == 2:
            assert entered.wait(10)
            error = RuntimeError("out of luck")
            ctx.close(error)
            return error
        entered.set()
        return ctx.barrier()

    results = outcomes(3, one)
    for error in results[:2]:
        assert isinstance(error, PeerLostError)
        assert error.ranks == (2,)
        assert "out of luck" in str(error)


def test_a_collective_times_out_with_the_names_of_the_late():
    done = threading.Event()

    def one(ctx: DistributedContext) -> Any:
        if ctx.rank == 2:
            assert done.wait(10)
            return None
        try:
            return ctx.barrier(timeout=0.2)
        except PacelineError as error:
            return error.with_traceback(None)
        finally:
            if ctx.rank == 0:
                done.set()

    results = run_ranks(3, one)
    timeouts = [error for error in results[:2] if isinstance(error, CommTimeoutError)]
    assert timeouts
    for error in timeouts:
        assert error.waiting_for == (2,)
        assert HERE in str(error)
        assert "rank 2: has not made this call" in str(error)


def test_calls_with_very_long_texts_are_shortened():
    def one(ctx: DistributedContext) -> Any:
        return ctx.all_reduce([torch.ones(2 + (ctx.rank == 1))] * 500)

    for error in outcomes(3, one):
        assert isinstance(error, DisagreementError)
        assert all(HERE in call for call in error.calls.values())
        assert len(str(error)) < 5000


@pytest.mark.parametrize("way", ["window", "messages", "receive"])
def test_a_rank_that_does_its_part_and_leaves_at_once_is_not_missing(way):
    """Rank 1 does its part and leaves after rank 0 saw nothing of it and before rank 0 looks around."""
    looking, left = threading.Event(), threading.Event()

    def part(ctx: DistributedContext) -> Any:
        if way == "receive":
            return ctx.send("x", 0) if ctx.rank == 1 else ctx.receive(1)
        return ctx.all_reduce([1.0], "sum", "direct") if way == "window" else ctx.gather(ctx.rank)

    def one(ctx: DistributedContext) -> Any:
        if ctx.rank == 1:
            assert looking.wait(10)
            try:
                result = part(ctx)
                ctx.close()
                return result
            finally:
                left.set()
        board: Any = ctx.transport._board  # type: ignore[attr-defined]
        real = board.peers

        def gated() -> Any:
            looking.set()
            assert left.wait(10)
            return real()

        board.peers = gated
        return part(ctx)

    expected = {"receive": ["x", None], "window": [[2.0], [2.0]], "messages": [[0, 1], None]}
    assert outcomes(2, one) == expected[way]


def _differ(ctx: Any) -> Any:
    start = time.monotonic()
    try:
        ctx.all_reduce(torch.ones(3 + (ctx.rank == 2)))
    except DisagreementError as error:
        return error.with_traceback(None), time.monotonic() - start
    return None, 0.0


def test_processes_that_differ():
    for error, seconds in processes(_differ, workers=4):
        assert isinstance(error, DisagreementError)
        assert seconds < 5
        assert "float32[4]" in error.calls[2]
        assert HERE in error.calls[2]
        assert any("float32[3]" in call for call in error.calls.values())
