"""Asynchronous SGD: nobody waits for anybody, and an old gradient weighs less than a fresh one.

Idea          One server process holds parameters and optimizer. A worker gets a range of samples and the
              newest parameters, computes a gradient and hands it in with the version it started from. The
              server applies it at once, which makes the next version. Its staleness is the number of versions
              since the worker started; it is applied with the learning rate times `weight(staleness)`, by
              default 1 / (1 + staleness). Gradients beyond `max_staleness` are dropped and their samples
              dealt again ("drop"), or never come about, because the server applies the older ones first and
              lets the others wait ("wait").
What travels  Between server and worker, per step: parameters one way, a gradient the other way, both through
              shared memory; control is a message of a hundred bytes on a socket pair that nobody else can
              reach. Every step of every worker costs one copy of the parameters and one of the gradient.
What it costs The server's time per step bounds all workers together: it applies one gradient after the other.
              The result depends on who was faster: two runs differ. Memory: three times the parameters per
              worker.
What survives A worker that dies or hangs loses the gradient it had under way; its range is dealt again, to
              whoever asks next. Every sample of an epoch is applied exactly once. The server's death ends the
              job; it goes on from the newest checkpoint, which has the ranges that were missing.

Here is what the server decides; memory, sockets and the loop are in async_memory, async_server and
async_worker. Pure. Must not know tensors or processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

from paceline.aggregate.dealing import Dealer, Range
from paceline.core.errors import ConfigError, InternalError, UsageError

Weight = Callable[[int], float]


def inverse(staleness: int) -> float:
    """1 for a fresh gradient, a half for one that is one version old, a third for two."""
    return 1.0 / (1.0 + staleness)


def constant(staleness: int) -> float:
    """Every gradient counts alike, however old."""
    return 1.0


@final
@dataclass(frozen=True, kw_only=True)
class Staleness:
    """What becomes of old gradients. `limit` None: four times the number of workers."""

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
            raise ConfigError(
                f"Staleness: limit={self.limit!r} is not a whole number from 0",
                remedy="leave it out, or set it to twice the number of workers or more",
                key="limit",
            )
        if self.beyond not in ("drop", "wait"):
            raise ConfigError(
                f"Staleness: beyond={self.beyond!r}", remedy='use beyond="drop" or "wait"', key="beyond"
            )

    def limit_for(self, workers: int) -> int:
        return 4 * workers if self.limit is None else self.limit


@final
@dataclass
class Tally:
    """What became of one worker's gradients, or of everybody's."""

    applied: int = 0
    samples: int = 0
    dropped: int = 0  # too old; their samples were dealt again
    lost: int = 0  # under way when the worker was lost; their samples were dealt again
    not_finite: int = 0  # counted as done, and changed nothing
    histogram: dict[int, int] = field(default_factory=dict)  # staleness -> applied gradients

    @property
    def mean_staleness(self) -> float:
        return sum(age * count for age, count in self.histogram.items()) / max(self.applied, 1)

    def to_dict(self) -> dict[str, Any]:
        return {
            "applied": self.applied,
            "samples": self.samples,
            "dropped": self.dropped,
            "lost": self.lost,
            "not_finite": self.not_finite,
            "mean_staleness": self.mean_staleness,
            "histogram": {str(age): self.histogram[age] for age in sorted(self.histogram)},
        }


@dataclass(frozen=True)
class Work:
    """A range for a worker, and the version of the parameters that it starts from."""

    part: Range
    version: int


@dataclass(frozen=True)
class Judgement:
    """What becomes of a gradient. `weight` is None for one that is not applied."""

    work: Work
    staleness: int
    weight: float | None
    completed: tuple[int, ...] = ()  # epochs


@final
class Desk:
    """Hands out ranges, takes gradients, decides their weight. Workers are numbers."""

    def __init__(self, dealer: Dealer, staleness: Staleness, workers: int) -> None:
        self.dealer = dealer
        self.version = 0
        self.total = Tally()
        self.by_worker: dict[int, Tally] = {}
        self._staleness = staleness
        self._limit = staleness.limit_for(workers)
        self._at_work: dict[int, Work] = {}
        self._handed_in: list[int] = []

    @property
    def under_way(self) -> Mapping[int, Work]:
        """Everything that was handed out and not judged yet."""
        return self._at_work

    def computes(self, worker: int) -> bool:
        """Whether this worker is expected to hand something in."""
        return worker in self._at_work and worker not in self._handed_in

    def hand_out(self, worker: int) -> Work | None:
        """The next range for a worker; None when it has to wait."""
        if worker in self._at_work:
            raise InternalError(f"worker {worker} asks for work and has {self._at_work[worker]}")
        if self._staleness.beyond == "wait" and len(self._at_work) > self._limit:
            # Were all others applied first, its gradient would be too old by then.
            return None
        part = self.dealer.take()
        if part is None:
            return None
        self._at_work[worker] = Work(part, self.version)
        return self._at_work[worker]

    def hand_in(self, worker: int) -> None:
        """The worker's gradient is there; `next_ready` says when its turn comes."""
        if not self.computes(worker):
            raise InternalError(f"worker {worker} hands in what it was not asked for")
        self._handed_in.append(worker)

    def next_ready(self) -> int | None:
        """Whose gradient is to be judged now; None when nobody's is, or they have to wait for older ones."""
        if self._staleness.beyond == "drop":
            return self._handed_in[0] if self._handed_in else None
        waiting = sorted(self._handed_in, key=self._age_order)
        return next((worker for worker in waiting if not self._makes_another_too_old(worker)), None)

    def judge(self, worker: int, *, finite: bool = True) -> Judgement:
        """Decides about the gradient; afterwards the worker has none."""
        self._handed_in.remove(worker)
        work = self._at_work.pop(worker)
        age = self.version - work.version
        tallies = (self.total, self.by_worker.setdefault(worker, Tally()))
        if finite and age > self._limit:
            self.dealer.give_back(work.part)
            for tally in tallies:
                tally.dropped += 1
            return Judgement(work, age, None)
        completed = tuple(self.dealer.settle(work.part))
        for tally in tallies:
            tally.samples += work.part.count
            if finite:
                tally.applied += 1
                tally.histogram[age] = tally.histogram.get(age, 0) + 1
            else:
                tally.not_finite += 1
        if not finite:
            return Judgement(work, age, None, completed)
        self.version += 1
        return Judgement(work, age, self._weight(age), completed)

    def forget(self, worker: int) -> Work | None:
        """The worker is lost: what it had goes to somebody else."""
        work = self._at_work.pop(worker, None)
        if work is None:
            return None
        if worker in self._handed_in:
            self._handed_in.remove(worker)
        self.dealer.give_back(work.part)
        for tally in (self.total, self.by_worker.setdefault(worker, Tally())):
            tally.lost += 1
        return work

    def statistics(self) -> dict[str, Any]:
        """Plain data for people and for JSON."""
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
        return self._at_work[worker].version, worker

    def _makes_another_too_old(self, worker: int) -> bool:
        """Oldest first is an order in which nobody becomes too old; whoever is ahead of its turn may go only
        as long as that stays so."""
        order = sorted(self._at_work, key=self._age_order)
        older = order[: order.index(worker)]
        return any(
            self.version + 1 + turn - self._at_work[other].version > self._limit
            for turn, other in enumerate(older)
        )
