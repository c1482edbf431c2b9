"""Seeded orders: draws by weight and buckets of like length, by position, the same everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from paceline.core.errors import ConfigError, UsageError
from paceline.data.orders import LengthBuckets, OrderedSource, WeightedOrder, epoch_order, facts_of
from paceline.data.sources import Request, as_source, check_apart, read, refuse_order

PINNED_DRAWS = [4, 2, 2, 2, 2, 4, 4, 4, 2, 4, 4, 2, 2, 4, 4, 4, 1, 4, 2, 2]
PINNED_BUCKETS = [1, 2, 5, 4, 7, 6, 3, 0]
WEIGHTS = [0.0, 1.0, 3.0, 0.0, 4.0, 0.0]


def draws(order: Any, seed: int = 1, epoch: int = 0, batch: int = 8) -> np.ndarray[Any, Any]:
    return np.asarray(order.of_epoch(seed, epoch, batch).take(0, order.positions))


def test_samples_are_drawn_as_often_as_their_weights_have_it() -> None:
    order = WeightedOrder(WEIGHTS, samples=80_000)
    counts = np.bincount(draws(order), minlength=6)
    assert counts[[0, 3, 5]].sum() == 0
    expected = np.array(WEIGHTS) / 8.0 * 80_000
    chosen = expected > 0
    # Chi-square of 3 classes: 13.8 is met by one seed in a thousand, and this one is fixed.
    assert (((counts - expected) ** 2)[chosen] / expected[chosen]).sum() < 13.8
    pairs = np.bincount(draws(order)[:-1] * 6 + draws(order)[1:], minlength=36).reshape(6, 6) / 80_000
    assert np.abs(pairs - np.outer(expected, expected) / 80_000**2).max() < 0.01


def test_draws_are_pinned_and_differ_by_seed_and_epoch() -> None:
    order = WeightedOrder(WEIGHTS)
    assert order.positions == 6
    long = WeightedOrder(WEIGHTS, samples=20)
    assert draws(long).tolist() == PINNED_DRAWS
    assert draws(long, epoch=1).tolist() != PINNED_DRAWS
    assert draws(long, seed=2).tolist() != PINNED_DRAWS


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 6), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_buckets_hold_every_sample_once_and_can_be_entered_anywhere(
    size: int, batch: int, pool: int, epoch: int
) -> None:
    lengths = np.random.default_rng(size).integers(1, 50, size)
    order = LengthBuckets(lengths, pool)
    ids = draws(order, epoch=epoch, batch=batch)
    assert sorted(ids.tolist()) == list(range(size))
    fresh = order.of_epoch(1, epoch, batch)
    for start in range(0, size, max(1, size // 5)):
        assert fresh.take(start, size).tolist() == ids[start:].tolist()
    for start in range(0, size, batch):
        assert np.all(np.diff(lengths[ids[start : start + batch]]) >= 0)  # sorted within a step


def test_steps_are_of_like_length_and_come_in_another_order_each_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 1000)
    order = LengthBuckets(lengths, pool=10)
    first, second = draws(order, batch=20), draws(order, epoch=1, batch=20)
    spread = [np.ptp(lengths[first[start : start + 20]]) for start in range(0, 1000, 20)]
    assert np.mean(spread) < 150  # of 1000: a tenth of a pool, and some chance
    means = [lengths[first[start : start + 20]].mean() for start in range(0, 200, 20)]
    assert means != sorted(means)
    assert first.tolist() != second.tolist()
    assert draws(LengthBuckets([3, 1, 2, 1, 5, 4, 9, 8], pool=2), batch=3).tolist() == PINNED_BUCKETS


def test_ordered_data_is_a_source_of_its_positions() -> None:
    data = torch.arange(6.0)
    source = as_source(WeightedOrder(WEIGHTS, samples=20).over(data))
    assert isinstance(source, OrderedSource)
    assert as_source(source) is source
    assert source.size == 20
    order = epoch_order(source, seed=1, epoch=0, batch=8, shuffle=True)
    (batch,) = read(source, [Request((0,), order.take(0, 20))])
    assert batch.data.tolist() == [float(one) for one in PINNED_DRAWS]
    assert source.fetch(order.take(0, 2)).data.tolist() == batch.data[:2].tolist()
    assert facts_of(as_source(data)) is None
    facts = facts_of(source)
    assert facts is not None
    assert (facts["kind"], facts["samples"], facts["positions"]) == ("WeightedOrder", 6, 20)
    assert facts_of(as_source(WeightedOrder([1.0] * 6).over(data))) != facts


def test_a_weighted_sampler_of_torch_becomes_the_order() -> None:
    dataset = TensorDataset(torch.arange(6.0))
    loader = DataLoader(dataset, batch_size=2, sampler=WeightedRandomSampler(WEIGHTS, 20))
    source = as_source(loader)
    assert isinstance(source, OrderedSource)
    assert facts_of(source) == WeightedOrder(WEIGHTS, 20).facts()
    bulk = DataLoader(
        dataset,
        batch_size=None,
        sampler=torch.utils.data.BatchSampler(WeightedRandomSampler(WEIGHTS, 20), 2, False),
    )
    assert facts_of(as_source(bulk)) == facts_of(source)
    without = DataLoader(dataset, sampler=WeightedRandomSampler(WEIGHTS, 3, replacement=False))
    with pytest.raises(UsageError, match="replacement=False") as caught:
        as_source(without)
    assert "WeightedOrder" in caught.value.remedy


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: WeightedOrder([]), "are no weights"),
        (lambda: WeightedOrder([1.0, -1.0]), "are no weights"),
        (lambda: WeightedOrder([1.0, float("nan")]), "are no weights"),
        (lambda: WeightedOrder([0.0, 0.0]), "the sum of 2 weights is 0"),
        (lambda: WeightedOrder([[1.0], [2.0]]), "shape"),
        (lambda: WeightedOrder("abc"), "not numbers"),
        (lambda: WeightedOrder([1.0], samples=0), "samples=0"),
        (lambda: LengthBuckets([]), "are no lengths"),
        (lambda: LengthBuckets([1.0, float("nan")]), "are no lengths"),
        (lambda: LengthBuckets([1, 2], pool=0), "pool=0"),
        (
            lambda: as_source(WeightedOrder([1.0]).over(torch.arange(2))),
            "is for 1 sample, and the data has 2",
        ),
        (lambda: as_source(WeightedOrder([1.0]).over(iter([1]))), "over a stream"),
        (lambda: WeightedOrder([1e308, 1e308]), "the sum of 2 weights is inf"),
        (
            lambda: as_source(LengthBuckets([1]).over(WeightedOrder([1.0]).over(torch.arange(1)))),
            "LengthBuckets over data that has the order WeightedOrder",
        ),
    ],
)
def test_what_is_no_order_is_refused(make: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make()


def test_an_order_is_for_training_and_instead_of_a_shuffle() -> None:
    plain = as_source(torch.arange(2))
    ordered = as_source(LengthBuckets([1, 2]).over(torch.arange(2)))
    for refuses in (lambda: check_apart(plain, {"": ordered}), lambda: refuse_order(ordered)):
        with pytest.raises(UsageError, match="has the order LengthBuckets"):
            refuses()
    check_apart(ordered, {"": plain})
    with pytest.raises(UsageError, match="the validation set 'far' is empty"):
        check_apart(ordered, {"": plain, "far": as_source(torch.arange(0))})
    with pytest.raises(ConfigError, match="shuffle=False"):
        epoch_order(ordered, seed=0, epoch=0, batch=1, shuffle=False)
