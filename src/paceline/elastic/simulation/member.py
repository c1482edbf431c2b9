"""A simulated member: the protocol of a worker, without the work.

The main thread computes shards, takes part in collectives, commits, does duties, reports and installs. Must
not know the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from paceline.elastic.model import HasBroken, HasDialed, Hashed, HasInstalled, IsDone, Reported, ViewPlan
from paceline.elastic.simulation.process import Process
from paceline.elastic.simulation.rounds import Round

DIAL_SECONDS = 5.0


@final
class Member(Process):
    """A worker that follows the protocol."""

    then: Callable[[Round], None]

    def on_prepare(self, generation: int, abort: bool) -> None:
        if self.stopped and self.alive:
            self.time.after(0.1, self.on_prepare, generation, abort)
            return
        if not self.alive or generation < self.asked or (self.view and generation <= self.view.generation):
            return
        if generation == self.asked == self.reported:
            self._report_again()
            return
        self.asked = generation
        self.abort = abort
        if not self.hung:
            self.react()

    def on_view(self, plan: ViewPlan) -> None:
        if self.stopped and self.alive:
            self.time.after(0.1, self.on_view, plan)
            return
        if not self.alive or plan.generation < self.asked or plan.generation <= self.generation:
            return
        if self.number in plan.members:
            self.asked = plan.generation
            self.abort = False  # that was for the generation before
            self.main(0.001, lambda: self._install(plan))

    def on_dial(self, peer: int) -> None:
        """The control thread dials a peer; the main thread does not matter."""
        if self.stopped and self.alive:
            self.time.after(0.1, self.on_dial, peer)
        elif self.alive:
            self.time.after(self.world.rounds.delay(), self._dialed, peer, self.time.now)

    def _dialed(self, peer: int, began: float) -> None:
        way = self.world.way_to(self, peer)
        if way is None:
            return  # it is gone, or does not run: nothing is heard, and the supervisor learns of it elsewhere
        if way and self.time.now - began < DIAL_SECONDS:
            self.time.after(0.2, self._dialed, peer, began)
            return
        self.send(HasDialed(self.number, peer, way, bool(way)))

    def on_stop(self, reason: str) -> None:
        self.told_stop = reason

    def on_dismiss(self) -> None:
        self.dismissed = True
        self.die()

    # the main thread: stopping

    def react(self) -> None:
        """Asked to stop: at once, or with the next ballot."""
        if not self.training and not self.done:
            self._leave_round()
            self.main(0.001, self._report)
            return
        if not self.abort or self.phase == "optimizer":
            return
        if self.phase in ("forward", "data"):
            ready = self.computed_so_far()
            self._keep(ready)
            rest = self.per_shard * (ready + 1) - (self.time.now - self.compute_began)
            more = ready < len(self.computing) and rest < self.per_shard
            self.main(max(rest, 0.0) if more else 0.0, lambda: self._report_computed(more))
            return
        self._leave_round()
        self.main(0.002, self._report)

    def _keep(self, count: int) -> None:
        if self.state is not None:
            for shard in self.computing[:count]:
                self.computed[shard] = self.state

    def _report_computed(self, one_more: bool) -> None:
        if one_more:
            self._keep(self.computed_so_far())
        self._report()

    def _leave_round(self) -> None:
        if self.round is not None:
            left, self.round = self.round, None
            left.upset(self.number)

    def _report(self) -> None:
        self._leave_round()
        self.training = False
        self.done = False
        self.reported = self.asked
        self.enter("wait")
        self._report_again()

    def _report_again(self) -> None:
        held = tuple(sorted(self.computed)) if self.state is not None else ()
        digest = "" if self.state is None else f"report:{self.state:x}"
        alone = self.world.plan.private_state
        owed: list[tuple[int, tuple[int, ...]]] = []
        if alone and self.state is not None:
            owed.append((self.steps, tuple(sorted(self.owns))))
        if alone and self.sent:
            owed.append((self.steps + 1, tuple(sorted(self.sent))))
        self.send(Reported(self.number, self.asked, self.progress, held, alone, digest, owed=tuple(owed)))

    # the main thread: a new view

    def _install(self, plan: ViewPlan) -> None:
        if plan.generation < self.asked:
            return
        self._leave_round()
        self.training = False
        self.installing = plan.generation
        self.broken = None
        self.rank = plan.members.index(self.number)
        self.enter("collective")
        self._meet(plan, "meet", plan.members, None, lambda _: self._met(plan))

    def _meet(
        self, plan: ViewPlan, what: str, members: tuple[int, ...], brings: Any, then: Callable[[Round], None]
    ) -> None:
        self.then = then
        meeting = self.world.rounds.of((plan.generation, what), members)
        meeting.bring(self, brings)

    def _met(self, plan: ViewPlan) -> None:
        if plan.restore:
            self.enter("checkpoint")
            self.main(0.02, lambda: self._restored(plan))
            return
        takers = (plan.source, *plan.behind)
        if plan.source >= 0 and self.rank in takers:
            self.enter("collective")
            members = tuple(plan.members[rank] for rank in takers)
            gives = (self.steps, self.duties, self.state, self.stopping)
            self._meet(plan, "hand over", members, gives, lambda met: self._handed(plan, met))
            return
        self._settled(plan)

    def _restored(self, plan: ViewPlan) -> None:
        self.steps, self.state = self.world.stored(plan)
        self.owns, self.sent = frozenset(plan.shards[self.rank]), frozenset()
        self.duties = len(self.world.plan.duties(self.steps))
        self.computed = {}
        self.stopping = ""
        self.is_bad = False
        self._installed(plan)

    def _handed(self, plan: ViewPlan, met: Round) -> None:
        if self.rank != plan.source:
            given = met.brought[plan.members[plan.source]]
            if self.state is None or given[0] != self.steps:
                # Its own bytes were in the step that the others have decided: it knows what follows.
                decided = self.state is not None and given[0] == self.steps + 1
                self.owns, self.sent = self.sent if decided else frozenset(), frozenset()
            self.steps, self.duties, self.state, self.stopping = given
            self.computed = {}
            if self.is_bad:
                self.is_bad = False
                self.world.truth.cured(self.number)
        self._settled(plan)

    def _settled(self, plan: ViewPlan) -> None:
        """All have the same state; what each shard has of its own goes to the member that computes it now."""
        self.sent = frozenset()
        if not self.world.plan.private_state:
            self._installed(plan)
            return
        self.enter("collective")
        self._meet(plan, "share", plan.members, (self.steps, self.owns), lambda met: self._shared(plan, met))

    def _shared(self, plan: ViewPlan, met: Round) -> None:
        there = {shard for steps, owned in met.brought.values() if steps == self.steps for shard in owned}
        missing = sorted(set(range(self.world.plan.settings.shards)) - there)
        if missing:
            self.world.truth.violation(f"the private state of shards {missing} is lost")
        # What went to others is kept until a step is decided: they may not have come so far.
        self.owns |= set(plan.shards[self.rank])
        self._installed(plan)

    def _installed(self, plan: ViewPlan) -> None:
        self.view = plan
        self.raised = None
        self.world.truth.begins(self.number, self.steps, self.state)
        if plan.ends:
            self.stopping = plan.ends
        self.send(HasInstalled(self.number, plan.generation, self.progress))
        self.training = True
        self._next()

    # the main thread: training

    def _next(self) -> None:
        """The loop: duties, the end, or a step."""
        plan = self.world.plan
        if self.asked > self.generation and self.abort:
            self._report()
            return
        self.step_began = self.time.now
        duties = plan.duties(self.steps)
        if self.stopping and "checkpoint" not in duties:
            duties = (*duties, "checkpoint")
        if self.duties < len(duties):
            self.enter(duties[self.duties])
            self.main(plan.duty_seconds * self.factor, lambda: self._duty(duties[self.duties]))
        elif self.steps >= plan.steps or self.stopping:
            self.training = False
            self.done = True
            self.enter("wait")
            self.say_done()
        else:
            self._compute()

    def say_done(self) -> None:
        assert self.progress is not None
        digest = f"{self.state:x}"
        self.send(IsDone(self.number, self.progress, digest, self.stopping or None, self.generation))

    def _duty(self, what: str) -> None:
        assert self.view is not None
        self.enter("collective")
        key = f"{what} {self.steps} {self.duties}"
        self._meet(self.view, key, self.view.members, None, lambda _: self._did(what))

    def _did(self, what: str) -> None:
        if what == "checkpoint" and self.rank == 0 and self.state is not None:
            self.world.store(self.steps, self.state)
        self.duties += 1
        self._next()

    def _compute(self) -> None:
        assert self.view is not None
        mine = self.view.shards[self.rank]
        self.computed = {shard: self.computed[shard] for shard in mine if shard in self.computed}
        self.computing = [shard for shard in mine if shard not in self.computed]
        self.per_shard = self.world.plan.shard_seconds * self.factor
        self.compute_began = self.time.now
        self.enter("forward")
        if self.world.raises(self, self.computing):
            return
        self.main(len(self.computing) * self.per_shard, self._contribute)

    def _contribute(self) -> None:
        assert self.view is not None
        self._keep(len(self.computing))
        if self.computing:
            self.shard_mean = self._mean(self.shard_mean, self.per_shard)
        self.enter("collective")
        parts = [(shard, self.computed.get(shard, 0)) for shard in self.view.shards[self.rank]]
        vote = self.asked if self.asked > self.generation and not self.abort else 0
        self.then = self._reduced
        self.sent = frozenset(self.view.shards[self.rank])
        damaged, self.damages = self.damages, False
        step = self.world.rounds.of((self.generation, "step", self.steps), self.view.members)
        step.bring(self, (parts, vote, self.told_stop), damaged)

    def completed(self, round: Round) -> None:
        """The collective has ended here."""
        self.round = None
        self.then(round)

    def broke(self, round: Round, accused: tuple[int, ...], unreachable: tuple[int, ...]) -> None:
        """The collective has failed here."""
        kind = "a checksum does not match" if accused else "a peer is away"
        self.broken = HasBroken(self.number, self.installing, kind, accused, unreachable)
        self.send(self.broken)

    def _reduced(self, round: Round) -> None:
        self.enter("optimizer")
        self.main(self.world.plan.commit_seconds, lambda: self._commit(round))

    def _commit(self, round: Round) -> None:
        truth = self.world.truth
        step = self.steps + 1
        if round.result is None:
            parts = [part for brought in round.brought.values() for part in brought[0]]
            round.result = truth.summed(step, parts, f"generation {self.generation}")
            round.votes = frozenset(brought[1] for brought in round.brought.values())
        self.steps = step
        self.duties = 0
        self.computed = {}
        self.owns, self.sent = self.sent, frozenset()
        self.state = round.result
        if self.turns_bad:
            # A bit has flipped in its weights: from now on its gradients are of another model.
            self.is_bad = truth.corrupted = True
            self.turns_bad = False
            truth.bad.add(self.number)
        if self.is_bad:
            truth.stays = truth.stays or len(round.members) == 1
            self.state = hash((self.state, -self.number))
            truth.tainted.add(self.state)
        truth.committed(self.number, step, self.state)
        self.step_mean = self._mean(self.step_mean, self.time.now - self.step_began)
        self.world.entered(self, "committed")
        if step % self.world.plan.audit_every == 0:
            self.send(Hashed(self.number, step, f"{self.state:x}", self.generation))
        if all(brought[2] for brought in round.brought.values()):
            self.stopping = self.told_stop or "asked"
        if 0 not in round.votes and not self.stopping:
            # All were asked before this step: all stop after it. Whoever was asked to abort since does too.
            self.asked = max(self.asked, *round.votes)
            self._report()
            return
        self._next()

    def _mean(self, mean: float, value: float) -> float:
        return value if mean == 0 else 0.7 * mean + 0.3 * value
