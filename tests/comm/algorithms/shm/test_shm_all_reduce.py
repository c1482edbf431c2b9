"""The three ways through shared memory: each is really taken, and each gives the same bits as the others."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from tests.comm.ranks import LARGE, canonical_reference, processes, sha, small_slot, wide_range
from torch import Tensor

from paceline.comm.algorithms import direct
from paceline.comm.algorithms.shm import all_reduce
from paceline.comm.context import DistributedContext
from paceline.comm.ops import ReduceOp, accumulator_dtype
from paceline.comm.reduction_order import run_blocks
from paceline.comm.transport.shm.status_board import REACHES
from paceline.comm.transport.shm.window import ShmWindow
from paceline.testing.thread_transport import run_ranks

LONG = 2 * LARGE + 12_345  # too long for the small slot in 16 bits, too
HUGE = 700_001  # several chunks of staging
PLACES = ("all shared", "all ordinary", "first shared", "last ordinary", "results shared", "inputs shared")


class Ways:
    """Counts which way reductions took, without changing what they do."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        lock = threading.Lock()
        module: Any = all_reduce
        in_place, staged = module.reduce_in_place, module.reduce_staged
        small = all_reduce.SmallReduce.run

        def counted(name: str, real: Any) -> Any:
            def call(*args: Any) -> None:
                with lock:
                    self.taken[name] += 1
                real(*args)

            return call

        self.spread, self.run = counted("spread", in_place), counted("slots", staged)
        self.small = counted("small", small)

    def install(self, monkeypatch: pytest.MonkeyPatch | None = None) -> Ways:
        """Without a monkeypatch for good: in a process that ends with the test."""
        put: Any = setattr if monkeypatch is None else monkeypatch.setattr
        put(all_reduce, "reduce_in_place", self.spread)
        put(all_reduce, "reduce_staged", self.run)
        put(all_reduce.SmallReduce, "run", self.small)
        return self


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    return Ways().install(monkeypatch)


@pytest.fixture
def reading_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured otherwise, and on a busy machine reading from a peer may look like the quicker way."""
    monkeypatch.setattr(ShmWindow, "_try_reach", lambda self, call, deadline: False)


def placed(ctx: DistributedContext, where: str, values: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's data and where its result goes."""
    first, last = ctx.rank == 0, ctx.rank == ctx.world_size - 1
    shared_input, shared_result = {
        "all shared": (True, True),
        "all ordinary": (False, False),
        "first shared": (first, first),
        "last ordinary": (not last, not last),
        "results shared": (False, True),
        "inputs shared": (True, False),
    }[where]

    def memory(shared: bool) -> Tensor:
        return ctx.empty(values.shape, dtype=values.dtype) if shared else torch.empty_like(values)

    data, out = memory(shared_input), memory(shared_result)
    data.copy_(values)
    out.fill_(77)
    return data, out


def reduced(ctx: DistributedContext, where: str, algorithm: str, values: Tensor) -> Any:
    """Once into other memory, once in place; both have to agree, and the input must survive the first."""
    data, out = placed(ctx, where, values)
    given = ctx.all_reduce(data, "sum", algorithm, out=out)
    assert given is out
    assert torch.equal(data, values)
    assert ctx.all_reduce(data, "sum", algorithm, out=data) is data
    assert torch.equal(data, out)
    return out.clone()


def direct_reference(parts: list[Tensor]) -> Tensor:
    """The direct sum in one process, in the one order that holds for every way."""
    total = torch.empty(parts[0].numel(), dtype=accumulator_dtype(parts[0].dtype))
    run_blocks(direct.recipe(len(parts), ReduceOp.SUM).order, torch.add, parts, total)
    return total.to(parts[0].dtype)


def test_small_messages_take_the_small_slots(ways):
    limit = small_slot(3)
    results = run_ranks(3, lambda ctx: ctx.all_reduce(wide_range(ctx.rank, limit), "sum", "direct"))
    expected = direct_reference([wide_range(rank, limit) for rank in range(3)])
    assert all(torch.equal(result, expected) for result in results)
    assert ways.taken == {"small": 3}


@pytest.mark.parametrize("algorithm", ["direct", "canonical"])
@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [(1, torch.float32), (2, torch.bfloat16), (3, torch.float32), (3, torch.bfloat16), (8, torch.float32)],
)
@pytest.mark.usefixtures("reading_is_slow")
def test_shared_tensors_are_spread_and_the_rest_goes_through_slots(ways, ranks, dtype, algorithm):
    parts = [wide_range(rank, LONG, dtype) for rank in range(ranks)]
    expected = (direct_reference if algorithm == "direct" else canonical_reference)(parts)
    for where in PLACES:
        ways.taken.clear()
        results = run_ranks(ranks, lambda ctx, w=where: reduced(ctx, w, algorithm, parts[ctx.rank]))
        assert {sha(result) for result in results} == {sha(expected)}, where
        # The canonical sum makes new fp32 partials of 16-bit data, which no peer can see.
        widened = algorithm == "canonical" and dtype == torch.bfloat16
        if where == "all shared" and not widened:
            assert ways.taken == {"spread": 2 * ranks}, where
        elif where == "all ordinary" or widened:
            assert ways.taken == {"slots": 2 * ranks}, where


@pytest.mark.parametrize("where", ["all shared", "first shared", "all ordinary"])
def test_several_chunks(ways, where):
    parts = [wide_range(rank, HUGE) for rank in range(3)]
    results = run_ranks(3, lambda ctx: reduced(ctx, where, "direct", parts[ctx.rank]))
    assert {sha(result) for result in results} == {sha(direct_reference(parts))}


def test_a_view_into_a_shared_tensor_is_found_where_it_is(ways):
    parts = [wide_range(rank, LARGE) for rank in range(2)]

    def one(ctx: DistributedContext) -> Tensor:
        store = ctx.empty(3, LARGE + 64)
        data = store[1, 5 + ctx.rank : 5 + ctx.rank + LARGE]  # at another place on every rank
        store.fill_(-1)
        data.copy_(parts[ctx.rank])
        ctx.all_reduce(data, out=data)
        assert int((store == -1).sum()) >= store.numel() - LARGE  # nothing else was touched
        return data.clone()

    results = run_ranks(2, one)
    assert {sha(result) for result in results} == {sha(direct_reference(parts))}
    assert ways.taken == {"spread": 2}


@pytest.mark.usefixtures("reading_is_slow")
def test_shared_tensors_of_another_group_are_ordinary_here(ways):
    parts = [wide_range(rank, LARGE) for rank in range(2)]
    stranger = run_ranks(1, lambda ctx: ctx.empty(LARGE))[0]

    def one(ctx: DistributedContext) -> Tensor:
        data = stranger if ctx.rank == 0 else ctx.empty(LARGE)
        data.copy_(parts[ctx.rank])
        result: Tensor = ctx.all_reduce(data, out=data)
        return result.clone()

    assert {sha(result) for result in run_ranks(2, one)} == {sha(direct_reference(parts))}
    assert ways.taken == {"slots": 2}


def test_calls_of_all_kinds_in_a_row_do_not_disturb_each_other():
    """Slots and ticks are used again from call to call, in every order."""
    lengths = [3, LARGE, 5, small_slot(3), LARGE, HUGE, 1, 0, LARGE]

    def one(ctx: DistributedContext) -> list[str]:
        results = []
        for turn, length in enumerate(lengths * 2):
            values = wide_range(ctx.rank, length, seed=turn)
            data = ctx.empty(length) if turn % 3 == 0 else torch.empty(length)
            results.append(sha(ctx.all_reduce(data.copy_(values), out=data)))
            if turn % 4 == 0:
                ctx.barrier()
            if turn % 5 == 0:
                ctx.all_gather(turn)
        return results

    expected = [
        sha(direct_reference([wide_range(rank, length, seed=turn) for rank in range(3)]))
        for turn, length in enumerate(lengths * 2)
    ]
    assert run_ranks(3, one) == [expected] * 3


def _through_the_kernel(ctx: Any, force: bool | None) -> Any:
    """Runs in a process of its own: all cases, and which way they took."""
    ways = Ways().install()
    there = ctx.transport.window
    mine = wide_range(ctx.rank, LONG)
    ctx.all_reduce(mine)  # tries out whether ranks may reach each other
    board = there._board
    verdicts = [board.words[board.word(rank, REACHES)] for rank in range(ctx.world_size)]
    if force and 2 in verdicts:
        return None
    if force is not None:
        there.reachable = force
    ways.taken.clear()
    results: dict[Any, str] = {}
    for where in PLACES:
        for dtype in (torch.float32, torch.bfloat16):
            for algorithm in ("direct", "canonical"):
                values = mine.to(dtype)
                results[where, dtype, algorithm] = sha(reduced(ctx, where, algorithm, values))
    huge = wide_range(ctx.rank, HUGE)
    results["huge"] = sha(ctx.all_reduce(huge, "average", "direct"))
    return results, dict(ways.taken)


def _expected(workers: int) -> dict[Any, str]:
    parts = [wide_range(rank, LONG) for rank in range(workers)]
    results: dict[Any, str] = {
        (where, dtype, algorithm): sha(fold([part.to(dtype) for part in parts]))
        for where in PLACES
        for dtype in (torch.float32, torch.bfloat16)
        for algorithm, fold in (("direct", direct_reference), ("canonical", canonical_reference))
    }
    results["huge"] = sha(direct_reference([wide_range(rank, HUGE) for rank in range(workers)]) / workers)
    return results


def test_processes_that_reach_each_other_through_the_kernel():
    outcome = processes(_through_the_kernel, True, workers=3)
    if outcome[0] is None:
        pytest.skip("this system does not let processes read each other")
    for results, taken in outcome:
        assert results == _expected(3)
        assert taken == {"spread": 2 * 6 * 4 + 1}


def test_processes_that_may_not_reach_each_other_use_slots():
    for results, taken in processes(_through_the_kernel, False, workers=3):
        assert results == _expected(3)
        # Spread all the same: "all shared" twice, "inputs shared" in place; not where canonical widens.
        assert taken == {"spread": 3 * 3, "slots": 2 * 6 * 4 + 1 - 3 * 3}


def test_whatever_the_trial_says_all_ranks_go_the_same_way():
    outcome = processes(_through_the_kernel, None, workers=2)
    assert all(results == _expected(2) for results, _ in outcome)
    assert len({tuple(sorted(taken.items())) for _, taken in outcome}) == 1
