"""Who is slow, and whether another assignment of the shards helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.elastic.machine.made_states import NOW, beat, change, made

from paceline.control.messages import ViewPlan
from paceline.elastic.machine import stragglers
from paceline.elastic.machine.state import JobState, WorkerStatus


def measured(*seconds: float, shards: int = 8, **settings: Any) -> JobState:
    """Members with these times per shard; the assignment is old enough to be changed."""
    job = made((0,) * len(seconds), shards=shards, **settings)
    for member, second in enumerate(seconds, 1):
        if second:
            beat(job, member, shard_seconds=second)
    job.assigned_at = NOW - job.settings.rebalance_seconds
    return job


def speeds(job: JobState) -> list[float]:
    return stragglers.speeds(job, list(job.workers.values()))


def test_speeds_follow_times_and_weights():
    job = measured(0.5, 0.5, 0.5, 1.0)
    job.slots[1] = replace(job.slots[1], weight=0.5)
    assert speeds(job) == [1.0, 0.5, 1.0, 0.5]
    del job.slots[1]
    assert speeds(job) == [1.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize("policy", ["wait", "backup"])
def test_under_these_policies_only_weights_count(policy):
    job = measured(0.5, 0.5, 0.5, 4.0, stragglers=policy)
    job.slots[1] = replace(job.slots[1], weight=0.5)
    assert speeds(job) == [1.0, 0.5, 1.0, 1.0]
    assert stragglers.better_assignment(job) is None


def test_who_has_had_no_shards_for_long_is_tried_again():
    job = measured(0.5, 0.5, 0.5, 4.0)
    assert job.view is not None
    job.view = replace(job.view, shards=((0, 1, 2), (3, 4, 5), (6, 7), ()))
    job.assigned_at = NOW - 29.9
    assert speeds(job) == [1.0, 1.0, 1.0, 0.125]
    job.assigned_at = NOW - 30.0
    assert speeds(job) == [1.0, 1.0, 1.0, 1.0]
    job.view = None
    assert speeds(job) == [1.0, 1.0, 1.0, 0.125]


def test_shards_are_assigned_again_when_that_shortens_the_step():
    job = measured(0.5, 0.5, 0.5, 1.0)
    said = stragglers.better_assignment(job)
    assert said is not None
    assert "rank 3 is the slowest" in said
    assert "1.3 times shorter" in said
    job.assigned_at = NOW - 1.9
    assert stragglers.better_assignment(job) is None


def test_a_gain_of_half_of_what_makes_a_straggler_is_enough():
    # Three shards at half of the speed take 6, where 4 is possible.
    job = measured(0.5, 1.0, shards=6, straggler_factor=2.0)
    assert "1.5 times shorter" in (stragglers.better_assignment(job) or "")
    # Two take 4, where 3 is possible.
    job = measured(0.5, 0.5, 0.5, 1.0, straggler_factor=1.7)
    assert stragglers.better_assignment(job) is None


def test_an_assignment_that_is_best_or_not_known_stays():
    assert stragglers.better_assignment(measured(0.5, 0.5, 0.5, 0.5)) is None
    job = measured(0.5, 0.5, 0.5, 4.0)
    assert job.view is not None
    whole = job.view
    job.view = replace(whole, shards=())
    assert stragglers.better_assignment(job) is None
    job.view = None
    assert stragglers.better_assignment(job) is None
    job.view = whole
    assert stragglers.better_assignment(job) is not None
    del job.workers[2]
    assert stragglers.better_assignment(job) is None


@pytest.mark.parametrize("policy", ["wait", "rebalance"])
def test_blocks_are_made_again_where_held_shards_were_left(policy):
    job = measured(0.5, 0.5, stragglers=policy, shards=4)
    job.view = ViewPlan(generation=3, members=(1, 2), slots=(0, 1), shards=((0, 3), (1, 2)))
    assert stragglers.better_assignment(job) is None
    job.is_contiguous = False
    assert "in blocks again" in (stragglers.better_assignment(job) or "")
    job.view = replace(job.view, shards=((0, 1), (2, 3)))
    assert stragglers.better_assignment(job) is None


def replaced(job: JobState) -> list[int]:
    return [worker.number for worker in stragglers.to_replace(job)]


def test_who_is_far_slower_than_the_others_is_replaced():
    job = measured(0.5, 0.5, 1.5, 1.4, stragglers="replace")
    assert replaced(job) == [3]
    job.assigned_at = NOW - 1.9
    assert replaced(job) == []
    assert replaced(measured(0.5, 0.5, 1.5, 1.4)) == []


def test_who_is_not_replaced():
    job = measured(0.5, 0.5, 5.0, stragglers="replace", max_worker_failures=2)
    assert replaced(job) == [3]
    job.slots[2] = replace(job.slots[2], replacements=1)
    assert replaced(job) == [3]
    job.slots[2] = replace(job.slots[2], replacements=2)
    assert replaced(job) == []
    job.slots[2] = replace(job.slots[2], replacements=0, worker=7)
    assert replaced(job) == []
    del job.slots[2]
    assert replaced(job) == []


def test_only_members_are_replaced_and_not_the_last_that_is_measured():
    job = measured(0.5, 0.5, 5.0, stragglers="replace")
    change(job, 3, status=WorkerStatus.LEAVING)
    assert replaced(job) == []
    del job.workers[3]
    assert replaced(job) == []
    assert replaced(measured(0.5, 0.0, stragglers="replace", replace_factor=1.0)) == []
    assert replaced(measured(0.5, 0.0, 5.0, stragglers="replace")) == [3]
    job = measured(0.5, 0.5, 5.0, stragglers="replace")
    job.view = None
    assert replaced(job) == []
    job = measured(0.5, 0.5, 5.0, stragglers="replace")
    beat(job, 2, shard_seconds=0.0)
    beat(job, 1, shard_seconds=0.0)
    assert replaced(job) == []
