"""The assignment of shards to the members of a view: each shard once, by speed, around what is held."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, product

import pytest

from paceline.elastic.machine import shard_assignment


def slowest(counts: Sequence[int], speeds: Sequence[float]) -> float:
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))


def test_the_slowest_is_done_as_early_as_can_be():
    draw = random.Random(3)
    for _ in range(60):
        speeds = [draw.choice([1.0, 1.0, 0.5, 0.3]) for _ in range(3)]
        shards = draw.randrange(7)
        found = shard_assignment.counts(shards, speeds)
        every = (one for one in product(range(shards + 1), repeat=3) if sum(one) == shards)
        assert sum(found) == shards
        assert slowest(found, speeds) == min(slowest(one, speeds) for one in every)


def test_of_equals_who_has_fewer_comes_first_then_the_faster_then_the_lower_rank():
    assert shard_assignment.counts(5, [1.0, 1.0, 1.0]) == [2, 2, 1]
    # The second shard of rank 0 would be done when the first of rank 1 is: rank 1 has fewer.
    assert shard_assignment.counts(2, [1.0, 0.5]) == [1, 1]
    # Both would have their first shard at the same time but for their speed.
    assert shard_assignment.counts(1, [0.5, 1.0]) == [0, 1]
    assert shard_assignment.counts(3, [1.0, 2.0], kept=[0, 1]) == [1, 2]


def test_what_is_kept_is_counted():
    assert shard_assignment.counts(6, [1.0, 1.0, 1.0], kept=[4, 0, 0]) == [4, 1, 1]
    assert shard_assignment.counts(4, [1.0, 1.0], kept=[1, 1]) == [2, 2]
    assert shard_assignment.counts(2, [1.0, 1.0], kept=[2, 0]) == [2, 0]


def test_blocks_follow_the_ranks():
    assert shard_assignment.contiguous(7, [1.0, 1.0, 1.0]) == ((0, 1, 2), (3, 4), (5, 6))
    assert shard_assignment.contiguous(3, [1.0, 0.5]) == ((0, 1), (2,))
    assert shard_assignment.contiguous(0, [1.0]) == ((),)


def test_a_held_shard_stays_with_the_lowest_rank_that_holds_it_and_is_dealt_once():
    held = ((5, 2), (2, 3), ())
    assert shard_assignment.around_held(6, held, [1.0] * 3) == ((2, 5), (0, 3), (1, 4))


def test_the_first_and_the_last_shard_may_be_held_and_one_that_is_none_is_not():
    assert shard_assignment.around_held(4, ((3, 4, -1), (0,)), [1.0, 1.0]) == ((1, 3), (0, 2))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_held_every_shard_is_dealt_once_and_what_is_held_stays(seed):
    draw = random.Random(seed)
    shards, ranks = draw.randrange(1, 12), draw.randrange(1, 5)
    held = [tuple(draw.randrange(shards) for _ in range(draw.randrange(4))) for _ in range(ranks)]
    dealt = shard_assignment.around_held(shards, held, [draw.choice([1.0, 0.4]) for _ in range(ranks)])
    assert sorted(chain.from_iterable(dealt)) == list(range(shards))
    assert all(list(mine) == sorted(mine) for mine in dealt)
    for shard in set(chain.from_iterable(held)):
        first = next(rank for rank, mine in enumerate(held) if shard in mine)
        assert shard in dealt[first]


def test_who_is_slow_by_less_than_the_factor_counts_as_typical():
    assert shard_assignment.speeds_from([0.25, 0.25, 0.37], [1.0] * 3, 1.5) == [1.0, 1.0, 1.0]
    assert shard_assignment.speeds_from([0.25, 0.25, 0.375], [1.0] * 3, 1.5) == pytest.approx(
        [1.0, 1.0, 1 / 1.5]
    )
    assert shard_assignment.speeds_from([0.1, 0.1, 0.4], [1.0, 0.5, 0.5], 1.5) == pytest.approx(
        [1.0, 0.5, 0.125]
    )


def test_who_was_not_measured_is_typical_and_does_not_make_what_is_typical():
    assert shard_assignment.speeds_from([0.0, 0.0, 0.0, 0.1, 0.4], [1.0] * 5, 1.5) == pytest.approx(
        [1.0, 1.0, 1.0, 1.0, 0.25]
    )
    assert shard_assignment.speeds_from([0.0, 0.0], [1.0, 0.5], 1.5) == [1.0, 0.5]
    assert shard_assignment.speeds_from([0.3], [0.5], 1.0) == [0.5]


def test_a_speed_has_a_least():
    assert shard_assignment.speeds_from([1e-3, 1e-3, 1e9], [1.0] * 3, 1.5)[2] == pytest.approx(1e-6)


def test_a_deal_takes_as_long_as_its_slowest_rank():
    assert shard_assignment.makespan(((0, 1), (2,)), [1.0, 0.25]) == 4.0
    assert shard_assignment.makespan(((0, 1, 2), (3,)), [1.0, 0.5]) == 3.0
    assert shard_assignment.makespan((), []) == 0.0


def test_the_median_is_the_lower_one():
    assert shard_assignment.median([3.0, 1.0, 2.0]) == 2.0
    assert shard_assignment.median([4.0, 3.0, 1.0, 2.0]) == 2.0
    assert shard_assignment.median([7.0]) == 7.0
    assert shard_assignment.median([]) == 0.0
