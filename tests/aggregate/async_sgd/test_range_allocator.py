"""Every position of every epoch is settled exactly once, whichever worker is lost on the way."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from paceline.aggregate.async_sgd.range_allocator import RangeAllocator, SampleRange
from paceline.core.errors import InternalError, UsageError


def positions(part: SampleRange) -> list[tuple[int, int]]:
    return [(part.epoch, place) for place in range(part.start, part.stop)]


def test_ranges_come_in_order_and_the_last_is_short():
    dealer = RangeAllocator(samples=10, epochs=2, batch=4)
    parts = []
    while (part := dealer.take()) is not None:
        parts.append(part)
    assert parts == [
        SampleRange(0, 0, 4),
        SampleRange(0, 4, 8),
        SampleRange(0, 8, 10),
        SampleRange(1, 0, 4),
        SampleRange(1, 4, 8),
        SampleRange(1, 8, 10),
    ]
    completed = []
    for part in (*parts[3:], *parts[:3]):
        dealer.settle(part)
        completed.append(dealer.completed)
    assert completed == [0, 0, 0, 0, 0, 2]
    assert dealer.done
    assert dealer.settled == 20


def test_what_is_given_back_is_dealt_before_anything_new():
    dealer = RangeAllocator(samples=9, epochs=1, batch=3)
    first, second = dealer.take(), dealer.take()
    assert first is not None
    assert second is not None
    dealer.give_back(second)
    dealer.give_back(first)
    assert [dealer.take(), dealer.take(), dealer.take()] == [first, second, SampleRange(0, 6, 9)]
    assert dealer.take() is None
    assert not dealer.done


@pytest.mark.parametrize("seed", range(30))
def test_random_losses_and_restarts_settle_every_position_once(seed):
    draw = random.Random(seed)
    samples, epochs, batch = draw.randint(1, 40), draw.randint(1, 4), draw.randint(1, 12)
    dealer = RangeAllocator(samples, epochs, batch)
    out: list[SampleRange] = []
    settled: Counter[tuple[int, int]] = Counter()
    while not dealer.done:
        choice = draw.random()
        if choice < 0.05:
            # A server that starts again from what was saved: what was under way is missing.
            state = dealer.state_dict()
            dealer = RangeAllocator(samples, epochs, batch)
            dealer.load_state_dict(state)
            out.clear()
        elif choice < 0.5 and (part := dealer.take()) is not None:
            out.append(part)
        elif out:
            part = out.pop(draw.randrange(len(out)))
            if draw.random() < 0.2:
                dealer.give_back(part)
            else:
                dealer.settle(part)
                settled.update(positions(part))
        assert dealer.settled == sum(settled.values())
    assert settled == {(epoch, place): 1 for epoch in range(epochs) for place in range(samples)}
    assert dealer.completed == epochs


def test_a_finished_run_has_nothing_to_deal_and_a_longer_one_goes_on():
    dealer = RangeAllocator(4, 1, 4)
    part = dealer.take()
    assert part is not None
    dealer.settle(part)
    again = RangeAllocator(4, 1, 4)
    again.load_state_dict(dealer.state_dict())
    assert again.done
    assert again.take() is None
    longer = RangeAllocator(4, 2, 4)
    longer.load_state_dict(dealer.state_dict())
    assert longer.take() == SampleRange(1, 0, 4)


def test_settling_what_no_worker_has_is_a_bug_and_no_samples_a_mistake():
    with pytest.raises(InternalError, match="was not allocated"):
        RangeAllocator(4, 1, 2).settle(SampleRange(0, 0, 2))
    with pytest.raises(UsageError):
        RangeAllocator(0, 1, 2)
