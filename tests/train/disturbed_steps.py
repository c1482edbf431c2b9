"""Members of a run as threads, with faults at every point where one of them talks to another.

Real: the step's transaction, the update, shared memory, the machine's decision about the next view. Played
here: the connection to the supervisor, and the loop around the step. A fault hits one member in one section
(the steps of a view, or its installation) at one point: before or after any call of its transport. "killed":
the member is gone; "cut": its group is interrupted there, and the member lives on.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import torch
from tests.comm.ranks import sha
from tests.train.running import regression, seeded, settings
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.context import DistributedContext
from paceline.comm.rendezvous.transport_setup import single_rank
from paceline.control.messages import MemberReport, ViewPlan
from paceline.core.errors import GROUP_FAILURES as TROUBLE, GroupInterruptedError, PeerLostError
from paceline.elastic.machine.settings import MachineSettings
from paceline.elastic.machine.state import JobPhase, JobState, Worker, WorkerStatus
from paceline.elastic.machine.view_change import decide
from paceline.testing.thread_transport import run_ranks
from paceline.train.callbacks import Callbacks, Modifier
from paceline.train.objective import ObjectiveResult
from paceline.train.phases import Phases
from paceline.train.precision import LossScaler
from paceline.train.settings.train_config import TrainConfig
from paceline.train.state.model_state import state_hash
from paceline.train.state.repeatable_changes import RepeatableChanges
from paceline.train.step.lockstep import Lockstep, ShardWork
from paceline.train.step.transaction import StepTransaction
from paceline.train.step.weight_update import WeightUpdate
from paceline.train.team import Team

SHARDS = 4
STEPS = 3
COUNTS = [3, 3, 3, 3]
RANKS = 3
X, Y = regression(12)
Section = tuple[str, int, int]  # "install" or "step", generation, step


class Dead(BaseException):
    """What a killed member does not live to see."""


@dataclass(frozen=True)
class Fault:
    kind: Literal["killed", "cut"]
    member: int
    section: Section
    point: int


@dataclass(frozen=True)
class Feature:
    """What a run has. `extra`: shards that a member computes besides its own."""

    model: Callable[[], nn.Module]
    config: dict[str, Any] = field(default_factory=dict)
    backup: bool = False
    scaled: bool = False
    left_out: int = 0
    talks: bool = False  # a modifier communicates between the decision and the update
    lockstep: bool = False

    @cached_property
    def settled(self) -> TrainConfig:
        """The configuration, which hundreds of members share."""
        return settings(shards=SHARDS, **self.config)


class Counter:
    """Counts the points of a member's calls, and strikes at one of them."""

    def __init__(self, member: int, faults: tuple[Fault, ...]) -> None:
        self._faults = {fault.section: fault for fault in faults if fault.member == member}
        self.section: Section = ("", 0, 0)
        self.points: dict[Section, int] = {}
        self._context: DistributedContext | None = None

    def watch(self, context: DistributedContext) -> None:
        self._context = context
        self._wrap(context.transport, "exchange", "post", "take")
        self._wrap(context.transport.window, "signal", "wait", "barrier", "locations")

    def _wrap(self, owner: Any, *names: str) -> None:
        for name in names:
            call = getattr(owner, name)

            def wrapped(*args: Any, call: Any = call, **named: Any) -> Any:
                self._point()
                result = call(*args, **named)
                self._point()
                return result

            setattr(owner, name, wrapped)

    def _point(self) -> None:
        passed = self.points[self.section] = self.points.get(self.section, 0) + 1
        fault = self._faults.get(self.section)
        if fault is None or fault.point != passed:
            return
        if fault.kind == "killed":
            raise Dead
        assert self._context is not None
        self._context.interrupt("it was cut off")
        raise GroupInterruptedError("cut off")


class Talks(Modifier):
    """Communicates, after it has changed its own state and the gradients."""

    def __init__(self, team: Team) -> None:
        self._team, self.seen = team, 0

    def change_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.seen += 1
        gradients = [one.grad for one in parameters.values() if one.grad is not None]
        for gradient in gradients:
            gradient.mul_(1.0 + self.seen / 10.0)
        assert set(self._team.context.all_gather(self.seen)) == {self.seen}
        for gradient in gradients:
            gradient.mul_(0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Member:
    def __init__(self, number: int, feature: Feature, faults: tuple[Fault, ...] = ()) -> None:
        self.number, self.feature = number, feature
        self.counter = Counter(number, faults)
        self.alive, self.has_state, self.fresh = True, False, True
        self.config = feature.settled
        fixed = None if self.config.mode == "fast" else SHARDS
        self.team = Team(DistributedContext.from_transport(single_rank()), fixed)
        self.module = seeded(feature.model)
        self._first = copy.deepcopy(self.module.state_dict())
        self._build()
        self.transaction = StepTransaction(self.team, self.module, self.config, torch.device("cpu"))
        self.lockstep: Lockstep | None = None
        if feature.lockstep:
            self.transaction.is_lockstep = True
            device = torch.device("cpu")
            self.lockstep = Lockstep(self.team, self.module, self.transaction, device, 0, Phases())
        self.restored = 0

    def _build(self) -> None:
        self.optimizer = torch.optim.SGD(self.module.parameters(), 0.1, momentum=0.9)
        scaler = LossScaler(self.config.loss_scaling) if self.feature.scaled else None
        self.callbacks = Callbacks([Talks(self.team)] if self.feature.talks else [])
        self.changes = RepeatableChanges(self.callbacks)
        self.update = WeightUpdate(
            dict(self.module.named_parameters()),
            [self.optimizer],
            clip_norm=1.0,
            scaler=scaler,
            change_gradients=self.callbacks.change_gradients if self.feature.talks else None,
        )
        self.step = 0
        self.records: dict[int, str] = {}

    # as the worker's membership does it

    def report(self, generation: int) -> MemberReport:
        progress = (self.step, 0, 0) if self.has_state else None
        transaction = self.transaction
        return MemberReport(
            generation=generation,
            progress=progress,
            held_shards=transaction.held,
            has_private_state=transaction.residuals.kept,
            private_shards=transaction.residuals.private_shards,
        )

    def live(self, context: DistributedContext, plan: ViewPlan) -> None:
        """In one view, until the run is done or the group breaks."""
        shards = plan.shards if self.team.fixed_shards else None
        self.team.install(context, shards, plan.generation, backup=self.feature.backup)
        self.counter.section = ("install", plan.generation, 0)
        self.counter.watch(context)
        try:
            self._enter(context, plan)
            while self.step < STEPS:
                self.counter.section = ("step", plan.generation, self.step)
                self._train()
        except TROUBLE as trouble:
            context.close(trouble)
        except Dead:
            self.alive = False
            context.close(PeerLostError(f"member {self.number} was killed", rank=context.rank))

    def _enter(self, context: DistributedContext, plan: ViewPlan) -> None:
        transaction = self.transaction
        transaction.rebind()
        if plan.restore:
            self.has_state = False
            transaction.abandon()
            self.module.load_state_dict(self._first)
            self._build()
            transaction.residuals.load({}, 0)
            self.restored += plan.generation > 1
        elif context.rank == plan.source and plan.stale_indexes:
            transaction.residuals.settle(self.step)
            for rank in plan.stale_indexes:
                context.send(self._state(), rank)
        elif context.rank in plan.stale_indexes:
            self._take_over(context.receive(plan.source))
        if not plan.restore:
            transaction.residuals.settle(self.step)
            transaction.residuals.share()
        self.has_state = True

    def _state(self) -> Tensor:
        scaler = self.update.scaler
        kept = {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "step": self.step,
            "records": self.records,
            "modifiers": self.callbacks.state_dict(),
        }
        file = io.BytesIO()
        torch.save(kept, file)
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    def _take_over(self, sent: Tensor) -> None:
        kept = torch.load(io.BytesIO(sent.numpy().tobytes()), weights_only=True)
        self.transaction.residuals.settle(kept["step"])
        self.transaction.abandon()
        self.module.load_state_dict(kept["module"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.update.watch()
        if self.update.scaler is not None:
            self.update.scaler.load_state_dict(kept["scaler"])
        self.callbacks.load_state_dict(kept["modifiers"])
        self.step, self.records = kept["step"], kept["records"]

    # as the run does it

    def _train(self) -> None:
        transaction, scaler = self.transaction, self.update.scaler
        transaction.open(0, self.step, COUNTS[: self.team.shards], scaler.scale if scaler else 1.0)
        if self.lockstep is not None:
            work = [ShardWork(shard, 3, partial(self._score, shard)) for shard in transaction.missing]
            self.lockstep.compute(0, self.step, work)
        for shard in transaction.missing:
            self._compute(shard)
        if self.team.backup:
            # Those of a slow rank, which computes them as well.
            self._compute((self.team.block[-1] + 1) % SHARDS if self.team.block else 0)
        reduced = transaction.reduce()
        try:
            with self.changes.undone_when_the_group_fails(self.team.context, self.step + 1):
                applied = self.update.apply(1.0, need_norm=True)
        except TROUBLE:
            transaction.undo()
            raise
        transaction.updated()
        self.step += 1
        numbers = [reduced.numbers, torch.tensor([float(reduced.applied), reduced.pauses])]
        if reduced.shard_square_norms is not None:
            numbers.append(reduced.shard_square_norms)
        if applied.norm is not None:
            numbers.append(applied.norm.reshape(1))
        self.records[self.step] = sha(torch.cat(numbers))

    def _compute(self, shard: int) -> None:
        transaction = self.transaction
        if shard in transaction._computed:
            return
        transaction.start_shard(shard)
        if self.lockstep is not None:
            scored = self.lockstep.take(shard)
            transaction.count(scored.loss, 3, scored.metrics)
            transaction.finish_shard(shard)
            return
        first, stop = 3 * shard, 3 * shard + 3
        if shard == 1 and self.feature.left_out:
            transaction.leave_out(self.feature.left_out)
            first += self.feature.left_out
        out = self.module(X[first:stop])
        loss = F.mse_loss(out, Y[first:stop])
        transaction.backward(loss, stop - first, {"size": out.detach().abs().mean()})
        transaction.finish_shard(shard)

    def _score(self, shard: int) -> ObjectiveResult:
        out = self.module(X[3 * shard : 3 * shard + 3])
        loss = F.mse_loss(out, Y[3 * shard : 3 * shard + 3])
        return ObjectiveResult(loss, {"size": out.detach().abs().mean()})

    @property
    def digest(self) -> str:
        state = self.optimizer.state_dict()["state"]
        momenta = [one["momentum_buffer"].to_dense() for one in state.values()]
        return state_hash(self.module) + sha(torch.cat([one.double().flatten() for one in momenta]))


class Crew:
    """All members of a run and the supervisor's part."""

    def __init__(self, feature: Feature, ranks: int, faults: tuple[Fault, ...] = (), joins: int = 0) -> None:
        self._feature, self._faults, self._joins = feature, faults, joins
        self.members = {number: Member(number, feature, faults) for number in range(1, ranks + 1)}
        self.views: list[ViewPlan] = []

    def train(self) -> Crew:
        generation = 1
        while any(member.step < STEPS for member in self._living):
            plan = self._decide(generation)
            self.views.append(plan)
            crew = [self.members[number] for number in plan.members]

            def rank(context: DistributedContext, crew: list[Member] = crew, plan: ViewPlan = plan) -> None:
                crew[context.rank].live(context, plan)

            if len(crew) == 1:
                crew[0].live(DistributedContext.from_transport(single_rank()), plan)
            else:
                run_ranks(len(crew), rank, timeout=60)
            generation += 1
            if self._joins and generation == 2:
                for number in range(100, 100 + self._joins):
                    self.members[number] = Member(number, self._feature, self._faults)
            assert generation < 10, "the run does not come to its end"
        return self

    @property
    def _living(self) -> list[Member]:
        return [member for member in self.members.values() if member.alive]

    def _decide(self, generation: int) -> ViewPlan:
        job = _job(generation)
        for member in self._living:
            status = WorkerStatus.MEMBER if member.has_state else WorkerStatus.READY
            job.workers[member.number] = Worker(member.number, member.number, 0, status, 0.0)
            job.reports[member.number] = member.report(generation)
        decide(job, "a test")
        assert job.view is not None
        return job.view

    @property
    def outcome(self) -> tuple[str, dict[int, str]]:
        """The same on every member, or the test fails here."""
        (digest,) = {member.digest for member in self._living}
        records: dict[int, str] = {}
        for member in self._living:
            for step, record in member.records.items():
                assert records.setdefault(step, record) == record
        return digest, records

    @property
    def restored(self) -> bool:
        return any(member.restored for member in self._living)


def _job(generation: int) -> JobState:
    job = JobState(MachineSettings(workers=RANKS, shards=SHARDS))
    job.phase, job.generation, job.abort = JobPhase.PREPARING, generation, True
    return job


def every_point(
    feature: Feature, kind: Literal["killed", "cut"], step: int, ranks: int = RANKS
) -> Iterator[Fault]:
    """A fault at each point of one step of an undisturbed run, on each rank."""
    section = ("step", 1, step)
    undisturbed = Crew(feature, ranks).train()
    for number, member in undisturbed.members.items():
        for point in range(1, member.counter.points[section] + 1):
            yield Fault(kind, number, section, point)


def alone_with(feature: Feature) -> tuple[str, dict[int, str]]:
    return copy.deepcopy(Crew(feature, 1).train().outcome)
