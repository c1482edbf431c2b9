"""The order of an epoch: a bijection, the same everywhere and for good, and without a pattern."""

from __future__ import annotations

import itertools
import math
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paceline.core.errors import UsageError
from paceline.data.permutation import BLOCK, LARGEST_SIZE, InOrder, Permutation

SEEDS = st.integers(0, 2**64 - 1)
SIZES = st.one_of(
    st.integers(0, 70), st.integers(BLOCK - 2, BLOCK + 70), st.integers(0, 20_000), st.just(10 * BLOCK)
)


def chi_square_z(counts: np.ndarray, expected: float, freedom: int) -> float:
    """How many standard deviations above chance the unevenness is (Wilson and Hilferty)."""
    ratio = float(((counts - expected) ** 2 / expected).sum()) / freedom
    return (math.cbrt(ratio) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@given(SIZES, SEEDS, st.integers(0, 2**64 - 1))
@settings(max_examples=120, deadline=None)
def test_every_sample_comes_exactly_once(size, seed, epoch):
    order = Permutation(size, seed, epoch).take(0, size)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(size))


@pytest.mark.parametrize("size", [*range(18), BLOCK - 1, BLOCK, BLOCK + 1, 4225, 4226, 99_991])
def test_bijection_at_sizes_around_every_edge(size):
    order = Permutation(size, 3, 1)
    ids = order.take(0, size)
    assert np.array_equal(np.sort(ids), np.arange(size))
    assert list(order) == ids.tolist()
    assert len(order) == size


@given(st.data(), st.one_of(st.integers(1, 20_000), st.integers(1, LARGEST_SIZE)), SEEDS)
@settings(max_examples=150, deadline=None)
def test_ways_to_look_at_it_agree(data, size, seed):
    order = Permutation(size, seed, 0)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, min(size, start + 3 * BLOCK)))
    ids = order.take(start, stop)
    assert len(ids) == stop - start
    assert np.array_equal(order.at(np.arange(start, stop)), ids)
    assert np.array_equal(order.at(range(stop - 1, start - 1, -1)), ids[::-1])
    if stop > start:
        place = data.draw(st.integers(0, stop - start - 1))
        assert order[start + place] == ids[place]
        assert order.position_of(ids[place]) == start + place


@given(st.integers(1, LARGEST_SIZE), SEEDS, st.data())
@settings(max_examples=100, deadline=None)
def test_ids_are_in_range_and_distinct_at_any_size(size, seed, data):
    start = data.draw(st.integers(0, max(0, size - 100)))
    ids = Permutation(size, seed, 5).take(start, min(size, start + 100))
    assert len(set(ids.tolist())) == len(ids)
    assert 0 <= ids.min() <= ids.max() < size


def test_the_order_is_pinned_for_good():
    """These numbers are in every run ever saved: if they change, no checkpoint can be resumed."""
    assert {
        (size, seed, epoch): Permutation(size, seed, epoch).take(start, start + 6).tolist()
        for size, seed, epoch, start in GOLDEN_AT
    } == GOLDEN


def test_a_read_does_not_depend_on_the_reads_before():
    order = Permutation(50_000, 1, 2)
    whole = order.take(0, 50_000)
    for start in (49_990, 0, 4090, 4096, 30_000, 4000):
        assert np.array_equal(order.take(start, start + 10), whole[start : start + 10])
        assert np.array_equal(Permutation(50_000, 1, 2).take(start, start + 10), whole[start : start + 10])


def test_what_is_returned_is_the_callers_own():
    order = Permutation(100, 0, 0)
    order.take(0, 10)[:] = -1
    order.at([1, 2])[:] = -1
    assert sorted(order.take(0, 100).tolist()) == list(range(100))


@pytest.mark.parametrize("size", [30, 1000, BLOCK + 1, 10**6])
def test_seeds_epochs_and_sizes_give_unrelated_orders(size):
    orders = [
        Permutation(size, seed, epoch).take(0, 30).tolist() for seed in range(10) for epoch in range(10)
    ]
    assert len({tuple(order) for order in orders}) == 100
    assert Permutation(size + 1, 0, 0).take(0, 30).tolist() != orders[0]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("by_seed", [True, False])
def test_all_orders_of_a_few_samples_are_equally_likely(size, by_seed):
    numbers = {order: number for number, order in enumerate(itertools.permutations(range(size)))}
    counts = np.zeros(len(numbers))
    for turn in range(3000):
        order = Permutation(size, turn, 0) if by_seed else Permutation(size, 11, turn)
        counts[numbers[tuple(order)]] += 1
    assert chi_square_z(counts, 3000 / len(counts), len(counts) - 1) < 4


@pytest.mark.parametrize("size", [BLOCK, BLOCK + 1, 5003, 65 * 65])
def test_every_position_holds_every_sample_equally_often(size):
    """Where the first, a middle and the last position land over many seeds, in 50 bins."""
    places = [0, size // 2, size - 1]
    seen = np.array([Permutation(size, seed, 0).at(places) for seed in range(1500)])
    for column in seen.T:
        counts = np.bincount(column * 50 // size, minlength=50)
        assert chi_square_z(counts, 1500 / 50, 49) < 4


@pytest.mark.parametrize("size", [1000, BLOCK + 1, 10**5, 10**6])
def test_neighbours_tell_nothing_about_each_other(size):
    """Pairs of ids at small distances, and at those that share a digit, fill a 16 x 16 table evenly."""
    side = math.isqrt(size - 1) + 1
    for seed in range(3):
        ids = Permutation(size, seed, 0).take(0, min(size, 100_000))
        for distance in (1, 2, side, -(-size // side)):
            pairs = (ids[:-distance] * 16 // size) * 16 + ids[distance:] * 16 // size
            counts = np.bincount(pairs, minlength=256)
            assert chi_square_z(counts, len(pairs) / 256, 255) < 4
        steps = np.bincount(np.diff(ids) % size * 64 // size, minlength=64)
        assert chi_square_z(steps, (len(ids) - 1) / 64, 63) < 4
        assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 4 / math.sqrt(len(ids))


def test_two_epochs_tell_nothing_about_each_other():
    size = 100_000
    one = Permutation(size, 9, 0).take(0, size)
    for other in (Permutation(size, 9, 1), Permutation(size, 10, 0)):
        ids = other.take(0, size)
        counts = np.bincount((one * 16 // size) * 16 + ids * 16 // size, minlength=256)
        assert chi_square_z(counts, size / 256, 255) < 4
        # Of a random order one sample is expected to stay where it was.
        assert np.count_nonzero(one == ids) < 8


def test_number_of_fixed_points_is_that_of_a_random_order():
    fixed = [
        np.count_nonzero(Permutation(5003, seed, 0).take(0, 5003) == np.arange(5003)) for seed in range(400)
    ]
    assert abs(np.mean(fixed) - 1) < 4 / math.sqrt(400)
    assert 0.7 < np.var(fixed) < 1.4


def test_a_hundred_million_samples_take_no_memory():
    Permutation(10**8, 0, 0).take(0, 64)
    tracemalloc.start()
    try:
        order = Permutation(10**8, 1, 3)
        for start in (0, 5 * 10**7, 10**8 - 64):
            order.take(start, start + 64)
        order.position_of(12_345_678)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_travels_as_three_numbers():
    order = Permutation(10**6, 4, 2)
    order.take(0, 1000)
    sent = pickle.dumps(order)
    assert len(sent) < 200
    assert pickle.loads(sent) == order
    assert pickle.loads(sent).take(5, 9).tolist() == order.take(5, 9).tolist()
    assert order != Permutation(10**6, 4, 3)
    assert {order: 1}[Permutation(10**6, 4, 2)] == 1
    assert repr(order) == "Permutation(size=1000000, seed=4, epoch=2)"


def test_numpy_integers_are_welcome():
    order = Permutation(np.int64(100), np.uint64(2**64 - 1), np.int32(3))  # type: ignore[arg-type]
    assert order[np.int64(5)] == order.take(np.int64(5), np.int64(6))[0]  # type: ignore[index, arg-type]


def test_in_order_is_the_identity():
    order = InOrder(10)
    assert order.take(3, 6).tolist() == [3, 4, 5]
    assert order.at([9, 0]).tolist() == [9, 0]
    assert order[4] == order.position_of(4) == 4
    assert list(order) == list(range(10))
    assert len(order) == 10
    assert pickle.loads(pickle.dumps(order)) == order != InOrder(11)
    assert {order: 1}[InOrder(10)] == 1
    assert repr(order) == "InOrder(size=10)"


@pytest.mark.parametrize(
    ("size", "seed", "epoch"),
    [(-1, 0, 0), (LARGEST_SIZE + 1, 0, 0), (5, -1, 0), (5, 2**64, 0), (5, 0, -1), (2.5, 0, 0), (5, True, 0)],
)
def test_bad_definitions_are_refused(size, seed, epoch):
    with pytest.raises(UsageError, match=r"try: .* is a whole number from 0 to"):
        Permutation(size, seed, epoch)


@pytest.mark.parametrize("order", [Permutation(10, 0, 0), InOrder(10)], ids=["shuffled", "in order"])
def test_bad_positions_are_refused(order):
    for start, stop in [(-1, 3), (0, 11), (5, 4), (0.0, 2), (None, 2), (0, np.array([1, 2]))]:
        with pytest.raises(UsageError, match="is a whole number"):
            order.take(start, stop)
    for position in (-1, 10, "a", 1.0, True):
        with pytest.raises(UsageError, match="is a whole number from 0 to 9"):
            order[position]
        with pytest.raises(UsageError, match="sample is a whole number from 0 to 9"):
            order.position_of(position)
    for positions in ([-1], [3, 10]):
        with pytest.raises(UsageError, match="in an order of 10 samples"):
            order.at(positions)
    with pytest.raises(UsageError, match="positions of type float64"):
        order.at([0.5])
    assert order.at([]).tolist() == []


@pytest.mark.parametrize("order", [Permutation(0, 0, 0), InOrder(0)], ids=["shuffled", "in order"])
def test_no_samples(order):
    assert order.take(0, 0).tolist() == list(order) == []
    with pytest.raises(UsageError, match="of an order of no samples"):
        order[0]
    with pytest.raises(UsageError, match="of an order of no samples"):
        order.position_of(0)


GOLDEN_AT = [
    (7, 0, 0, 0),
    (1000, 7, 3, 0),
    (4097, 1, 0, 4000),
    (60_000, 42, 1, 30_000),
    (10**8, 0, 0, 5 * 10**7),
    (10**8, 2**64 - 1, 2**64 - 1, 0),
    (LARGEST_SIZE, 5, 9, LARGEST_SIZE - 6),
]
GOLDEN = {
    (7, 0, 0): [5, 0, 6, 2, 1, 3],
    (1000, 7, 3): [574, 471, 778, 86, 515, 274],
    (4097, 1, 0): [4007, 272, 260, 1629, 220, 251],
    (60000, 42, 1): [374, 7294, 22445, 42762, 19672, 56751],
    (100000000, 0, 0): [40224086, 90797591, 66725282, 33992809, 33915111, 10907032],
    (100000000, 18446744073709551615, 18446744073709551615): [
        19956816,
        47852237,
        9479585,
        53435682,
        97086645,
        55607782,
    ],
    (281474976710656, 5, 9): [
        71316230641012,
        187924403621743,
        37367383833154,
        24233306878487,
        193680384344599,
        174480642838121,
    ],
}
