"""Cut work into one part per worker: samples into contiguous ranges, tasks of known cost into even loads.

Pure arithmetic.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate
from numbers import Real
from typing import final

from paceline.core.errors import UsageError
from paceline.core.wording import counted
from paceline.data.whole_numbers import whole


@final
class DataPartitioner:
    """Samples 0 to total_size - 1 in one contiguous part per rank: every sample in exactly one part.
    `total_samples` is another name of `total_size`.

    Without weights the sizes differ by at most one, and the first ranks have the larger parts. With weights
    (one per rank: speeds, or memory) a rank's size is its share rounded down or up; equal weights are the
    same as none, a heavier rank never gets less than a lighter one, weight 0 gets nothing.
    """

    def __init__(
        self,
        total_size: int | None = None,
        world_size: int = 1,
        weights: Sequence[float] | None = None,
        *,
        total_samples: int | None = None,
    ) -> None:
        if (total_size is None) == (total_samples is None):
            given = "neither is given" if total_size is None else "both are given"
            raise UsageError(
                f"DataPartitioner: total_size and total_samples are the same setting, and {given}",
                remedy="pass one of them: DataPartitioner(total_samples=1000, world_size=4)",
            )
        name, size = ("total_size", total_size) if total_samples is None else ("total_samples", total_samples)
        self.total_size = whole(name, size, 0)
        self.world_size = whole("world_size", world_size, 1)
        if weights is None:
            base, extra = divmod(self.total_size, self.world_size)
            sizes = [base + (rank < extra) for rank in range(self.world_size)]
        else:
            sizes = _shares(self.total_size, _checked_weights(weights, self.world_size))
        self._bounds = [0, *accumulate(sizes)]

    def get_partition(self, rank: int) -> tuple[int, int]:
        """Return the rank's samples as (start, end); end is not one of them."""
        rank = whole("rank", rank, 0, self.world_size - 1)
        return self._bounds[rank], self._bounds[rank + 1]

    def get_indices(self, rank: int) -> range:
        """Return the rank's samples as a range: a sequence that takes no memory, whatever its length."""
        return range(*self.get_partition(rank))

    def partition_size(self, rank: int) -> int:
        """Return how many samples the rank has."""
        start, end = self.get_partition(rank)
        return end - start

    def __repr__(self) -> str:
        sizes = [self.partition_size(rank) for rank in range(min(self.world_size, 8))]
        more = ", ..." if self.world_size > len(sizes) else ""
        total = counted(self.total_size, "sample")
        return f"DataPartitioner({total} over {self.world_size}: {str(sizes)[1:-1]}{more})"


def balance_workload(task_costs: Iterable[float], world_size: int) -> list[list[int]]:
    """Assign tasks to workers so that the busiest one has little more to do than it must.

    Returns one list per worker of the indices of its tasks, ascending; every task is in exactly one list.
    The longest task goes first, each to the worker that has least so far (LPT): the busiest worker's load is
    at most 4/3 - 1/(3 world_size) of the best possible. Ties go to the worker with fewer tasks, then to the
    lower rank, so that the answer depends on the costs alone.
    """
    workers = whole("world_size", world_size, 1)
    costs = _numbers("task_costs", task_costs, "costs are numbers from 0, one per task")
    # In parts of the largest: sums of huge costs stay finite.
    largest = max(costs, default=0.0) or 1.0
    loads = [(0.0, 0, worker) for worker in range(workers)]
    assignment: list[list[int]] = [[] for _ in range(workers)]
    for task in sorted(range(len(costs)), key=lambda task: -costs[task]):
        load, count, worker = loads[0]
        assignment[worker].append(task)
        heapq.heapreplace(loads, (load + costs[task] / largest, count + 1, worker))
    return [sorted(tasks) for tasks in assignment]


def _shares(total: int, weights: list[float]) -> list[int]:
    """Round shares by largest remainders, in exact arithmetic; of equal ones the lower rank's is larger."""
    exact = [Fraction(weight) for weight in weights]
    unit = total / sum(exact)
    sizes = [math.floor(weight * unit) for weight in exact]
    remainders = [weight * unit - size for weight, size in zip(exact, sizes, strict=True)]
    by_remainder = sorted(range(len(sizes)), key=lambda rank: -remainders[rank])
    for rank in by_remainder[: total - sum(sizes)]:
        sizes[rank] += 1
    return sizes


def _checked_weights(weights: Sequence[float], world_size: int) -> list[float]:
    remedy = f"pass {counted(world_size, 'number')} from 0, one per rank, not all of them 0"
    numbers = _numbers("weights", weights, remedy)
    if len(numbers) != world_size or not any(numbers):
        raise UsageError(f"weights={weights!r} for {counted(world_size, 'rank')}", remedy=remedy)
    return numbers


def _numbers(name: str, values: Iterable[float], remedy: str) -> list[float]:
    """Return finite floats from 0, or raise an error that names the first that is none."""
    try:
        given = list(values)
    except TypeError as error:
        raise UsageError(f"{name}={values!r} is not a sequence", remedy=remedy) from error
    numbers = []
    for place, value in enumerate(given):
        number = _number(value)
        if number is None or not 0 <= number < math.inf:
            raise UsageError(f"{name}[{place}]={value!r}", remedy=remedy)
        numbers.append(number)
    return numbers


def _number(value: object) -> float | None:
    # Elements of tensors have no number type; `item` gives Python's.
    item = getattr(value, "item", None)
    try:
        plain = item() if callable(item) else value
        return None if isinstance(plain, bool) or not isinstance(plain, Real) else float(plain)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
