"""Which member computes how many shards: even unless one is clearly slow."""

from __future__ import annotations

import random

import pytest

from paceline.elastic.machine import shard_assignment

FACTOR = 1.5


def deal(seconds: list[float], shards: int = 8, weights: list[float] | None = None) -> list[int]:
    speeds = shard_assignment.speeds_from(seconds, weights or [1.0] * len(seconds), FACTOR)
    return [len(mine) for mine in shard_assignment.contiguous(shards, speeds)]


def test_usual_jitter_leaves_the_deal_even():
    draw = random.Random(1)
    for _ in range(200):
        seconds = [0.01 * draw.uniform(0.85, 1.2) for _ in range(4)]
        assert deal(seconds) == [2, 2, 2, 2]


def test_no_member_is_taken_as_faster_than_the_typical_one():
    assert deal([0.001, 0.01, 0.01, 0.01]) == [2, 2, 2, 2]


def test_a_new_member_counts_as_typical():
    assert deal([0.01, 0.0, 0.011, 0.009]) == [2, 2, 2, 2]
    assert deal([0.0, 0.0, 0.0, 0.0]) == [2, 2, 2, 2]


def test_a_straggler_gets_fewer():
    assert deal([0.01, 0.01, 0.1, 0.01])[2] == 0
    assert deal([0.01, 0.02, 0.01, 0.01], shards=16)[1] == 2


def test_of_two_the_faster_is_typical():
    assert deal([0.01, 0.03], shards=8) == [6, 2]


def test_a_slot_that_ran_out_of_memory_gets_fewer():
    assert deal([0.01] * 4, weights=[1.0, 0.5, 1.0, 1.0])[1] == 1


def test_of_two_assignments_that_take_as_long_the_one_that_leaves_no_member_idle():
    assert shard_assignment.counts(4, [1.0, 1.0, 1.0, 0.5]) == [1, 1, 1, 1]
    assert shard_assignment.counts(4, [1.0, 1.0, 1.0, 0.25]) == [2, 1, 1, 0]


@pytest.mark.parametrize("seconds", [[0.003, 1e9], [5e-324, 0.003], [5e-324, 1e9], [1e308, 5e-324]])
def test_no_time_that_a_member_may_claim_breaks_the_deal(seconds):
    assert sum(deal(seconds)) == 8
