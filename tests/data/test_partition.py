"""Parts of samples and loads of tasks: complete, disjoint, and as even as promised."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from paceline.core.errors import UsageError
from paceline.data.partition import DataPartitioner, balance_workload

WEIGHTS = st.lists(st.one_of(st.integers(0, 20), st.floats(0, 1e6)), min_size=1, max_size=12).filter(any)


def sizes(partitioner: DataPartitioner) -> list[int]:
    return [partitioner.partition_size(rank) for rank in range(partitioner.world_size)]


def best_possible(costs: tuple[int, ...], workers: int) -> int:
    """The smallest load of the busiest worker, by trying every assignment."""
    return min(
        max(sum(cost for cost, to in zip(costs, choice, strict=True) if to == worker) for worker in choice)
        for choice in itertools.product(range(workers), repeat=len(costs))
    )


def test_uneven_total():
    partitioner = DataPartitioner(10, 4)
    assert [partitioner.get_partition(rank) for rank in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert list(partitioner.get_indices(2)) == [6, 7]
    assert sizes(partitioner) == [3, 3, 2, 2]
    assert repr(partitioner) == "DataPartitioner(10 samples over 4: 3, 3, 2, 2)"
    assert repr(DataPartitioner(9, 9)).endswith("1, 1, ...)")


@given(st.integers(0, 10**12), st.integers(1, 200))
@settings(deadline=None)
def test_parts_are_contiguous_complete_and_even(total, world):
    partitioner = DataPartitioner(total, world)
    bounds = [partitioner.get_partition(rank) for rank in range(world)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == total
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    assert max(sizes(partitioner)) - min(sizes(partitioner)) <= 1
    assert all(len(partitioner.get_indices(rank)) == size for rank, size in enumerate(sizes(partitioner)))


@given(st.integers(0, 10**9), WEIGHTS)
@settings(deadline=None)
def test_weighted_parts_are_shares_rounded(total, weights):
    partitioner = DataPartitioner(total, len(weights), weights=weights)
    counts = sizes(partitioner)
    whole = sum(map(Fraction, weights))
    assert sum(counts) == total
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - total * Fraction(weight) / whole) < 1
        assert weight or not count
    for (count, weight), (other, less) in itertools.permutations(zip(counts, weights, strict=True), 2):
        assert not (weight > less and count < other)


@given(st.integers(0, 1000), st.integers(1, 20), st.floats(0.1, 100))
@settings(deadline=None)
def test_equal_weights_are_no_weights(total, world, weight):
    assert sizes(DataPartitioner(total, world, [weight] * world)) == sizes(DataPartitioner(total, world))


def test_weights_of_any_number_type():
    for weights in ([1, 2.0, np.float32(1)], np.array([1, 2, 1]), torch.tensor([1.0, 2.0, 1.0])):
        assert sizes(DataPartitioner(100, 3, weights)) == [25, 50, 25]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((-1, 2), "total_size=-1"),
        ((2.0, 2), "total_size=2.0"),
        ((True, 2), "total_size=True"),
        ((5, 0), "world_size=0"),
        ((5, 2, [1]), r"weights=\[1\] for 2 ranks"),
        ((5, 2, [0, 0]), r"weights=\[0, 0\] for 2 ranks"),
        ((5, 2, [1, -1]), r"weights\[1\]=-1"),
        ((5, 2, [1, float("nan")]), r"weights\[1\]=nan"),
        ((5, 2, [float("inf"), 1]), r"weights\[0\]=inf"),
        ((5, 2, ["a", 1]), r"weights\[0\]='a'"),
        ((5, 2, [10**400, 1]), r"weights\[0\]=1000"),
        ((5, 2, [torch.ones(2), 1]), r"weights\[0\]=tensor"),
        ((5, 2, 3.0), "weights=3.0 is not a sequence"),
    ],
)
def test_bad_partitions_are_refused(arguments, said):
    with pytest.raises(UsageError, match=rf"(?s){said}.*try: "):
        DataPartitioner(*arguments)


@pytest.mark.parametrize("rank", [-1, 4, 1.0, None, False])
def test_bad_ranks_are_refused(rank):
    partitioner = DataPartitioner(10, 4)
    for method in (partitioner.get_partition, partitioner.get_indices, partitioner.partition_size):
        with pytest.raises(UsageError, match="rank is a whole number from 0 to 3"):
            method(rank)


def test_workload_example():
    assert balance_workload([5, 4, 3, 3, 3], 2) == [[0, 3], [1, 2, 4]]
    assert balance_workload([], 3) == [[], [], []]
    assert balance_workload([7.5], 3) == [[0], [], []]


def test_workload_of_free_tasks_is_spread():
    assert balance_workload([0, 0, 0, 0], 2) == [[0, 2], [1, 3]]


@given(st.lists(st.integers(0, 30), max_size=7), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_workload_is_within_its_bound_of_the_best(costs, workers):
    assignment = balance_workload(costs, workers)
    assert len(assignment) == workers
    assert sorted(itertools.chain(*assignment)) == list(range(len(costs)))
    busiest = max(sum(costs[task] for task in tasks) for tasks in assignment)
    if costs:
        assert busiest <= (Fraction(4, 3) - Fraction(1, 3 * workers)) * best_possible(tuple(costs), workers)


@pytest.mark.parametrize("workers", [2, 3])
def test_workload_bound_in_its_worst_case(workers):
    """Graham's own example, where the bound is reached."""
    costs = [*(cost for cost in range(2 * workers - 1, workers, -1) for _ in range(2)), *[workers] * 3]
    busiest = max(sum(costs[task] for task in tasks) for tasks in balance_workload(costs, workers))
    assert best_possible(tuple(costs), workers) == 3 * workers
    assert busiest == 4 * workers - 1


@given(st.lists(st.floats(0, 1e308), max_size=60), st.integers(1, 20))
@settings(deadline=None)
def test_workload_of_any_size_is_complete_and_repeatable(costs, workers):
    assignment = balance_workload(costs, workers)
    assert sorted(itertools.chain(*assignment)) == list(range(len(costs)))
    assert all(tasks == sorted(tasks) for tasks in assignment)
    assert assignment == balance_workload(iter(costs), workers)


@pytest.mark.parametrize(
    ("costs", "workers", "said"),
    [
        ([1, -2], 2, r"task_costs\[1\]=-2"),
        ([float("nan")], 2, r"task_costs\[0\]=nan"),
        ([1, None], 2, r"task_costs\[1\]=None"),
        ([True], 2, r"task_costs\[0\]=True"),
        (5, 2, "task_costs=5 is not a sequence"),
        ([1], 0, "world_size=0"),
        ([1], 1.5, "world_size=1.5"),
    ],
)
def test_bad_workloads_are_refused(costs, workers, said):
    with pytest.raises(UsageError, match=rf"(?s){said}.*try: "):
        balance_workload(costs, workers)
