"""The world of one simulated run: members, hosts, connections, collectives, checkpoints and a supervisor.

Faults are applied from outside (simulated_faults.py). Must not decide anything that the machine decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import final

from paceline.control.messages import ViewPlan
from paceline.elastic.machine import machine_events as events
from paceline.elastic.machine.actions import EndJob, FailureKind, RecordVerdict
from paceline.elastic.machine.hang_detection import expected_step_seconds
from paceline.elastic.machine.job_end import BEFORE_THE_FIRST_STEP
from paceline.elastic.machine.liveness import silence_limit
from paceline.elastic.machine.settings import LOCAL_AGENT
from paceline.elastic.machine.state import WorkerStatus, usable_slots
from paceline.elastic.simulation.network import MIN_RTO, ControlPath, NetworkConditions
from paceline.elastic.simulation.run_invariants import RunInvariants, SimulatedStorage
from paceline.elastic.simulation.run_plan import RunPlan
from paceline.elastic.simulation.simulated_collectives import SimulatedCollectives
from paceline.elastic.simulation.simulated_member import SimulatedMember
from paceline.elastic.simulation.simulated_process import PATIENCE_SECONDS, PhaseTrigger, SimulatedProcess
from paceline.elastic.simulation.simulated_supervisor import SimulatedSupervisor
from paceline.elastic.simulation.virtual_time import VirtualTime


@final
class World:
    """`supervisor_lasts`: no fault is the supervisor's, so it must notice every fault of a member."""

    def __init__(
        self,
        plan: RunPlan,
        rng: Random,
        tracer: Callable[[str], None] | None,
        *,
        check_invariants: bool,
        supervisor_lasts: bool,
    ):
        self.plan = plan
        self.workers = plan.settings.workers
        self.trace = tracer
        self.rng = rng
        self.supervisor_lasts = supervisor_lasts
        self.time = VirtualTime()
        self.network = NetworkConditions()
        self.invariants = RunInvariants(plan.settings.shards, self.time.halt)
        self.members: dict[int, SimulatedMember] = {}
        self.collectives = SimulatedCollectives(self.time, rng, self.network, self.members.__getitem__)
        self.supervisor = SimulatedSupervisor(plan.settings, self, tracer, check_invariants)
        self.storage = SimulatedStorage(self.invariants)
        self.agents: dict[int, int] = {}  # agent id -> workers
        self.gone_agents: set[int] = set()
        self.affected: set[int] = set()  # members with a fault: only these may be blamed
        self.all_affected: bool = False  # a fault of all members
        self.stopped_all_at = float("-inf")  # when all members were last stopped together ...
        self.stopped_together: set[int] = set()  # ... and those of them that ran until then
        self.triggers: list[PhaseTrigger] = []
        self.raise_next: dict[int, str] = {}
        self.raise_always: set[tuple[int, int]] = set()
        self.raised_steps: Counter[int] = Counter()
        self.raised: dict[int, str] = {}  # members whose code raised, and whose fault that is
        self.stop_requested = False
        self.started_again = False  # a new start of the run waits for its processes to leave
        self.bad_starts = 0
        self.last_commit = 0.0
        self._deaths: list[events.WorkerLost] = []

    @property
    def patience(self) -> float:
        """Virtual seconds after the last fault within which a step must be committed."""
        limits = self.plan.settings
        # A member that was slow when it began a step is so until its end, and may be the only one.
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

    def mark_affected(self, members: Iterable[SimulatedMember]) -> None:
        """Note that these members have a fault."""
        self.affected.update(member.number for member in members)

    # for members

    def deliver(self, event: events.MachineEvent) -> None:
        self.supervisor.receive(event)

    def raises(self, number: int, step: int, shards: list[int]) -> bool:
        """Return whether the code of a member raises now, in this step or in one of these shards."""
        fault = self.raise_next.pop(number, "")
        shard = next((s for s in shards if (step, s) in self.raise_always), -1)
        if not fault and shard < 0:
            return False
        self.raised_steps[step] += 1
        self.raised[number] = fault or "code"
        self.time.after(0.01, self.members[number].code_raised, fault or "code", shard)
        return True

    def reaches_supervisor(self) -> bool:
        return self.supervisor.up

    def entered(self, member: SimulatedProcess, phase: str) -> None:
        for trigger in self.triggers:
            if trigger[:2] == (member.number, phase):
                self.triggers.remove(trigger)
                self.time.after(self.rng.random() * 0.003, trigger[2])
                return

    def way_to(self, member: SimulatedProcess, peer: int) -> str | None:
        """Return what keeps a member from connecting to a peer: empty: nothing; None: no process answers."""
        other = self.members.get(peer)
        if other is None or not other.alive or other.stopped:
            return None
        here, there = member.number, peer
        ways = ((here, there), (there, here))  # a connection needs both
        cut = any(self.network.cut_links.get(way, 0.0) > self.time.now for way in ways)
        blocked = (member.agent_id, other.agent_id) in self.network.blocked_routes
        return f"rank {member.slot} cannot reach rank {other.slot}" if cut or blocked else ""

    def seems_alive(self, number: int, agent_id: int) -> bool:
        """Return whether a process on that host must take this member for alive; those of others it cannot
        see."""
        member = self.members[number]
        return member.alive or member.agent_id != agent_id

    # for the supervisor

    def start(self, number: int, slot: int, agent_id: int) -> None:
        if agent_id != LOCAL_AGENT and agent_id not in self.agents:
            return
        member = SimulatedMember(self, number, slot, agent_id, ControlPath(self.time, self.rng, self.network))
        self.members[number] = member
        boot = self.plan.boot_seconds * (0.5 + self.rng.random())
        if self.bad_starts > 0:
            self.bad_starts -= 1
            self.time.after(boot / 2, self.die, number, "exit", "exit code 3")
        self.time.after(boot, member.boot)

    def kill(self, number: int) -> None:
        """Kill a process; the order travels on the connection of its host."""
        member = self.members.get(number)
        if member is None or not member.alive:
            return
        reached = (
            self.time.now if member.agent_id == LOCAL_AGENT else max(self.time.now, member.path.blocked_down)
        )
        self.time.at(reached + 0.01, self.die, number, "crash", "killed on order")

    def probe(self, number: int) -> None:
        """Let the host of a process look at it, and answer if the host can be reached."""
        member = self.members.get(number)
        if member is None or not member.alive:
            return
        away = max(member.path.blocked_up, member.path.blocked_down) > self.time.now
        if member.agent_id != LOCAL_AGENT and (away or member.agent_id not in self.agents):
            return
        now = self.time.now
        ran = now - member.stalled_at if member.stopped else 0.0
        stopped = member.stopped and not member.holds_gil
        seen = events.ProcessProbed(number, stopped, member.phase, now - member.phase_began(), ran)
        self.time.after(0.0 if member.agent_id == LOCAL_AGENT else self.network.delay, self.deliver, seen)

    def send_away(self, agent_id: int) -> None:
        """End the agent of a host that cannot take part."""
        if self.agents.pop(agent_id, None) is not None:
            self.gone_agents.add(agent_id)
            self.time.after(0.01, self.deliver, events.AgentLost(agent_id, "it was sent away"))

    def check_ways(self, plan: ViewPlan) -> None:
        """Check that the members of a view can connect: else it never forms, and all wait for it."""
        hosts = {
            member.agent_id for number in plan.members if (member := self.members.get(number)) is not None
        }
        for route in self.network.blocked_routes:
            if hosts.issuperset(route):
                self.invariants.violation(f"generation {plan.generation} needs the blocked route {route}")

    def die(self, number: int, kind: FailureKind, reason: str) -> None:
        """End a process; the supervisor learns of it from the process that started it."""
        member = self.members.get(number)
        if member is None or not member.alive:
            return
        self.note(f"member {number} dies: {reason}")
        if member.is_bad:
            self.invariants.cured(number)
        member.die()
        known = self.time.now + 0.002 + self.rng.random() * 0.03
        if member.agent_id != LOCAL_AGENT:
            known = max(known, member.path.blocked_up + MIN_RTO)
        self.time.at(known, self._death_known, events.WorkerLost(number, kind, reason))

    def _death_known(self, lost: events.WorkerLost) -> None:
        if self.supervisor.up:
            self.deliver(lost)
        else:
            self._deaths.append(lost)

    def blamed(self, verdict: RecordVerdict) -> None:
        """Check that a blamed member has had a fault."""
        member = self.members.get(verdict.member)
        if verdict.kind == "dissent":
            self.invariants.judged.add(verdict.member)
        # Without a kind the job ends, which `check_end` judges.
        if verdict.kind is None or self.all_affected or self.invariants.corrupted:
            return
        if verdict.kind in ("silent", "unreachable") and self._most_cut_off(verdict.member):
            return
        silent = verdict.kind == "silent" and verdict.phase != "start"
        if silent and member is not None and member.alive:
            self._check_silence(member)
        if verdict.member not in self.affected and member is not None and member.alive:
            self.invariants.violation(f"member {verdict.member} is blamed without a fault: {verdict.what}")

    def _check_silence(self, member: SimulatedMember) -> None:
        """Check that no member is blamed for silence while its interpreter is held, or all are stopped."""
        reached = member.agent_id == LOCAL_AGENT and self.supervisor_lasts
        # One that was cut off before has been silent for another reason.
        least = silence_limit(self.supervisor.state) - 2 * self.plan.settings.heartbeat
        held = member.holds_gil and self.time.now - member.stalled_at >= least
        if held and reached:
            self.invariants.violation(f"member {member.number} is blamed for silence, and its process runs")
        since = self.time.now - self.stopped_all_at
        some_woke = any(one.alive and not one.stopped for one in self.members.values())
        others = [
            worker
            for worker in self.supervisor.state.workers.values()
            if worker.number in self.stopped_together - {member.number}
            and worker.status is not WorkerStatus.STARTING
        ]
        stopped = reached and member.number in self.stopped_together and others
        if stopped and not some_woke and least <= since < self.plan.settings.slow_phase_seconds / 2:
            self.invariants.violation(
                f"member {member.number} is blamed, and all were stopped {since:.1f} s ago"
            )

    def _most_cut_off(self, number: int) -> bool:
        """Return whether links of this member were cut, and of no member more: of two that do not meet,
        either may be at fault."""
        view = self.supervisor.judged_view
        members = view.members if view is not None else ()
        cuts = {
            one: sum((one, other) in self.network.cut_links for other in members)
            + sum((other, one) in self.network.cut_links for other in members)
            for one in members
        }
        return 0 < cuts.get(number, 0) == max(cuts.values(), default=0)

    def stopped_for_good(self, member: SimulatedMember) -> None:
        """Require that the supervisor notices the silence of this member, unless it has faults itself."""
        if self.supervisor_lasts:
            self._must_be_noticed(member, 0.0)

    def _must_be_noticed(self, member: SimulatedMember, waited: float) -> None:
        settings = self.plan.settings
        limit = silence_limit(self.supervisor.state)
        if member.number in self.supervisor.state.stopped_together:
            # Not judged while all members of its host are stopped; judged from the first sign of life on.
            waited = 0.0
        # Its last message may have been late.
        if waited < limit + 2 * settings.heartbeat + (2.0 if self.all_affected else 0.3):
            more = settings.heartbeat if self.time.now > member.path.blocked_up + MIN_RTO else 0.0
            self.time.after(settings.heartbeat, self._must_be_noticed, member, waited + more)
            return
        worker = self.supervisor.state.workers.get(member.number)
        if member.stopped and worker is not None and worker.status is not WorkerStatus.STARTING:
            self.invariants.violation(
                f"member {member.number} is stopped, and the supervisor has not noticed"
            )

    def crashed(self, away: float = 0.3) -> None:
        """Crash the supervisor, and start another one after a while."""
        snapshot = self.supervisor.crash()
        self.note("the supervisor crashes")
        for member in self.members.values():
            if member.alive and member.path.up:
                member.lose_connection(0.05 + self.rng.random() * 0.5)
        self.time.after(away, self.restart, snapshot, away)

    def restart(self, snapshot: events.SupervisorBegan, away: float) -> None:
        self.note("a supervisor begins again")
        limit = PATIENCE_SECONDS if self.started_again else 3 * PATIENCE_SECONDS
        self.started_again = False
        if away > limit and not self.all_affected:
            for member in self.members.values():
                if member.alive and member.number not in self.affected:
                    self.invariants.violation(f"member {member.number} lives after {away:.0f} s of absence")
        self.supervisor.begin(snapshot)
        deaths, self._deaths = self._deaths, []
        for lost in deaths:
            # Sometimes the process that started it can still say so, sometimes it is not known.
            if self.rng.random() < 0.5:
                self.deliver(lost)
        for agent_id, workers in self.agents.items():
            self.deliver(events.AgentJoined(agent_id, workers, f"host{agent_id}"))
        for agent_id in sorted(self.gone_agents):
            self.deliver(events.AgentLost(agent_id, "did not come back"))

    # at the end

    def must_have_moved(self, quiet: float) -> None:
        settings = self.plan.settings
        # Limits follow the measured steps, and a step in which a member hung was a long one.
        more = 3 * settings.hang_steps * expected_step_seconds(self.supervisor.state)
        if self.last_commit <= quiet and self.time.now < quiet + self.patience + more:
            self.time.after(1.0, self.must_have_moved, quiet)
            return
        if self.last_commit <= quiet:
            self.invariants.violation(
                f"no step was committed in {self.patience:.0f} s after the last fault; "
                f"the job is {self.supervisor.state.phase.value}"
            )
        slowest = self.plan.steps * self.plan.settings.shards * self.plan.shard_seconds
        self.time.after(2 * slowest + 2 * self.patience, self._must_have_ended)

    def _must_have_ended(self) -> None:
        self.invariants.violation(f"the job has not ended; it is {self.supervisor.state.phase.value}")

    def check_end(self, end: EndJob) -> None:
        if BEFORE_THE_FIRST_STEP in end.reason and self.supervisor.knew_commits:
            self.invariants.violation(
                f"after {self.invariants.steps} steps the job ends because {end.reason}"
            )
        done = {worker.number for worker in self.supervisor.state.workers.values() if worker.digest}
        if self.invariants.bad - self.invariants.judged - done or (
            len(done) == 1 and done <= self.invariants.bad
        ):
            # A wrong member was sent away for something else, or is the only one left: that cannot be known.
            self.invariants.stays = True
        if end.ok:
            for worker in self.supervisor.state.workers.values():
                member = self.members.get(worker.number)
                if member is None or not worker.digest or self.invariants.stays:
                    continue
                if member.state != self.invariants.chain.get(member.steps):
                    self.invariants.violation(f"member {member.number} ends with the wrong state")
                if member.steps < self.plan.steps and end.stopped is None:
                    self.invariants.violation(f"member {member.number} ends after {member.steps} steps")
            return
        failing = self.supervisor.state.fatal_failure is not None and not self.invariants.corrupted
        for worker in self.supervisor.state.workers.values() if failing else ():
            member = self.members.get(worker.number)
            if (
                member is not None
                and worker.digest
                and self.storage.versions.get(member.steps) != member.state
            ):
                self.invariants.violation(f"the job failed and {member.steps} steps of it were not saved")
        if not self._may_fail(end):
            self.invariants.violation(f"the job failed without need: {end.reason}")

    def _may_fail(self, end: EndJob) -> bool:
        state = self.supervisor.state
        too_few = len(usable_slots(state)) < max(1, self.plan.settings.min_workers)
        never = not state.committed and all(slot.failures >= 2 for slot in state.slots.values())
        alive = any(self.members[n].alive for n in state.workers if n in self.members)
        # Twice in one step, an error that is the user's, and any while it stops, end a job rightly.
        raised = any(count > 1 for count in self.raised_steps.values())
        if end.failed in self.raised:
            raised = raised or self.stop_requested or self.raised[end.failed] == "user"
        stopped = state.stop_reason is not None and not alive
        return too_few or never or raised or stopped or self.invariants.corrupted
