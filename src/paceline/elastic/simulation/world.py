"""One simulated run: members, lines, collectives, checkpoints, a supervisor, and a schedule of faults.

`run(seed, workers)` is a function of its arguments alone. Must not decide anything that the machine decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import final

from paceline.elastic.deadlines import step_seconds
from paceline.elastic.ending import BEFORE_THE_FIRST_STEP
from paceline.elastic.liveness import silence_limit
from paceline.elastic.model import (
    HOME,
    AgentCame,
    AgentLost,
    Began,
    EndJob,
    Event,
    FailureKind,
    HasRaised,
    Lost,
    NoteVerdict,
    Probed,
    Standing,
    ViewPlan,
)
from paceline.elastic.simulation import faults, harm, plan as plans
from paceline.elastic.simulation.coordinator import Coordinator
from paceline.elastic.simulation.faults import Fault
from paceline.elastic.simulation.member import Member
from paceline.elastic.simulation.network import MIN_RTO, Line, Weather
from paceline.elastic.simulation.process import Process
from paceline.elastic.simulation.rounds import Rounds
from paceline.elastic.simulation.timeline import Timeline
from paceline.elastic.simulation.truth import GENESIS, Truth
from paceline.elastic.state import usable_slots

MOST_EVENTS = 3_000_000


@final
@dataclass(frozen=True)
class Outcome:
    """What became of a schedule. `digest` is of everything that happened: equal seeds, equal digests."""

    seed: int
    workers: int
    faults: tuple[Fault, ...]
    violations: tuple[str, ...]
    ended: str
    ok: bool
    events: int
    happened: int
    decisions: int
    views: int
    virtual_seconds: float
    digest: int


def run(
    seed: int, workers: int, tracer: Callable[[str], None] | None = None, check_laws: bool = True
) -> Outcome:
    """One schedule from beginning to end."""
    return World(seed, workers, tracer, check_laws).run()


@final
class World:
    """Everything of one run; see `run`."""

    def __init__(self, seed: int, workers: int, tracer: Callable[[str], None] | None, check_laws: bool):
        draw = Random(f"{seed}:{workers}:schedule")
        self.seed = seed
        self.workers = workers
        self.plan = plans.drawn(draw, seed, workers)
        self.faults = faults.drawn(draw, workers)
        self.trace = tracer
        self.rng = Random(f"{seed}:{workers}:world")
        self.time = Timeline()
        self.weather = Weather()
        self.truth = Truth(self.plan.settings.shards)
        self.members: dict[int, Member] = {}
        self.rounds = Rounds(self.time, self.rng, self.weather, self.members.__getitem__)
        self.coordinator = Coordinator(self.plan.settings, self, tracer, check_laws)
        self.checkpoints: dict[int, int] = {}
        self.agents: dict[int, int] = {}  # place -> workers
        self.gone_agents: set[int] = set()
        self.touched: set[int] = set()  # members that a fault befell: only they may be blamed
        self.anyone: bool = False  # a fault befell everybody
        self.stopped_all_at = float("-inf")  # when all members were last stopped by one hand ...
        self.stopped_by_hand: set[int] = set()  # ... and who of them ran until then
        self.traps: list[harm.Trap] = []
        self.raise_next: dict[int, str] = {}
        self.raise_always: set[tuple[int, int]] = set()
        self.raised_steps: Counter[int] = Counter()
        self.bad_starts = 0
        self.end: EndJob | None = None
        self.last_commit = 0.0
        self._restored: dict[int, tuple[int, int]] = {}
        self._deaths: list[Lost] = []

    def run(self) -> Outcome:
        self.note(f"{self.plan}")
        for fault in self.faults:
            self.note(f"fault {fault}")
            self.time.at(fault.at, harm.apply, self, fault)
        quiet = max([0.0, *(harm.over_by(fault) for fault in self.faults)])
        self.time.at(quiet + self.patience, self._must_have_moved, quiet)
        self.coordinator.begin(Began())
        while self.end is None and not self.truth.violations:
            if not self.time.next():
                self.truth.violation("nothing is left to happen and the job has not ended")
            elif self.time.happened > MOST_EVENTS:
                self.truth.violation("the job does not end")
        if self.end is not None:
            self._check_end(self.end)
        return Outcome(
            seed=self.seed,
            workers=self.workers,
            faults=self.faults,
            violations=tuple(self.truth.violations),
            ended=self.end.reason if self.end is not None else "",
            ok=self.end is not None and self.end.ok,
            events=self.coordinator.events,
            happened=self.time.happened,
            decisions=self.coordinator.decisions,
            views=self.coordinator.actions["TellView"],
            virtual_seconds=self.time.now,
            digest=self.coordinator.digest,
        )

    @property
    def patience(self) -> float:
        """Virtual seconds after the last fault within which a step must be committed."""
        limits = self.plan.settings
        # Whoever was slow when it began a step is so until its end, and may be the only one.
        shard = max([self.plan.shard_seconds, *(one.per_shard for one in self.members.values() if one.alive)])
        return (
            limits.start_seconds
            + 2 * limits.slow_phase_seconds
            + 2 * limits.install_seconds
            + 4 * max(limits.silence_least, 8 * limits.heartbeat)
            + limits.backoff_most
            + limits.shards * shard
            + 5.0
        )

    def note(self, line: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.time.now:9.4f}  {line}")

    # what members ask

    def hear(self, event: Event) -> None:
        self.coordinator.hear(event)

    def stored(self, plan: ViewPlan) -> tuple[int, int]:
        """The checkpoint that a view restores: the same for all who ask."""
        if plan.generation not in self._restored:
            most = plan.restore_before if plan.restore_before >= 0 else self.plan.steps
            # Whoever restores an earlier state removes the later ones: they are wrong.
            self.checkpoints = {step: state for step, state in self.checkpoints.items() if step <= most}
            step = max((step for step in self.checkpoints if step <= most), default=0)
            state = self.checkpoints.get(step, GENESIS)
            self._restored[plan.generation] = (step, state)
            self.truth.restores(step, state)
        return self._restored[plan.generation]

    def store(self, step: int, state: int) -> None:
        self.checkpoints[step] = state

    def raises(self, member: Process, shards: list[int]) -> bool:
        """Whether its code raises now; then the worker ends."""
        fault = self.raise_next.pop(member.number, "")
        shard = next((s for s in shards if (member.steps, s) in self.raise_always), -1)
        if not fault and shard < 0:
            return False
        self.raised_steps[member.steps] += 1
        self.time.after(0.01, self._raise, member, fault or "code", shard)
        return True

    def _raise(self, member: Process, fault: str, shard: int) -> None:
        if not member.alive:
            return
        # Most stay until they are dismissed; the state of some is no good, and these end.
        holds = self.rng.random() < 0.8
        raised = HasRaised(
            member.number, "ValueError: simulated", fault, member.steps, shard, holds, member.progress
        )
        if holds:
            member.wait_raised(raised)
        else:
            member.send(raised)
            self.time.after(0.02, self.die, member.number, "exit", "exit code 1")

    def reaches_supervisor(self) -> bool:
        return self.coordinator.up

    def entered(self, member: Process, phase: str) -> None:
        if phase == "committed":
            self.last_commit = self.time.now
        if self.traps:
            harm.spring(self, member, phase)

    def way_to(self, member: Process, peer: int) -> str | None:
        """Whether a member can connect to a peer now: empty, what is in the way, or None: nobody answers."""
        other = self.members.get(peer)
        if other is None or not other.alive or other.stopped:
            return None
        here, there = member.number, peer
        ways = ((here, there), (there, here))  # a connection needs both
        cut = any(self.weather.cut_links.get(way, 0.0) > self.time.now for way in ways)
        walled = (member.place, other.place) in self.weather.walls
        return f"rank {member.slot} cannot reach rank {other.slot}" if cut or walled else ""

    # what the supervisor does

    def member(self, number: int) -> Member | None:
        return self.members.get(number)

    def start(self, number: int, slot: int, place: int) -> None:
        if place != HOME and place not in self.agents:
            return
        member = Member(self, number, slot, place, Line(self.time, self.rng, self.weather))
        self.members[number] = member
        boot = self.plan.boot_seconds * (0.5 + self.rng.random())
        if self.bad_starts > 0:
            self.bad_starts -= 1
            self.time.after(boot / 2, self.die, number, "exit", "exit code 3")
        self.time.after(boot, member.boot)

    def kill(self, number: int) -> None:
        """The order to kill takes the way of the machine it is for."""
        member = self.members.get(number)
        if member is None or not member.alive:
            return
        reached = self.time.now if member.place == HOME else max(self.time.now, member.line.blocked_down)
        self.time.at(reached + 0.01, self.die, number, "crash", "killed on order")

    def probe(self, number: int) -> None:
        """Its machine looks at the process, and answers where it can be reached."""
        member = self.members.get(number)
        if member is None or not member.alive:
            return
        away = max(member.line.blocked_up, member.line.blocked_down) > self.time.now
        if member.place != HOME and (away or member.place not in self.agents):
            return
        now = self.time.now
        ran = now - member.stalled_at if member.stopped else 0.0
        stopped = member.stopped and not member.gripped
        seen = Probed(number, stopped, member.phase, now - member.phase_began(), ran)
        self.time.after(0.0 if member.place == HOME else self.weather.delay, self.hear, seen)

    def send_away(self, place: int) -> None:
        """The agent of a machine that cannot take part ends."""
        if self.agents.pop(place, None) is not None:
            self.gone_agents.add(place)
            self.time.after(0.01, self.hear, AgentLost(place, "it was sent away"))

    def check_ways(self, plan: ViewPlan) -> None:
        """A view whose members cannot connect would never form, and all would wait for it."""
        places = {member.place for number in plan.members if (member := self.members.get(number)) is not None}
        for wall in self.weather.walls:
            if places.issuperset(wall):
                self.truth.violation(f"generation {plan.generation} joins places {wall} across a wall")

    def die(self, number: int, kind: FailureKind, reason: str) -> None:
        """A process ends; the supervisor is told by whoever started it."""
        member = self.members.get(number)
        if member is None or not member.alive:
            return
        self.note(f"member {number} dies: {reason}")
        if member.is_bad:
            self.truth.cured(number)
        member.die()
        known = self.time.now + 0.002 + self.rng.random() * 0.03
        if member.place != HOME:
            known = max(known, member.line.blocked_up + MIN_RTO)
        self.time.at(known, self._death_known, Lost(number, kind, reason))

    def _death_known(self, lost: Lost) -> None:
        if self.coordinator.up:
            self.hear(lost)
        else:
            self._deaths.append(lost)

    def blamed(self, verdict: NoteVerdict) -> None:
        """Nobody is blamed whom nothing befell."""
        member = self.members.get(verdict.member)
        if "other weights" in verdict.what:
            self.truth.judged.add(verdict.member)
        if verdict.done == "the job ends" or self.anyone or self.truth.corrupted:
            return
        if "collectives broke" in verdict.what and self._most_cut_off(verdict.member):
            return
        if "no heartbeat" in verdict.what and member is not None and member.alive:
            self._check_silence(member)
        if verdict.member not in self.touched and member is not None and member.alive:
            self.truth.violation(f"member {verdict.member} is blamed without a fault: {verdict.what}")

    def _check_silence(self, member: Member) -> None:
        """Silence is nobody's fault while its interpreter is held, or while all are stopped by one hand."""
        reached = member.place == HOME and not any(one.kind.startswith("coordinator") for one in self.faults)
        # One that was cut off before has been silent for another reason.
        least = silence_limit(self.coordinator.state) - 2 * self.plan.settings.heartbeat
        held = member.gripped and self.time.now - member.stalled_at >= least
        if held and reached:
            self.truth.violation(f"member {member.number} is blamed for silence, and its process runs")
        since = self.time.now - self.stopped_all_at
        some_woke = any(one.alive and not one.stopped for one in self.members.values())
        others = [
            worker
            for worker in self.coordinator.state.workers.values()
            if worker.number in self.stopped_by_hand - {member.number}
            and worker.standing is not Standing.STARTING
        ]
        by_hand = reached and member.number in self.stopped_by_hand and others
        if by_hand and not some_woke and least <= since < self.plan.settings.slow_phase_seconds / 2:
            self.truth.violation(f"member {member.number} is blamed, and all were stopped {since:.1f} s ago")

    def _most_cut_off(self, number: int) -> bool:
        """Of two that do not reach each other nobody can say whose line it is."""
        view = self.coordinator.state.view
        members = view.members if view is not None else ()
        cuts = {
            one: sum((one, other) in self.weather.cut_links for other in members)
            + sum((other, one) in self.weather.cut_links for other in members)
            for one in members
        }
        return cuts.get(number, 0) == max(cuts.values(), default=0)

    def stopped_for_good(self, member: Member) -> None:
        """The supervisor has to notice that nothing comes from it, if it is well itself."""
        if any(fault.kind.startswith("coordinator") for fault in self.faults):
            return
        self._must_be_noticed(member, 0.0)

    def _must_be_noticed(self, member: Member, waited: float) -> None:
        settings = self.plan.settings
        limit = silence_limit(self.coordinator.state)
        if member.number in self.coordinator.state.held:
            # It is not judged while all of its machine are stopped; from the first sign of life on it is.
            waited = 0.0
        # What it had sent may have been late itself.
        if waited < limit + 2 * settings.heartbeat + (2.0 if self.anyone else 0.3):
            more = settings.heartbeat if self.time.now > member.line.blocked_up + MIN_RTO else 0.0
            self.time.after(settings.heartbeat, self._must_be_noticed, member, waited + more)
            return
        worker = self.coordinator.state.workers.get(member.number)
        if member.stopped and worker is not None and worker.standing is not Standing.STARTING:
            self.truth.violation(f"member {member.number} is stopped, and nobody has noticed")

    def crashed(self) -> None:
        """The supervisor dies now; another one follows."""
        remembered = self.coordinator.crash()
        self.note("the coordinator crashes")
        for member in self.members.values():
            if member.alive and member.line.up:
                member.lose_line(0.05 + self.rng.random() * 0.5)
        self.time.after(self.restart_seconds, self.restart, remembered)

    restart_seconds = 0.3

    def restart(self, remembered: Began) -> None:
        self.note("a coordinator begins again")
        self.coordinator.begin(remembered)
        deaths, self._deaths = self._deaths, []
        for lost in deaths:
            # Sometimes whoever started it can still say so, sometimes nobody knows.
            if self.rng.random() < 0.5:
                self.hear(lost)
        for place, workers in self.agents.items():
            self.hear(AgentCame(place, workers, f"host{place}"))
        for place in sorted(self.gone_agents):
            self.hear(AgentLost(place, "did not come back"))

    def ended(self, end: EndJob) -> None:
        self.end = end
        if BEFORE_THE_FIRST_STEP in end.reason and self.coordinator.heard_of_steps:
            self.truth.violation(f"after {self.truth.steps} steps the job ends because {end.reason}")

    # what must be true at the end

    def _must_have_moved(self, quiet: float) -> None:
        settings = self.plan.settings
        # Limits follow the measured steps, and a step in which somebody hung was a long one.
        more = 3 * settings.hang_steps * step_seconds(self.coordinator.state)
        if self.last_commit <= quiet and self.time.now < quiet + self.patience + more:
            self.time.after(1.0, self._must_have_moved, quiet)
            return
        if self.last_commit <= quiet:
            self.truth.violation(
                f"no step was committed in {self.patience:.0f} s after the last fault; "
                f"the job is {self.coordinator.state.phase.value}"
            )
        slowest = self.plan.steps * self.plan.settings.shards * self.plan.shard_seconds
        self.time.after(2 * slowest + 2 * self.patience, self._must_have_ended)

    def _must_have_ended(self) -> None:
        self.truth.violation(f"the job has not ended; it is {self.coordinator.state.phase.value}")

    def _check_end(self, end: EndJob) -> None:
        done = {worker.number for worker in self.coordinator.state.workers.values() if worker.digest}
        if self.truth.bad - self.truth.judged - done or (len(done) == 1 and done <= self.truth.bad):
            # A wrong member was sent away for something else, or is the only one left: nobody can know.
            self.truth.stays = True
        if end.ok:
            for worker in self.coordinator.state.workers.values():
                member = self.members.get(worker.number)
                if member is None or not worker.digest or self.truth.stays:
                    continue
                if member.state != self.truth.chain.get(member.steps):
                    self.truth.violation(f"member {member.number} ends with the wrong state")
                if member.steps < self.plan.steps and end.stopped is None:
                    self.truth.violation(f"member {member.number} ends after {member.steps} steps")
            return
        failing = self.coordinator.state.failing is not None and not self.truth.corrupted
        for worker in self.coordinator.state.workers.values() if failing else ():
            member = self.members.get(worker.number)
            if member is not None and worker.digest and self.checkpoints.get(member.steps) != member.state:
                self.truth.violation(f"the job failed and {member.steps} steps of it were not saved")
        if not self._may_fail():
            self.truth.violation(f"the job failed without need: {end.reason}")

    def _may_fail(self) -> bool:
        state = self.coordinator.state
        too_few = len(usable_slots(state)) < max(1, self.plan.settings.min_workers)
        never = not state.committed and all(slot.failures >= 2 for slot in state.slots.values())
        alive = any(self.members[n].alive for n in state.workers if n in self.members)
        # Twice in one step, and an error that is the user's, end a job rightly.
        raised = any(count > 1 for count in self.raised_steps.values()) or "user" in end_words(self.end)
        stopped = state.stop is not None and not alive
        return too_few or never or raised or stopped or self.truth.corrupted


def end_words(end: EndJob | None) -> str:
    """Why a job ended, and whether it was the user's error."""
    return (
        ""
        if end is None
        else ("user " if end.failed is not None and "raised" in end.reason else "") + end.reason
    )
