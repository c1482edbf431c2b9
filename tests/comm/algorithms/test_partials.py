"""fold_partials, every way: the tree's bits for any ownership, partials that no rank writes to, checksums."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from tests.comm.ranks import LARGE, canonical_reference, outcomes, raised, sha, wide_range
from tests.comm.transport.ranks import run_contexts, values
from torch import Tensor

from paceline.comm.algorithms.shm.task import UNTOUCHED
from paceline.comm.collectives.shard_sums import ShardOwnership
from paceline.comm.context import DistributedContext
from paceline.comm.ops import ReduceOp, kernel_of
from paceline.comm.reduction_order import fold_shards
from paceline.core.errors import CorruptDataError, GroupInterruptedError, PeerError, UsageError

WAYS = ("small", "shared", "reached", "slots", "messages")
RANKS = 3
ONE_EACH = ShardOwnership(RANKS, ((0,), (1,), (2,)))
OWNERSHIPS = {
    "one each": ONE_EACH,
    "one each, not in order": ShardOwnership(4, ((2,), (0, 1), (3,))),
    "one each, in reverse": ShardOwnership(RANKS, ((2,), (1,), (0,))),
    "blocks": ShardOwnership(7, ((0, 1, 2), (3, 4), (5, 6))),
    "none": ShardOwnership(5, ((), (0, 1, 2, 3), (4,))),
    "scattered": ShardOwnership(9, ((0, 3, 8), (1, 2, 7), (4, 5, 6))),
    "interleaved": ShardOwnership(8, ((0, 3, 6), (1, 4, 7), (2, 5))),
    "all at one": ShardOwnership(6, ((), (), (0, 1, 2, 3, 4, 5))),
}


def take_way(ctx: DistributedContext, way: str) -> None:
    """Makes `ctx` reduce in one of the ways."""
    transport: Any = ctx.transport
    if way == "messages":
        transport.window = None
    elif transport.window is not None:
        transport.window.reachable = way == "reached"


def memory(ctx: DistributedContext, way: str, data: Tensor) -> Tensor:
    return ctx.empty(data.numel(), dtype=data.dtype).copy_(data) if way == "shared" else data.clone()


def size_of(way: str) -> int:
    return 1003 if way == "small" else LARGE


def partials_of(ctx: DistributedContext, way: str, ownership: ShardOwnership) -> tuple[list[Tensor], Tensor]:
    """This rank's partials of random shards, and memory for the result."""
    shards = {shard: wide_range(shard, size_of(way)) for shard in ownership.blocks[ctx.rank]}
    folded = fold_shards(shards, ownership.nodes[ctx.rank], kernel_of(ReduceOp.SUM), ownership.shards)
    out = memory(ctx, way, torch.zeros(size_of(way)))
    return [memory(ctx, way, partial) for partial in folded], out


def expected(way: str, ownership: ShardOwnership) -> str:
    return sha(canonical_reference([wide_range(shard, size_of(way)) for shard in range(ownership.shards)]))


@pytest.mark.parametrize("checksum", [False, True], ids=["plain", "checksum"])
@pytest.mark.parametrize("name", OWNERSHIPS)
@pytest.mark.parametrize("way", WAYS)
def test_the_bits_of_the_tree_for_any_holdings(way: str, name: str, checksum: bool) -> None:
    ownership = OWNERSHIPS[name]

    def one(ctx: DistributedContext) -> tuple[str, bool]:
        take_way(ctx, way)
        partials, out = partials_of(ctx, way, ownership)
        before = [sha(partial) for partial in partials]
        for _ in range(3):  # what is reused is reused right
            out.zero_()
            ctx.fold_partials(partials, ownership, out, checksum=checksum)
        return sha(out), [sha(partial) for partial in partials] == before

    assert outcomes(RANKS, one) == [(expected(way, ownership), True)] * RANKS


@pytest.mark.parametrize("checksum", [False, True], ids=["plain", "checksum"])
@pytest.mark.parametrize("name", OWNERSHIPS)
@pytest.mark.parametrize("way", WAYS)
def test_the_result_may_be_the_first_partial(way: str, name: str, checksum: bool) -> None:
    """As in training, where it saves memory; whichever rank holds the tree's first node."""
    ownership = OWNERSHIPS[name]

    def one(ctx: DistributedContext) -> str:
        take_way(ctx, way)
        partials, spare = partials_of(ctx, way, ownership)
        out = partials[0] if partials else spare
        ctx.fold_partials(partials, ownership, out, checksum=checksum)
        return sha(out)

    assert outcomes(RANKS, one) == [expected(way, ownership)] * RANKS


class StopAt:
    """Interrupts a rank at one of the moments in which it shows something to the others."""

    def __init__(self, ctx: DistributedContext, moment: int) -> None:
        self._ctx = ctx
        self._left = moment
        transport: Any = ctx.transport
        owner, name = (transport, "exchange") if transport.window is None else (transport.window, "signal")
        self._inner: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._left == 0:
            self._ctx.interrupt("a test")
        self._left -= 1
        return self._inner(*arguments, **options)


@pytest.mark.parametrize("checksum", [False, True], ids=["plain", "checksum"])
@pytest.mark.parametrize("moment", [0, 1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_an_interrupted_fold_leaves_the_partials_alone(way: str, moment: int, checksum: bool) -> None:
    """Also between the two barriers, when results are being written."""
    ownership = OWNERSHIPS["scattered"] if way == "slots" else ONE_EACH

    def one(ctx: DistributedContext) -> tuple[bool, str]:
        take_way(ctx, way)
        partials, out = partials_of(ctx, way, ownership)
        before = [sha(partial) for partial in partials]
        if ctx.rank == 1:
            StopAt(ctx, moment)
        try:
            ctx.fold_partials(partials, ownership, out, checksum=checksum)
        except PeerError as error:
            ctx.close(error)
            found = type(error).__name__
        else:
            found = sha(out)
        return [sha(partial) for partial in partials] == before, found

    for rank, (intact, found) in enumerate(outcomes(RANKS, one)):
        assert intact
        assert found in ("GroupInterruptedError" if rank == 1 else "PeerLostError", expected(way, ownership))


def _killed_in_the_middle(ctx: DistributedContext) -> tuple[bool, str]:
    partials, out = partials_of(ctx, "shared", ONE_EACH)
    before = [sha(partial) for partial in partials]
    ctx.barrier()
    if ctx.rank == 1:
        window: Any = ctx.transport.window
        inner, left = window.signal, iter([False, True])

        def signal_then_die(*arguments: Any) -> Any:
            if next(left):
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*arguments)

        window.signal = signal_then_die
    error = raised(PeerError, lambda: ctx.fold_partials(partials, ONE_EACH, out, checksum=True))
    return [sha(partial) for partial in partials] == before, type(error).__name__


def test_a_rank_killed_between_the_barriers_leaves_the_partials_alone() -> None:
    found = run_contexts(RANKS, _killed_in_the_middle, backend="shm")
    assert found[1].signal == signal.SIGKILL
    assert [found[rank].value for rank in (0, 2)] == [(True, "PeerLostError")] * 2


def flip(tensor: Tensor, at: int) -> Callable[[], None]:
    """One bit of one element, when called."""

    def act() -> None:
        tensor.view(torch.int32)[at] ^= 1 << 7

    return act


def flips(partial: Tensor) -> Iterator[int]:
    """An element of every rank's slice."""
    for rank in range(RANKS):
        yield partial.numel() * (2 * rank + 1) // (2 * RANKS)


def corrupted(
    ctx: DistributedContext, way: str, ownership: ShardOwnership, culprit: int, at: int
) -> tuple[str, int]:
    take_way(ctx, way)
    partials, out = partials_of(ctx, way, ownership)
    fault = flip(partials[-1], at) if ctx.rank == culprit else None
    try:
        ctx.fold_partials(partials, ownership, out, checksum=True, after_checksum=fault)
    except CorruptDataError as error:
        ctx.close(error)
        return type(error).__name__, error.rank
    return "", -1


@pytest.mark.parametrize("name", ["one each", "scattered"])
@pytest.mark.parametrize("way", WAYS)
def test_a_flipped_bit_is_found_by_all_and_its_rank_named(way: str, name: str) -> None:
    ownership = OWNERSHIPS[name]
    for culprit, at in product(range(2), flips(torch.empty(size_of(way)))):
        # Also in its own slice, which no other rank reads.
        found = outcomes(RANKS, corrupted, way, ownership, culprit, at)
        assert found == [("CorruptDataError", culprit)] * RANKS


@pytest.mark.parametrize("transport", [{"backend": "gloo"}, {"hosts": 2}], ids=["gloo", "hybrid"])
def test_a_flipped_bit_is_found_between_hosts(transport: dict[str, Any]) -> None:
    # The end of the data belongs to rank 2, its beginning to the culprit itself.
    for size, at in (("small", 900), ("large", LARGE - 5), ("large", 5)):
        found = values(run_contexts(RANKS, corrupted, size, ONE_EACH, 0, at, **transport))
        assert found == [("CorruptDataError", 0)] * RANKS


def _damaged_and_then_broken(ctx: DistributedContext, way: str, checksum: bool) -> bool:
    """Rank 1 never comes, rank 0 holds damaged data when it learns that: is it fit to be kept?"""
    take_way(ctx, way)
    partials, out = partials_of(ctx, way, ONE_EACH)
    if ctx.rank == 1:
        ctx.close(GroupInterruptedError("a test"))
        return False
    fault = flip(partials[0], 5) if ctx.rank == 0 else None
    error = raised(
        PeerError,
        lambda: ctx.fold_partials(partials, ONE_EACH, out, checksum=checksum, after_checksum=fault),
    )
    ctx.close(error)
    return UNTOUCHED in error.facts


@pytest.mark.parametrize("way", ["shared", "slots", "messages"])
def test_damaged_data_is_not_kept_for_the_next_group(way: str) -> None:
    """Its next checksum would fit it."""
    found = outcomes(RANKS, _damaged_and_then_broken, way, True)
    assert (found[0], found[2]) == (False, True)
    found = outcomes(RANKS, _damaged_and_then_broken, way, False)
    assert (found[0], found[2]) == (True, True)  # nothing was checked, so nothing was damaged


@pytest.mark.parametrize("transport", [{"backend": "gloo"}, {"hosts": 2}], ids=["gloo", "hybrid"])
def test_checked_sums_between_hosts(transport: dict[str, Any]) -> None:
    for way in ("small", "large"):
        found = values(run_contexts(RANKS, _checked, way, **transport))
        assert found == [expected(way, OWNERSHIPS["scattered"])] * RANKS


def _checked(ctx: DistributedContext, way: str) -> str:
    partials, out = partials_of(ctx, way, OWNERSHIPS["scattered"])
    return sha(ctx.fold_partials(partials, OWNERSHIPS["scattered"], out, checksum=True))


def test_data_that_changes_while_the_ranks_agree_on_a_way_is_found() -> None:
    """Some tensors are shared and some are not: the ranks learn only on the way how they will reduce."""

    def one(ctx: DistributedContext, culprit: int) -> Any:
        way = "shared" if ctx.rank == 0 else "slots"
        partials, out = partials_of(ctx, way, ONE_EACH)
        fault = flip(partials[0], LARGE - 5 if ctx.rank == 0 else 5) if ctx.rank == culprit else None
        try:
            ctx.fold_partials(partials, ONE_EACH, out, checksum=True, after_checksum=fault)
        except CorruptDataError as error:
            ctx.close(error)
            return error.rank
        return sha(out)

    for culprit in range(RANKS):
        assert outcomes(RANKS, one, culprit) == [culprit] * RANKS
    assert outcomes(RANKS, one, -1) == [expected("slots", ONE_EACH)] * RANKS


def test_ranks_that_differ_in_checking_find_out() -> None:
    def one(ctx: DistributedContext) -> str:
        partials, out = partials_of(ctx, "small", ONE_EACH)
        return type(
            raised(PeerError, lambda: ctx.fold_partials(partials, ONE_EACH, out, checksum=ctx.rank == 0))
        ).__name__

    assert outcomes(RANKS, one) == ["DisagreementError"] * RANKS


def test_wrong_partials_are_refused_before_anything_travels() -> None:
    def one(ctx: DistributedContext) -> float:
        out = torch.zeros(4)
        if ctx.rank == 0:
            raised(UsageError, lambda: ctx.fold_partials([out, out], ONE_EACH, out, checksum=True))
        else:
            raised(UsageError, lambda: ctx.fold_partials([], ONE_EACH, out, checksum=True))
        return float(ctx.all_reduce(torch.ones(1)))

    assert outcomes(RANKS, one) == [3.0] * RANKS
