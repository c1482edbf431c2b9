"""Every position of every epoch is settled exactly once, whoever is lost on the way."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from paceline.aggregate.dealing import Dealer, Range
from paceline.core.errors import InternalError, UsageError


def positions(part: Range) -> list[tuple[int, int]]:
    return [(part.epoch, place) for place in range(part.start, part.stop)]


def test_ranges_come_in_order_and_the_last_is_short():
    dealer = Dealer(samples=10, epochs=2, batch=4)
    parts = []
    while (part := dealer.take()) is not None:
        parts.append(part)
    assert parts == [
        Range(0, 0, 4),
        Range(0, 4, 8),
        Range(0, 8, 10),
        Range(1, 0, 4),
        Range(1, 4, 8),
        Range(1, 8, 10),
    ]
    assert [dealer.settle(part) for part in (*parts[3:], *parts[:3])] == [[], [], [], [], [], [0, 1]]
    assert dealer.done
    assert dealer.settled == 20


def test_what_is_given_back_is_dealt_before_anything_new():
    dealer = Dealer(samples=9, epochs=1, batch=3)
    first, second = dealer.take(), dealer.take()
    assert first is not None
    assert second is not None
    dealer.give_back(second)
    dealer.give_back(first)
    assert [dealer.take(), dealer.take(), dealer.take()] == [first, second, Range(0, 6, 9)]
    assert dealer.take() is None
    assert not dealer.done


@pytest.mark.parametrize("seed", range(30))
def test_random_losses_and_restarts_settle_every_position_once(seed):
    draw = random.Random(seed)
    samples, epochs, batch = draw.randint(1, 40), draw.randint(1, 4), draw.randint(1, 12)
    dealer = Dealer(samples, epochs, batch)
    out: list[Range] = []
    settled: Counter[tuple[int, int]] = Counter()
    completed: list[int] = []
    while not dealer.done:
        choice = draw.random()
        if choice < 0.05:
            # A server that starts again from what was saved: what was under way is missing.
            state = dealer.state_dict()
            dealer = Dealer(samples, epochs, batch)
            dealer.load_state_dict(state)
            out.clear()
        elif choice < 0.5 and (part := dealer.take()) is not None:
            out.append(part)
        elif out:
            part = out.pop(draw.randrange(len(out)))
            if draw.random() < 0.2:
                dealer.give_back(part)
            else:
                completed += dealer.settle(part)
                settled.update(positions(part))
        assert dealer.settled == sum(settled.values())
    assert settled == {(epoch, place): 1 for epoch in range(epochs) for place in range(samples)}
    assert completed == list(range(epochs))


def test_a_finished_run_has_nothing_to_deal_and_a_longer_one_goes_on():
    dealer = Dealer(4, 1, 4)
    part = dealer.take()
    assert part is not None
    dealer.settle(part)
    again = Dealer(4, 1, 4)
    again.load_state_dict(dealer.state_dict())
    assert again.done
    assert again.take() is None
    longer = Dealer(4, 2, 4)
    longer.load_state_dict(dealer.state_dict())
    assert longer.take() == Range(1, 0, 4)


def test_settling_what_nobody_has_is_a_bug_and_no_samples_a_mistake():
    with pytest.raises(InternalError, match="nobody had it"):
        Dealer(4, 1, 2).settle(Range(0, 0, 2))
    with pytest.raises(UsageError):
        Dealer(0, 1, 2)
