"""The training thread of a simulated worker: a shell of the member machine, without the work.

It computes shards, takes part in collectives, commits, evaluates and saves; it reports, opens views and
transfers state when the machine decides it. Numbers stand for weights, virtual time for work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, final

from paceline.control import member_shell_rules, member_state, messages
from paceline.control.field_types import Progress
from paceline.elastic.simulation.run_invariants import Part
from paceline.elastic.simulation.simulated_collectives import SimulatedCollective
from paceline.elastic.simulation.simulated_process import SimulatedProcess


class Contribution(NamedTuple):
    """Contribution of a member to a step's sum; `pauses`, `stops`: the member was asked to before it."""

    parts: list[Part]
    pauses: bool
    stops: bool


class StepSum(NamedTuple):
    """The sum of a step; all members pause or stop after it if one of them was asked to."""

    state: int
    pauses: bool
    stops: bool


@final
@dataclass(eq=False)
class SimulatedMember(SimulatedProcess):
    """A worker that follows the protocol. `then`: the continuation of the collective that it is in."""

    then: Callable[[SimulatedCollective], None] = field(init=False)
    damages: bool = False  # its next contribution does not match its checksum
    turns_bad: bool = False  # its next commit goes wrong
    is_bad: bool = False  # its weights are not what they should be
    steps: int = 0
    duties: int = 0
    state: int | None = None
    assigned: tuple[int, ...] = ()  # the shards that it computes in this view
    computed: dict[int, int] = field(default_factory=dict)
    owns: frozenset[int] = frozenset()  # shards whose private state after `steps` it has
    sent: frozenset[int] = frozenset()  # and after the next one, if that is decided
    stopping: str = ""

    @property
    def progress(self) -> Progress | None:
        if not self.membership.has_state:
            return None
        return (self.steps, self.steps // self.world.plan.epoch_steps, self.duties)

    @property
    def view(self) -> messages.View:
        """The view that is being opened, or was opened last."""
        assert self.membership.invited is not None
        return self.membership.invited

    @property
    def index(self) -> int:
        return self.membership.index

    # actions of the machine

    def take_action(self) -> None:
        """Carry out one action after the other; an action that takes time calls this again at its end."""
        while self.todo:
            action = self.todo.popleft()
            if isinstance(action, member_state.SendReport):
                self._report(action.generation)
                continue
            if isinstance(action, member_state.Exit):
                self._exit(action)
                return
            if self.membership.interrupted is not None:
                # Interrupted before it was begun.
                self.main(0.001, self._leave_group)
                return
            match action:
                case member_state.OpenView():
                    self._meet("meet", self.view.members, None, self._opened)
                case member_state.Restore():
                    self.enter("checkpoint")
                    self.main(0.02, partial(self._restored, action))
                case member_state.SendState() | member_state.ReceiveState():
                    takers = (self.view.source, *self.view.stale_indexes)
                    gives = (self.steps, self.duties, self.state, self.stopping)
                    members = tuple(self.view.members[index] for index in takers)
                    self._meet("transfer", members, gives, self._transferred)
                case member_state.KeepState():
                    self._share_private_state()
                case member_state.Train(ends):
                    self.stopping = ends or self.stopping
                    self._next()
            return
        self.idle = True

    def _exit(self, action: member_state.Exit) -> None:
        self.dismissed = True
        if not action.orphaned:
            self.die()
            return
        unsaved = member_shell_rules.why_unsaved(
            self.membership,
            self._lives,
            covers_all=not self.world.plan.private_state
            or self.owns.issuperset(range(self.world.plan.settings.shards)),
            is_saved=self.steps in self.world.storage.versions,
        )
        if unsaved is None:
            self._save()
        self.world.die(self.number, "unattended", action.reason)

    def _lives(self, index: int) -> bool:
        view = self.membership.view
        assert view is not None
        number = view.members[index]
        return self.world.seems_alive(number, self.agent_id)

    def _save(self) -> None:
        assert self.state is not None
        self.world.storage.save(self.steps, self.state)

    def interrupted(self) -> None:
        """Abandon the collective, the evaluation or the rest of the shards. A commit is not interrupted."""
        if self.idle or self.todo or self.phase == "optimizer":
            return  # what comes next finds the interrupt
        if self.phase == "forward":
            ready = self.computed_so_far()
            self._keep(ready)
            rest = self.per_shard * (ready + 1) - (self.time.now - self.compute_began)
            more = ready < len(self.computing) and rest < self.per_shard
            self.main(max(rest, 0.0) if more else 0.0, lambda: self._leave_computing(more))
            return
        self._leave_collective()
        self.main(0.002, self._leave_group)

    def _leave_computing(self, one_more: bool) -> None:
        if one_more:
            self._keep(self.computed_so_far())
        self._leave_group()

    def _leave_group(self, failure: messages.CollectiveFailed | None = None) -> None:
        self._leave_collective()
        if self.membership.view is self.membership.invited:
            self.world.collectives.close(self.view, self.number, failure)
        self.computing = []
        self.enter("wait")
        self.feed(member_state.GroupLeft(failure))
        self.take_action()

    def _leave_collective(self) -> None:
        if self.collective is not None:
            left, self.collective = self.collective, None
            left.upset(self.number)

    def _keep(self, count: int) -> None:
        if self.state is not None:
            for shard in self.computing[:count]:
                self.computed[shard] = self.state

    def _report(self, generation: int) -> None:
        has_state, private = self.membership.has_state, self.world.plan.private_state
        owned = [(self.steps, tuple(sorted(self.owns)))] if private else []
        if private and self.sent:
            owned.append((self.steps + 1, tuple(sorted(self.sent))))
        self.send(
            messages.MemberReport(
                generation=generation,
                progress=self.progress,
                held_shards=tuple(sorted(self.computed)) if has_state else (),
                has_private_state=private,
                digest=f"report:{self.state:x}" if has_state else "",
                private_shards=tuple(owned),
            )
        )

    # a new view

    def _meet(
        self, what: str, members: tuple[int, ...], brings: Any, then: Callable[[SimulatedCollective], None]
    ) -> None:
        self.enter("collective")
        self.then = then
        self.world.collectives.of(self.view.generation, what, members).bring(self, brings)

    def _opened(self, _: SimulatedCollective) -> None:
        self.assigned = self.view.shards[self.index]
        kept = member_shell_rules.kept_shards(self.computed, self.assigned)
        self.computed = {shard: self.computed[shard] for shard in kept}
        self.feed(member_state.ViewOpened())
        self.take_action()

    def _restored(self, action: member_state.Restore) -> None:
        self.steps, self.state = self.world.storage.restore(self.view)
        if member_shell_rules.must_start_over(action, has_checkpoint=bool(self.world.storage.versions)):
            self.world.die(self.number, "restart", "there is no checkpoint to go back to")
            return
        self.owns, self.sent = frozenset(self.view.shards[self.index]), frozenset()
        self.duties = len(self.world.plan.duties(self.steps))
        self.computed = {}
        self.stopping = ""
        self.is_bad = False
        self._state_ready()

    def _transferred(self, met: SimulatedCollective) -> None:
        if self.index != self.view.source:
            given = met.brought[self.view.members[self.view.source]]
            had = self.membership.has_state
            if not had or given[0] != self.steps:
                # Its own bytes were in the step that the others have decided: it knows what follows.
                decided = had and given[0] == self.steps + 1
                self.owns, self.sent = self.sent if decided else frozenset(), frozenset()
            self.steps, self.duties, self.state, self.stopping = given
            self.computed = {}
            if self.is_bad:
                self.is_bad = False
                self.world.invariants.cured(self.number)
        self._share_private_state()

    def _share_private_state(self) -> None:
        """Move the private state of each shard to the member that computes it now."""
        self.sent = frozenset()
        if not self.world.plan.private_state:
            self._state_ready()
            return
        self._meet("share", self.view.members, (self.steps, self.owns), self._shared)

    def _shared(self, met: SimulatedCollective) -> None:
        there = {shard for steps, owned in met.brought.values() if steps == self.steps for shard in owned}
        missing = sorted(set(range(self.world.plan.settings.shards)) - there)
        if missing:
            self.world.invariants.violation(f"the private state of shards {missing} is lost")
        # Kept until a step is decided: the members that received it may be lost before that.
        self.owns |= set(self.view.shards[self.index])
        self._state_ready()

    def _state_ready(self) -> None:
        self.world.invariants.begins(self.number, self.steps, self.state)
        progress = (self.steps, self.steps // self.world.plan.epoch_steps, self.duties)
        self.feed(member_state.StateReady(progress))
        self.take_action()

    # training

    def _next(self) -> None:
        """Continue the loop: with a duty, the end, or a step."""
        plan = self.world.plan
        if self.membership.interrupted is not None:
            self._leave_group()
            return
        self.step_began = self.time.now
        duties = plan.duties(self.steps)
        if self.stopping and "checkpoint" not in duties:
            duties = (*duties, "checkpoint")
        if self.duties < len(duties):
            self.enter(duties[self.duties])
            self.main(plan.duty_seconds * self.factor, lambda: self._duty(duties[self.duties]))
        elif self.steps >= plan.steps or self.stopping:
            self._finish()
        else:
            self._compute()

    def _finish(self) -> None:
        assert self.progress is not None
        self.enter("wait")
        self.feed(
            member_state.RunFinished(
                messages.MemberFinished(
                    generation=self.membership.generation,
                    progress=self.progress,
                    hash=f"{self.state:x}",
                    stopped=self.stopping or None,
                )
            )
        )
        self.take_action()

    def _duty(self, what: str) -> None:
        name = f"{what} {self.steps} {self.duties}"
        self._meet(name, self.view.members, self.state, lambda met: self._did(what, met))

    def _did(self, what: str, met: SimulatedCollective) -> None:
        # A version holds the first rank's state. It exists as soon as one member knows that all have written.
        state = met.brought[self.view.members[0]]
        if what == "checkpoint" and state is not None:
            self.world.storage.save(self.steps, state)
        self.duties += 1
        self._next()

    def _compute(self) -> None:
        self.computing = [shard for shard in self.assigned if shard not in self.computed]
        self.per_shard = self.world.plan.shard_seconds * self.factor
        self.compute_began = self.time.now
        self.enter("forward")
        if self.world.raises(self.number, self.steps, self.computing):
            return
        self.main(len(self.computing) * self.per_shard, self._contribute)

    def code_raised(self, fault: str, shard: int) -> None:
        """Let the code of this worker raise, unless it was interrupted before. With a state to save it waits
        to do so or to be dismissed, else it ends."""
        training = self.membership.phase is member_state.MemberPhase.IN_VIEW and self.phase == "forward"
        if not self.alive or not training:
            return
        worth_saving = self.steps > max(self.world.storage.versions, default=0)
        saving = member_shell_rules.saving_after_error(self.membership, worth_saving)
        if saving == "alone":
            self._save()
        self.computing = []
        self.enter("wait")
        self.feed(
            member_state.CodeRaised(
                messages.WorkerException(
                    summary="ValueError: simulated",
                    traceback="",
                    phase="forward",
                    fault=fault,
                    step=self.steps,
                    shard=shard,
                    holds=saving == "in view",
                    progress=self.progress,
                )
            )
        )
        if saving == "in view":
            self.main(0.001, self.take_action)
        else:
            self.time.after(0.02, self.world.die, self.number, "exit", "exit code 1")

    def _contribute(self) -> None:
        self._keep(len(self.computing))
        if self.computing:
            self.shard_mean = member_shell_rules.running_mean(self.shard_mean, self.per_shard)
        self.enter("collective")
        view = self.view
        parts = [(shard, self.computed.get(shard, 0)) for shard in self.assigned]
        self.then = self._reduced
        self.sent = frozenset(self.assigned)
        damaged, self.damages = self.damages, False
        step = self.world.collectives.of(view.generation, f"step {self.steps}", view.members)
        brings = Contribution(parts, self.membership.wants_pause, bool(self.stop_requested))
        step.bring(self, brings, damaged)

    def completed(self, collective: SimulatedCollective) -> None:
        """Continue after the collective."""
        self.collective = None
        self.then(collective)

    def broke(self, accused: tuple[int, ...], unreachable: tuple[int, ...]) -> None:
        """Leave the group: the collective has failed here."""
        reason = "a checksum does not match" if accused else "a peer is away"
        self._leave_group(
            messages.CollectiveFailed(
                generation=self.view.generation, reason=reason, accused=accused, unreachable=unreachable
            )
        )

    def _reduced(self, collective: SimulatedCollective) -> None:
        self.enter("optimizer")
        self.main(self.world.plan.commit_seconds, lambda: self._commit(collective))

    def _commit(self, collective: SimulatedCollective) -> None:
        invariants = self.world.invariants
        step = self.steps + 1
        generation = self.membership.generation
        if collective.result is None:
            brought: list[Contribution] = [*collective.brought.values()]
            parts = [part for one in brought for part in one.parts]
            state = invariants.summed(step, parts, f"generation {generation}")
            pauses, stops = any(one.pauses for one in brought), any(one.stops for one in brought)
            collective.result = StepSum(state, pauses, stops)
        reduced: StepSum = collective.result
        self.steps = step
        self.duties = 0
        self.computed = {}
        self.owns, self.sent = self.sent, frozenset()
        self.state = reduced.state
        if self.turns_bad:
            # A bit has flipped in its weights: from now on its gradients are of another model.
            self.is_bad = invariants.corrupted = True
            self.turns_bad = False
            invariants.bad.add(self.number)
        if self.is_bad:
            invariants.stays = invariants.stays or len(collective.members) == 1
            self.state = hash((self.state, -self.number))
            invariants.tainted.add(self.state)
        invariants.committed(self.number, step, self.state)
        self.step_mean = member_shell_rules.running_mean(self.step_mean, self.time.now - self.step_began)
        self.world.last_commit = self.time.now
        if self.world.triggers:
            self.world.entered(self, "committed")
        if step % self.world.plan.audit_every == 0:
            hashes = {str(step): f"{self.state:x}"}
            self.send(
                messages.StepReceipt(generation=generation, first=step, last=step, shards=(), hashes=hashes)
            )
        if reduced.stops:
            self.stopping = self.stop_requested or "asked"
        if reduced.pauses:
            # As in `Run.microbatches`: one that was asked is enough, and all know it from the exchange. The
            # pause comes first: members of the next view take part in what follows the step.
            self._leave_group()
            return
        self._next()
