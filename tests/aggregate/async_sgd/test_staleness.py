"""What the server of asynchronous SGD decides: weights, limits, who waits, what is dealt again."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from paceline.aggregate.async_sgd.range_allocator import RangeAllocator
from paceline.aggregate.async_sgd.staleness import GradientLedger, Staleness, constant, inverse
from paceline.core.errors import ConfigError, InternalError, UsageError


def ledger(samples: int = 100, workers: int = 3, **staleness: object) -> GradientLedger:
    return GradientLedger(RangeAllocator(samples, 1, 1), Staleness(**staleness), workers)  # type: ignore[arg-type]


def turn(it: GradientLedger, worker: int, *, finite: bool = True):
    it.submit(worker)
    assert it.next_ready() == worker
    return it.decide(worker, finite=finite)


def test_a_gradient_weighs_one_over_one_plus_its_staleness():
    it = ledger()
    for worker in range(3):
        it.assign(worker)
    judged = [turn(it, worker) for worker in (1, 0, 2)]
    assert [one.staleness for one in judged] == [0, 1, 2]
    assert [one.weight for one in judged] == [1.0, 1 / 2, 1 / 3]
    assert it.version == 3
    assert it.total.histogram == {0: 1, 1: 1, 2: 1}
    assert it.total.mean_staleness == 1.0
    assert it.statistics()["workers"]["2"]["histogram"] == {"2": 1}


def test_other_policies_and_what_a_policy_may_not_say():
    assert [inverse(age) for age in (0, 1, 3)] == [1.0, 0.5, 0.25]
    assert constant(9) == 1.0
    it = ledger(weight=lambda age: -1.0)
    it.assign(0)
    with pytest.raises(UsageError, match=r"is -1\.0"):
        turn(it, 0)


def test_too_old_a_gradient_is_dropped_and_its_samples_are_dealt_again():
    it = ledger(samples=10, limit=2)
    slow = it.assign(0)
    for _ in range(3):
        it.assign(1)
        turn(it, 1)
    judged = turn(it, 0)
    assert (judged.staleness, judged.weight) == (3, None)
    assert it.version == 3
    assert (it.total.dropped, it.by_worker[0].dropped) == (1, 1)
    again = it.assign(1)
    assert slow is not None
    assert again is not None
    assert again.part == slow.part
    assert again.version == 3


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_not_tried_forever():
    it = ledger(samples=2)
    it.assign(0)
    judged = turn(it, 0, finite=False)
    assert judged.weight is None
    assert (it.version, it.total.not_finite, it.total.applied) == (0, 1, 0)
    it.assign(0)
    turn(it, 0)
    assert it.allocator.completed == 1


def test_a_lost_worker_loses_only_what_it_had_under_way():
    it = ledger(samples=2, workers=2)
    lost, other = it.assign(0), it.assign(1)
    assert it.remove(0) == lost
    assert it.remove(0) is None
    assert other is not None
    turn(it, 1)
    again = it.assign(1)
    assert lost is not None
    assert again is not None
    assert again.part == lost.part
    it.submit(1)
    assert it.remove(1) == again, "also when its gradient was there already"
    assert it.next_ready() is None
    assert it.total.lost == 2


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("beyond", ["drop", "wait"])
def test_whatever_the_speeds_every_sample_counts_once_and_none_is_older_than_the_limit(seed, beyond):
    """Workers of very different speeds, losses included; with `wait` nothing is ever dropped."""
    draw = random.Random(f"{seed} {beyond}")
    workers, limit = draw.randint(1, 6), draw.randint(0, 8)
    it = GradientLedger(
        RangeAllocator(draw.randint(1, 60), 2, draw.randint(1, 7)),
        Staleness(limit=limit, beyond=beyond),
        workers,
    )
    speed = [draw.choice([0.02, 0.3, 1.0]) for _ in range(workers)]
    settled: Counter[tuple[int, int]] = Counter()
    for _ in range(200_000):
        if it.allocator.done:
            break
        while (worker := it.next_ready()) is not None:
            judged = it.decide(worker)
            if judged.weight is not None:
                assert judged.staleness <= limit
                part = judged.assignment.part
                settled.update((part.epoch, place) for place in range(part.start, part.stop))
        for worker in range(workers):
            if worker not in it.assigned:
                it.assign(worker)
        computing = [worker for worker in it.assigned if it.is_computing(worker)]
        assert computing or it.next_ready() is not None or it.allocator.done, "no worker can go on"
        if computing:
            worker = draw.choices(computing, [speed[one] for one in computing])[0]
            if draw.random() < 0.05:
                it.remove(worker)
            else:
                it.submit(worker)
    assert it.allocator.done
    assert set(settled.values()) == {1}
    assert len(settled) == 2 * it.allocator.samples
    if beyond == "wait":
        assert it.total.dropped == 0


def test_mistakes():
    with pytest.raises(ConfigError, match="limit=-1"):
        Staleness(limit=-1)
    with pytest.raises(ConfigError, match="beyond"):
        Staleness(beyond="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot be called"):
        Staleness(weight=0.5)  # type: ignore[arg-type]
    it = ledger()
    with pytest.raises(InternalError, match="not asked for"):
        it.submit(0)
    it.assign(0)
    with pytest.raises(InternalError, match="asks for a range and has"):
        it.assign(0)
