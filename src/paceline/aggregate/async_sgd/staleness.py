"""Asynchronous SGD: workers never wait for each other, and an old gradient weighs less than a fresh one.

Idea          One server process holds parameters and optimizer. A worker gets a range of samples and the
              newest parameters, computes a gradient and returns it with the version it started from. The
              server applies it at once, which makes the next version. Its staleness is the number of versions
              since the worker started; it is applied with the learning rate times `weight(staleness)`, by
              default 1 / (1 + staleness). Gradients beyond `limit` are dropped and their samples assigned
              again ("drop"), or never come about, because the server applies the older ones first and lets
              the others wait ("wait").
What travels  Between server and worker, per step: parameters one way, a gradient the other way, both through
              shared memory; control is a message of a hundred bytes on a private socket pair. Every step of
              every worker costs one copy of the parameters and one of the gradient.
What it costs The server's time per step bounds all workers together: it applies one gradient after the other.
              The result depends on which worker was faster: two runs differ. Memory: three times the
              parameters per worker.
What survives A worker that dies or hangs loses the gradient it was computing; its range is assigned to the
              next worker that asks. Every sample of an epoch is applied exactly once. If the server dies, the
              job continues from the newest checkpoint, which lists the ranges that were missing.

This module decides (pure: no tensors, no processes); gradient_exchange.py has sockets and memory,
gradient_server.py the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, final

from paceline.aggregate.async_sgd.range_allocator import RangeAllocator, SampleRange
from paceline.core.errors import ConfigError, InternalError, UsageError
from paceline.train.settings.value_checks import refuse

Weight = Callable[[int], float]


def inverse(staleness: int) -> float:
    """Weigh a fresh gradient 1, one that is one version old a half, two versions a third."""
    return 1.0 / (1.0 + staleness)


def constant(staleness: int) -> float:
    """Weigh every gradient alike, however old."""
    return 1.0


@final
@dataclass(frozen=True, kw_only=True)
class Staleness:
    """Treatment of old gradients. `limit` None: four times the number of workers."""

    weight: Weight = inverse
    limit: int | None = None
    beyond: Literal["drop", "wait"] = "drop"

    def __post_init__(self) -> None:
        if not callable(self.weight):
            raise ConfigError(
                f"Staleness: weight={self.weight!r} cannot be called",
                remedy="give a function from the staleness to a factor, or leave it out",
                key="weight",
            )
        whole_limit = isinstance(self.limit, int) and not isinstance(self.limit, bool) and self.limit >= 0
        if self.limit is not None and not whole_limit:
            remedy = "leave it out, or set it to twice the number of workers or more"
            refuse(self, "limit", f"limit={self.limit!r} is not a whole number from 0", remedy)
        if self.beyond not in ("drop", "wait"):
            refuse(self, "beyond", f"beyond={self.beyond!r}", 'use beyond="drop" or "wait"')


@final
@dataclass
class GradientCounts:
    """Counts of the gradients of one worker, or of all workers together, by what became of them."""

    applied: int = 0
    samples: int = 0
    dropped: int = 0  # too old; their samples were assigned again
    lost: int = 0  # in progress when the worker was lost; their samples were assigned again
    not_finite: int = 0  # counted as done, and changed nothing
    histogram: dict[int, int] = field(default_factory=dict)  # staleness -> applied gradients

    @property
    def mean_staleness(self) -> float:
        return sum(age * count for age, count in self.histogram.items()) / max(self.applied, 1)

    def to_dict(self) -> dict[str, Any]:
        histogram = {str(age): self.histogram[age] for age in sorted(self.histogram)}
        return {**asdict(self), "mean_staleness": self.mean_staleness, "histogram": histogram}


@dataclass(frozen=True)
class RangeAssignment:
    """A range for a worker, and the version of the parameters that it starts from."""

    part: SampleRange
    version: int


@dataclass(frozen=True)
class GradientDecision:
    """Decision about a gradient. `weight` is None for one that is not applied."""

    assignment: RangeAssignment
    staleness: int
    weight: float | None


@final
class GradientLedger:
    """Ledger of ranges and gradients: assigns ranges, accepts gradients, decides their weight. Workers are
    numbers."""

    def __init__(self, allocator: RangeAllocator, staleness: Staleness, workers: int) -> None:
        self.allocator = allocator
        self.workers = workers
        self.version = 0
        self.total = GradientCounts()
        self.by_worker: dict[int, GradientCounts] = {}
        self._staleness = staleness
        self._limit = 4 * workers if staleness.limit is None else staleness.limit
        self.assigned: dict[int, RangeAssignment] = {}  # and not decided yet, by worker
        self._submitted: list[int] = []

    def is_computing(self, worker: int) -> bool:
        """Return whether this worker is expected to submit a gradient."""
        return worker in self.assigned and worker not in self._submitted

    def assign(self, worker: int) -> RangeAssignment | None:
        """Return the next range for a worker; None when it has to wait."""
        if worker in self.assigned:
            raise InternalError(f"worker {worker} asks for a range and has {self.assigned[worker]}")
        if self._staleness.beyond == "wait" and len(self.assigned) > self._limit:
            # Were all others applied first, its gradient would be too old by then.
            return None
        part = self.allocator.take()
        if part is None:
            return None
        self.assigned[worker] = RangeAssignment(part, self.version)
        return self.assigned[worker]

    def submit(self, worker: int) -> None:
        """Note that the worker's gradient has arrived; `next_ready` gives the order to apply them in."""
        if not self.is_computing(worker):
            raise InternalError(f"worker {worker} submits a gradient that it was not asked for")
        self._submitted.append(worker)

    def next_ready(self) -> int | None:
        """Return the worker whose gradient is decided next; None if all that are here must wait."""
        if self._staleness.beyond == "drop":
            return self._submitted[0] if self._submitted else None
        oldest_first = sorted(self._submitted, key=self._age_order)
        return next((worker for worker in oldest_first if not self._makes_another_too_old(worker)), None)

    def decide(self, worker: int, *, finite: bool = True) -> GradientDecision:
        """Decide about the worker's gradient; afterwards the worker has none."""
        self._submitted.remove(worker)
        assignment = self.assigned.pop(worker)
        age = self.version - assignment.version
        counts = (self.total, self.by_worker.setdefault(worker, GradientCounts()))
        if finite and age > self._limit:
            self.allocator.give_back(assignment.part)
            for count in counts:
                count.dropped += 1
            return GradientDecision(assignment, age, None)
        self.allocator.settle(assignment.part)
        for count in counts:
            count.samples += assignment.part.count
            if finite:
                count.applied += 1
                count.histogram[age] = count.histogram.get(age, 0) + 1
            else:
                count.not_finite += 1
        if not finite:
            return GradientDecision(assignment, age, None)
        self.version += 1
        return GradientDecision(assignment, age, self._weight(age))

    def remove(self, worker: int) -> RangeAssignment | None:
        """Give back the range of a lost worker, for another one."""
        assignment = self.assigned.pop(worker, None)
        if assignment is None:
            return None
        if worker in self._submitted:
            self._submitted.remove(worker)
        self.allocator.give_back(assignment.part)
        for count in (self.total, self.by_worker.setdefault(worker, GradientCounts())):
            count.lost += 1
        return assignment

    def statistics(self) -> dict[str, Any]:
        """Return plain data for people and for JSON."""
        workers = {str(worker): self.by_worker[worker].to_dict() for worker in sorted(self.by_worker)}
        return {**self.total.to_dict(), "limit": self._limit, "workers": workers}

    def _weight(self, age: int) -> float:
        weight = self._staleness.weight(age)
        if not isinstance(weight, int | float) or not 0.0 <= weight < float("inf"):
            name = getattr(self._staleness.weight, "__name__", repr(self._staleness.weight))
            raise UsageError(
                f"the weight {name}({age}) is {weight!r}",
                remedy="return a factor of the learning rate, a finite number from 0",
            )
        return float(weight)

    def _age_order(self, worker: int) -> tuple[int, int]:
        return self.assigned[worker].version, worker

    def _makes_another_too_old(self, worker: int) -> bool:
        """Return whether an older gradient would be beyond the limit if this worker's were applied ahead of
        its turn and the older ones after it, in order. Applying oldest first makes no gradient too old."""
        order = sorted(self.assigned, key=self._age_order)
        older = order[: order.index(worker)]
        return any(
            self.version + 1 + turn - self.assigned[other].version > self._limit
            for turn, other in enumerate(older)
        )
