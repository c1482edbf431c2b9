"""A simulated member: the protocol of a worker, without the work.

Two threads: the control thread hears and beats as long as the process runs; the main thread computes shards,
takes part in collectives, commits, does duties, reports, installs. The main thread can hang while the control
thread beats; a stopped process does neither. Must not know the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Protocol, final

from paceline.core.control.messages import Progress
from paceline.elastic.model import (
    Beaten,
    Event,
    HasBroken,
    Hashed,
    HasInstalled,
    IsDone,
    Joined,
    Reported,
    ViewPlan,
    WantsToLeave,
)
from paceline.elastic.simulation.network import Line
from paceline.elastic.simulation.plan import RunPlan
from paceline.elastic.simulation.rounds import Round, Rounds
from paceline.elastic.simulation.timeline import Timeline
from paceline.elastic.simulation.truth import Truth

Act = Callable[[], None]


class Surroundings(Protocol):
    """What a member needs of the world."""

    time: Timeline
    rng: Random
    plan: RunPlan
    truth: Truth
    rounds: Rounds

    def hear(self, event: Event) -> None: ...
    def stored(self, plan: ViewPlan) -> tuple[int, int]: ...
    def store(self, step: int, state: int) -> None: ...
    def raises(self, member: Member, shards: list[int]) -> bool: ...
    def reaches_supervisor(self) -> bool: ...
    def entered(self, member: Member, phase: str) -> None: ...


@final
class Member:
    """One worker process."""

    def __init__(self, world: Surroundings, number: int, slot: int, place: int, line: Line):
        self.number = number
        self.slot = slot
        self.place = place
        self.line = line
        self._world = world
        self._time = world.time
        self.alive = True
        self.stopped = False  # SIGSTOP: both threads
        self.hung = False  # the main thread
        self.factor = 1.0  # how much slower than others
        self.damages = False  # its next contribution does not match its checksum
        self.turns_bad = False  # its next commit goes wrong
        self.is_bad = False  # its weights are not what they should be
        self.wants_out = ""
        self.dismissed = False
        # what it has
        self.steps = 0
        self.duties = 0
        self.state: int | None = None
        self.computed: dict[int, int] = {}
        # where it is
        self.view: ViewPlan | None = None
        self.rank = -1
        self.round: Round | None = None
        self.phase = "start"
        self.training = False
        self.done = False
        self.broken: HasBroken | None = None
        self._installing = 0
        self._then: Callable[[Round], None] = self.completed
        # what it was told
        self.asked = 0
        self.abort = False
        self.reported = 0
        self.told_stop = ""
        self.stopping = ""
        self._phase_since = world.time.now
        self._token = 0
        self._parked: Act | None = None
        self._step_began = 0.0
        self._step_mean = 0.0
        self._shard_mean = 0.0
        self._compute_began = 0.0
        self._computing: list[int] = []
        self._per_shard = 0.0

    # threads

    @property
    def stuck(self) -> bool:
        """Whether its main thread will not answer."""
        return not self.alive or self.stopped or self.hung

    @property
    def generation(self) -> int:
        return self.view.generation if self.view is not None else 0

    @property
    def progress(self) -> Progress | None:
        if self.state is None:
            return None
        return (self.steps, self.steps // self._world.plan.epoch_steps, self.duties)

    def _main(self, seconds: float, act: Act) -> None:
        """The main thread does this next."""
        self._token += 1
        self._time.after(seconds, self._fire, self._token, act)

    def _fire(self, token: int, act: Act) -> None:
        if token != self._token or not self.alive:
            return
        if self.stuck:
            self._parked = act
        else:
            act()

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._phase_since = self._time.now
        self._world.entered(self, phase)

    def stall(self, stopped: bool) -> None:
        """The process is stopped, or its main thread hangs."""
        if stopped:
            self.stopped = True
        else:
            self.hung = True
        if self.round is not None:
            self.round.upset(self.number)

    def go_on(self) -> None:
        """What stopped it is over."""
        if not self.alive:
            return
        self.stopped = self.hung = False
        if self.round is not None:
            self.round.resumed()
        parked, self._parked = self._parked, None
        if parked is not None:
            parked()
        if self.asked > self.reported and self.abort and not self.stuck:
            self._react()

    def slept(self, seconds: float) -> None:
        """The machine was suspended: monotonic clocks stood still."""
        self._phase_since += seconds
        self._step_began += seconds
        self._compute_began += seconds

    def die(self) -> None:
        self.alive = False
        self._token += 1
        if self.round is not None:
            self.round.upset(self.number)

    # the control thread

    def send(self, event: Event) -> None:
        if self.alive:
            self.line.send_up(self._world.hear, event)

    def boot(self) -> None:
        """The process is up: say hello and beat."""
        if not self.alive:
            return
        if self.stopped or not self._world.reaches_supervisor():
            self._time.after(0.2, self.boot)
            return
        self.line.connect()
        self._enter("wait")
        self.send(Joined(self.number, self.slot, self.place))
        self.beat()

    def beat(self) -> None:
        if not self.alive:
            return
        heartbeat = self._world.plan.settings.heartbeat
        self._time.after(heartbeat, self.beat)
        if self.stopped or not self.line.up:
            return
        waits = self.round.waits_for(self.number) if self.round is not None else ()
        lasted = self._time.now - self._phase_since
        self.send(
            Beaten(self.number, self.phase, lasted, self.progress, waits, self._shard_mean, self._step_mean)
        )

    def lose_line(self, away: float) -> None:
        """The connection is cut; connect again after a while."""
        self.line.cut()
        self._time.after(away, self.reconnect)

    def reconnect(self) -> None:
        """Say who we are, and again what may have been lost."""
        if not self.alive or self.line.up:
            return
        if self.stopped or not self._world.reaches_supervisor():
            self._time.after(0.2, self.reconnect)
            return
        self.line.connect()
        self.send(Joined(self.number, self.slot, self.place, self.generation, self.progress))
        if self.wants_out:
            self.send(WantsToLeave(self.number, self.wants_out))
        if self.done:
            self._say_done()
        elif self.broken is not None and self.broken.generation == self._installing:
            self.send(self.broken)

    def leave(self, reason: str) -> None:
        """It was asked to go."""
        self.wants_out = reason
        self.send(WantsToLeave(self.number, reason))

    def on_prepare(self, generation: int, abort: bool) -> None:
        if self.stopped and self.alive:
            self._time.after(0.1, self.on_prepare, generation, abort)
            return
        if not self.alive or generation < self.asked or (self.view and generation <= self.view.generation):
            return
        if generation == self.asked == self.reported:
            self._report_again()
            return
        self.asked = generation
        self.abort = abort
        if not self.hung:
            self._react()

    def on_view(self, plan: ViewPlan) -> None:
        if self.stopped and self.alive:
            self._time.after(0.1, self.on_view, plan)
            return
        if not self.alive or plan.generation < self.asked or plan.generation <= self.generation:
            return
        if self.number in plan.members:
            self.asked = plan.generation
            self._main(0.001, lambda: self._install(plan))

    def on_stop(self, reason: str) -> None:
        self.told_stop = reason

    def on_dismiss(self) -> None:
        self.dismissed = True
        self.die()

    # the main thread: stopping

    def _react(self) -> None:
        """Asked to stop: at once, or with the next ballot."""
        if not self.training and not self.done:
            self._leave_round()
            self._main(0.001, self._report)
            return
        if not self.abort or self.phase == "optimizer":
            return
        if self.phase in ("forward", "data"):
            ready = self._computed_so_far()
            self._keep(ready)
            rest = self._per_shard * (ready + 1) - (self._time.now - self._compute_began)
            more = ready < len(self._computing) and rest < self._per_shard
            self._main(max(rest, 0.0) if more else 0.0, lambda: self._report_computed(more))
            return
        self._leave_round()
        self._main(0.002, self._report)

    def _computed_so_far(self) -> int:
        if self._per_shard <= 0:
            return len(self._computing)
        return min(int((self._time.now - self._compute_began) / self._per_shard), len(self._computing))

    def _keep(self, count: int) -> None:
        if self.state is not None:
            for shard in self._computing[:count]:
                self.computed[shard] = self.state

    def _report_computed(self, one_more: bool) -> None:
        if one_more:
            self._keep(self._computed_so_far())
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
        self._enter("wait")
        self._report_again()

    def _report_again(self) -> None:
        held = tuple(sorted(self.computed)) if self.state is not None else ()
        alone = self._world.plan.private_state and self.state is not None
        self.send(Reported(self.number, self.asked, self.progress, held, alone))

    # the main thread: a new view

    def _install(self, plan: ViewPlan) -> None:
        if plan.generation < self.asked:
            return
        self._leave_round()
        self.training = False
        self._installing = plan.generation
        self.broken = None
        self.rank = plan.members.index(self.number)
        self._enter("collective")
        self._meet(plan, "meet", plan.members, None, lambda _: self._met(plan))

    def _meet(
        self, plan: ViewPlan, what: str, members: tuple[int, ...], brings: Any, then: Callable[[Round], None]
    ) -> None:
        self._then = then
        meeting = self._world.rounds.of((plan.generation, what), members)
        meeting.bring(self, brings)

    def _met(self, plan: ViewPlan) -> None:
        if plan.restore:
            self._enter("checkpoint")
            self._main(0.02, lambda: self._restored(plan))
            return
        takers = (plan.source, *plan.behind)
        if plan.source >= 0 and self.rank in takers:
            self._enter("collective")
            members = tuple(plan.members[rank] for rank in takers)
            gives = (self.steps, self.duties, self.state, self.stopping)
            self._meet(plan, "hand over", members, gives, lambda met: self._handed(plan, met))
            return
        self._installed(plan)

    def _restored(self, plan: ViewPlan) -> None:
        self.steps, self.state = self._world.stored(plan)
        self.duties = len(self._world.plan.duties(self.steps))
        self.computed = {}
        self.stopping = ""
        self.is_bad = False
        self._installed(plan)

    def _handed(self, plan: ViewPlan, met: Round) -> None:
        if self.rank != plan.source:
            given = met.brought[plan.members[plan.source]]
            self.steps, self.duties, self.state, self.stopping = given
            self.computed = {}
            if self.is_bad:
                self.is_bad = False
                self._world.truth.cured(self.number)
        self._installed(plan)

    def _installed(self, plan: ViewPlan) -> None:
        self.view = plan
        self._world.truth.begins(self.number, self.steps, self.state)
        self.send(HasInstalled(self.number, plan.generation))
        self.training = True
        self._next()

    # the main thread: training

    def _next(self) -> None:
        """The loop: duties, the end, or a step."""
        plan = self._world.plan
        if self.asked > self.generation and self.abort:
            self._report()
            return
        self._step_began = self._time.now
        duties = plan.duties(self.steps)
        if self.stopping and "checkpoint" not in duties:
            duties = (*duties, "checkpoint")
        if self.duties < len(duties):
            self._enter(duties[self.duties])
            self._main(plan.duty_seconds * self.factor, lambda: self._duty(duties[self.duties]))
        elif self.steps >= plan.steps or self.stopping:
            self.training = False
            self.done = True
            self._enter("wait")
            self._say_done()
        else:
            self._compute()

    def _say_done(self) -> None:
        assert self.progress is not None
        digest = f"{self.state:x}"
        self.send(IsDone(self.number, self.progress, digest, self.stopping or None, self.generation))

    def _duty(self, what: str) -> None:
        assert self.view is not None
        self._enter("collective")
        key = f"{what} {self.steps} {self.duties}"
        self._meet(self.view, key, self.view.members, None, lambda _: self._did(what))

    def _did(self, what: str) -> None:
        if what == "checkpoint" and self.rank == 0 and self.state is not None:
            self._world.store(self.steps, self.state)
        self.duties += 1
        self._next()

    def _compute(self) -> None:
        assert self.view is not None
        mine = self.view.shards[self.rank]
        self.computed = {shard: self.computed[shard] for shard in mine if shard in self.computed}
        self._computing = [shard for shard in mine if shard not in self.computed]
        self._per_shard = self._world.plan.shard_seconds * self.factor
        self._compute_began = self._time.now
        self._enter("forward")
        if self._world.raises(self, self._computing):
            return
        self._main(len(self._computing) * self._per_shard, self._contribute)

    def _contribute(self) -> None:
        assert self.view is not None
        self._keep(len(self._computing))
        if self._computing:
            self._shard_mean = self._mean(self._shard_mean, self._per_shard)
        self._enter("collective")
        parts = [(shard, self.computed.get(shard, 0)) for shard in self.view.shards[self.rank]]
        vote = self.asked if self.asked > self.generation and not self.abort else 0
        self._then = self._reduced
        damaged, self.damages = self.damages, False
        step = self._world.rounds.of((self.generation, "step", self.steps), self.view.members)
        step.bring(self, (parts, vote, self.told_stop), damaged)

    def completed(self, round: Round) -> None:
        """The collective has ended here."""
        self.round = None
        self._then(round)

    def broke(self, round: Round, accused: tuple[int, ...], unreachable: tuple[int, ...]) -> None:
        """The collective has failed here."""
        kind = "a checksum does not match" if accused else "a peer is away"
        self.broken = HasBroken(self.number, self._installing, kind, accused, unreachable)
        self.send(self.broken)

    def _reduced(self, round: Round) -> None:
        self._enter("optimizer")
        self._main(self._world.plan.commit_seconds, lambda: self._commit(round))

    def _commit(self, round: Round) -> None:
        truth = self._world.truth
        step = self.steps + 1
        if round.result is None:
            parts = [part for brought in round.brought.values() for part in brought[0]]
            round.result = truth.summed(step, parts, f"generation {self.generation}")
        self.steps = step
        self.duties = 0
        self.computed = {}
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
        self._step_mean = self._mean(self._step_mean, self._time.now - self._step_began)
        self._world.entered(self, "committed")
        if step % self._world.plan.audit_every == 0:
            self.send(Hashed(self.number, step, f"{self.state:x}", self.generation))
        if all(brought[2] for brought in round.brought.values()):
            self.stopping = self.told_stop or "asked"
        votes = {brought[1] for brought in round.brought.values()}
        if 0 not in votes and not self.stopping:
            # All were asked before this step: all stop after it. Whoever was asked to abort since does too.
            self.asked = max(self.asked, *votes)
            self._report()
            return
        self._next()

    def _mean(self, mean: float, value: float) -> float:
        return value if mean == 0 else 0.7 * mean + 0.3 * value
