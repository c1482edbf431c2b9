"""Processes of a step-by-step run as threads: they train, some die or are cut off at a chosen call of their
transport, and those who are left repair the group by themselves.

Real: steps, repair, liveness listeners, the meeting of the survivors. Played: death. A thread that is killed
closes its listeners and its end of the group, which is what the kernel does for a process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.comm.ranks import sha
from tests.train.disturbed_steps import Counter, Dead, Fault
from tests.train.running import regression, seeded, settings
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.context import DistributedContext
from paceline.comm.survivors.repairable_group import RepairableGroup
from paceline.comm.survivors.survivor_meeting import SurvivorMeeting
from paceline.core.errors import GROUP_FAILURES, PeerLostError
from paceline.testing.thread_transport import run_ranks
from paceline.train.loop import process_setup
from paceline.train.loop.run_hooks import MicroBatch
from paceline.train.loop.stepwise_run import StepResult, StepwiseRun, StepwiseSpec
from paceline.train.state.model_state import state_hash

SHARDS = 4
STEPS = 3
BATCH = 16
X, Y = regression(BATCH * STEPS)
CONFIG = settings(shards=SHARDS, global_batch=BATCH, micro_batch=2, max_steps=100)
SECONDS = 30.0


MODEL = seeded(
    lambda: nn.Sequential(nn.Linear(X.shape[1], 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, Y.shape[1]))
)


class Trainee:
    """One process: its group, its run, and what it has seen."""

    def __init__(self, context: DistributedContext, faults: tuple[Fault, ...] = ()) -> None:
        self.number = context.rank
        self.group = RepairableGroup(context, SurvivorMeeting.arrange(context, "127.0.0.1", SECONDS))
        self.module = copy.deepcopy(MODEL)  # threads share the generators
        spec = StepwiseSpec(
            self.module,
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
            CONFIG,
            len(X),
            torch.device("cpu"),
        )
        self.run = StepwiseRun(context, spec)
        self.counter = Counter(self.number, faults)
        self.generation = 1
        self.results: dict[int, StepResult] = {}
        self.lost: list[int] = []
        self.computed = 0  # shards' micro-batches
        self.alive = True

    def train(self) -> Trainee:
        try:
            self.counter.section = ("begin", 1, 0)
            self.counter.watch(self.group.context)
            self.try_until(lambda: self.run.begin())
            while self.run.next_step < STEPS or len(self.results) < STEPS:
                self.try_until(self.step)
        except Dead:
            self.alive = False
            self.group.context.close(PeerLostError(f"{self.number} was killed", rank=self.number))
        finally:
            # As a process that has ended its loop: it is not waited for.
            self.group.close()
            self.run.close()
        return self

    def step(self) -> None:
        number = len(self.results)
        self.counter.section = ("step", self.generation, number)
        start, end = self.run.deal(BATCH)
        x, y = X[number * BATCH :][start:end], Y[number * BATCH :][start:end]
        self.results[number] = self.run.step((x, y), BATCH, number, self.compute)

    def compute(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        self.computed += 1
        output = self.module(micro.x)
        return F.mse_loss(output, micro.y), {"size": output.detach().abs().mean()}

    def try_until(self, operation: Callable[[], None]) -> None:
        """Do what all do together, and repair the group as often as it fails."""
        while True:
            try:
                return operation()
            except GROUP_FAILURES as error:
                self.group.fail(error)
                assert self.group.lost_rank is not None
                self.lost.append(self.group.lost_rank)
                self.generation += 1
                self.group.repair(self.take_over)

    def take_over(self, context: DistributedContext) -> None:
        self.counter.section = ("repair", self.generation, 0)
        self.counter.watch(context)
        self.run.rebind(context)

    @property
    def digest(self) -> str:
        results = [self.results[number].loss for number in sorted(self.results)]
        return state_hash(self.module) + sha(torch.tensor(results))


def train(ranks: int, *faults: Fault) -> list[Trainee]:
    """Train on `ranks` threads; return all, those that died too."""
    with process_setup.prepared(CONFIG):
        return run_ranks(ranks, lambda context: Trainee(context, faults).train(), timeout=60)


def outcome(crew: list[Trainee]) -> str:
    """The same on every one that lives, or the test fails here."""
    living = [one for one in crew if one.alive]
    assert all(sorted(one.results) == list(range(STEPS)) for one in living)
    (digest,) = {one.digest for one in living}
    return digest


def points(kind: Any, ranks: int, section: tuple[str, int, int]) -> Iterator[Fault]:
    """A fault at each point of a section of an undisturbed run, on each rank."""
    for one in train(ranks):
        for point in range(1, one.counter.points[section] + 1):
            yield Fault(kind, one.number, section, point)
