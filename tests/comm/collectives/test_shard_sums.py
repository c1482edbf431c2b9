"""Sums of shards that are spread over the ranks: what may be held, what covers, what is refused where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.comm.ranks import canonical_reference, outcomes, wide_range

from paceline.comm.collectives.shard_sums import ShardOwnership, check_shards
from paceline.comm.context import DistributedContext
from paceline.comm.ops import ReduceOp
from paceline.comm.reduction_order import Node
from paceline.core.errors import UsageError
from paceline.testing.thread_transport import run_ranks


def held(*shards: int, size: int = 3) -> dict[int, torch.Tensor]:
    return {shard: wide_range(shard, size) for shard in shards}


# what one rank holds


def test_shards_are_kept_flat_with_the_shape_that_they_had():
    tensors = {shard: torch.arange(6.0).view(2, 3) + shard for shard in (0, 4)}
    found = check_shards(tensors, 5, ReduceOp.SUM)
    assert found.shape == [2, 3]
    assert sorted(found.flats) == [0, 4]
    assert torch.equal(found.flats[4], torch.arange(6.0) + 4)
    nothing = check_shards({}, 1, ReduceOp.SUM)
    assert (nothing.flats, nothing.shape) == ({}, [])


@pytest.mark.parametrize(
    ("tensors", "shards", "said"),
    [
        ([torch.ones(1)], 1, "canonical_sum of a list"),
        (held(0), 0, "shards=0"),
        (held(0), 1.0, "shards=1.0"),
        (held(1), 1, "shard 1 is not one of 1"),
        (held(-1), 2, "shard -1 is not one of 2"),
        ({"0": torch.ones(1)}, 2, "shard '0' is not one of 2"),
        ({0: [1.0]}, 1, "shard 0 is a list"),
        ({0: torch.ones(2), 1: torch.ones(3)}, 2, "shards differ"),
        ({0: torch.ones(2), 1: torch.ones(2).double()}, 2, "shards differ"),
        ({0: torch.ones(2).to_sparse()}, 1, "shard 0"),
    ],
)
def test_shards_that_cannot_be_combined_are_refused_before_anything_travels(
    tensors: Any, shards: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        check_shards(tensors, shards, ReduceOp.SUM)


def test_a_kind_that_cannot_be_combined_so_is_refused():
    with pytest.raises(UsageError):
        check_shards({0: torch.ones(2, dtype=torch.complex64)}, 1, ReduceOp.MAX)


def test_one_shard_of_one_and_the_last_shard_of_many_are_well():
    assert check_shards(held(0), 1, ReduceOp.SUM).shape == [3]
    assert sorted(check_shards(held(6, 0), 7, ReduceOp.SUM).flats) == [0, 6]


# what all ranks hold


def test_every_shard_once_by_any_ranks_is_the_canonical_sum() -> None:
    tensors = [wide_range(shard, 6).view(2, 3) for shard in range(5)]
    split = ((3,), (), (0, 4, 1, 2))

    def one(ctx: DistributedContext) -> Any:
        return ctx.canonical_sum({shard: tensors[shard] for shard in split[ctx.rank]}, shards=5)

    for total in outcomes(3, one):
        assert total.shape == (2, 3)
        assert torch.equal(total, canonical_reference(tensors))


@pytest.mark.parametrize(
    ("split", "said"),
    [
        (((0,), (2,)), "no rank holds shard 1"),
        (((0, 1), (1, 2)), "shard 1 is held by ranks 0 and 1"),
        (((0, 0), (1,)), "no rank holds shard 2"),
        (((), ()), "no rank has any"),
    ],
)
def test_shards_that_do_not_cover_are_refused_by_all_ranks(
    split: tuple[tuple[int, ...], ...], said: str
) -> None:
    def one(ctx: DistributedContext) -> Any:
        return ctx.canonical_sum(held(*split[ctx.rank]), shards=3)

    for error in outcomes(2, one):
        assert isinstance(error, UsageError)
        with pytest.raises(UsageError, match=said):
            raise error


@pytest.mark.parametrize("other", [torch.ones(4), torch.ones(3).double(), torch.ones(3, 1)])
def test_ranks_whose_shards_differ_in_kind_are_refused(other: torch.Tensor) -> None:
    def one(ctx: DistributedContext) -> Any:
        return ctx.canonical_sum({ctx.rank: torch.ones(3) if ctx.rank == 0 else other}, shards=2)

    for error in outcomes(2, one):
        assert isinstance(error, UsageError)
        assert "do not fit together" in str(error)


# what the ranks have folded already


def test_the_nodes_of_an_ownership():
    owned = ShardOwnership(6, ((0, 1, 2, 3), (5,), (4,)))
    assert owned.nodes == ((Node(0, 2),), (Node(5, 0),), (Node(4, 0),))


def test_the_text_of_an_ownership_names_ranks_by_the_labels_of_each_group():
    """One object for both groups: the second one does not get the text of the first."""
    owned = ShardOwnership(6, ((0, 1, 2, 3), (5,), (4,)))

    def one(ctx: DistributedContext) -> str:
        first, again = owned.text_in(ctx.transport), owned.text_in(ctx.transport)
        assert first is again
        return first

    for labels, text in (
        (None, "shards=6, by rank {0: [0, 1, 2, 3], 1: [5], 2: [4]}"),
        ((0, 2, 3), "shards=6, by rank {0: [0, 1, 2, 3], 2: [5], 3: [4]}"),
    ):
        assert run_ranks(3, one, labels=labels) == [text] * 3


def test_an_ownership_of_another_number_of_ranks_is_refused():
    owned = ShardOwnership(2, ((0, 1),))

    def one(ctx: DistributedContext) -> Any:
        return ctx.fold_partials([torch.ones(3)], owned, torch.empty(3))

    for error in outcomes(2, one):
        assert isinstance(error, UsageError)
        assert "divided among 1 rank, and the group has 2" in str(error)


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (((0,), (2,)), "canonical_sum over 3 shards: no rank holds shard 1"),
        (((0, 1), (1, 2)), "canonical_sum over 3 shards: shard 1 is held by ranks 4 and 7"),
    ],
)
def test_an_ownership_that_does_not_cover_is_refused_with_the_ranks_labels(
    blocks: tuple[tuple[int, ...], ...], said: str
) -> None:
    owned = ShardOwnership(3, blocks)

    def one(ctx: DistributedContext) -> None:
        partials = [torch.ones(3) for _ in owned.nodes[ctx.rank]]
        with pytest.raises(UsageError, match=said):
            ctx.fold_partials(partials, owned, torch.zeros(3))

    run_ranks(2, one, labels=(4, 7))


def folded(partials: list[torch.Tensor]) -> list[Any]:
    owned = ShardOwnership(2, ((0,), (1,)))

    def one(ctx: DistributedContext) -> Any:
        out = torch.zeros(3)
        ctx.fold_partials(partials if ctx.rank == 0 else [torch.ones(3)], owned, out)
        return out

    return outcomes(2, one, timeout=5.0)


def test_partials_of_all_ranks_are_summed():
    for total in folded([torch.full((3,), 2.0)]):
        assert torch.equal(total, torch.full((3,), 3.0))


@pytest.mark.parametrize(
    "partials",
    [[], [torch.ones(3), torch.ones(3)], [torch.ones(4)], [torch.ones(3).double()]],
    ids=["none", "two", "longer", "wider"],
)
def test_partials_that_are_not_due_are_refused(partials: list[torch.Tensor]) -> None:
    error = folded(partials)[0]
    assert isinstance(error, UsageError)
    assert "where 1 partial is due" in str(error)
