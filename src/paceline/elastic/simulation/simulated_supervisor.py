"""A simulated supervisor: the real machine, with a shell that carries actions out in the simulated world.

It can crash after any action, and begins again with the machine's snapshot; it can stall.
After every event the invariants are checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, final
from zlib import crc32

from paceline.control.messages import ControlMessage, DialRequest, MemberReport, ViewPlan
from paceline.elastic.machine import invariants, machine
from paceline.elastic.machine.actions import (
    Action,
    EndJob,
    InstallView,
    KillWorker,
    ProbeWorkers,
    RecordVerdict,
    RejectAgent,
    RequestDial,
    Send,
    StartWorker,
)
from paceline.elastic.machine.machine_events import (
    FromMember,
    MachineEvent,
    SupervisorBegan,
    Tick,
    is_routine,
)
from paceline.elastic.machine.settings import MachineSettings
from paceline.elastic.machine.state import JobState
from paceline.elastic.simulation.run_invariants import RunInvariants
from paceline.elastic.simulation.simulated_member import SimulatedMember
from paceline.elastic.simulation.virtual_time import VirtualTime


class SimulatedHosts(Protocol):
    """The processes that a supervisor acts on."""

    members: dict[int, SimulatedMember]

    def start(self, number: int, slot: int, agent_id: int) -> None: ...
    def kill(self, number: int) -> None: ...
    def probe(self, number: int) -> None: ...
    def send_away(self, agent_id: int) -> None: ...


class RunObserver(Protocol):
    """Checks the decisions of a supervisor."""

    invariants: RunInvariants

    def check_ways(self, plan: ViewPlan) -> None: ...
    def blamed(self, verdict: RecordVerdict) -> None: ...
    def crashed(self, away: float = 0.3) -> None: ...


class SimulatedShell(SimulatedHosts, RunObserver, Protocol):
    """The part of the world that the supervisor uses."""

    time: VirtualTime


@final
@dataclass
class SimulatedSupervisor:
    """The supervisors of one job, one after another. `knew_commits`: one of them knew of a commit.
    `judged_view`: the view before the last event, which verdicts are about."""

    settings: MachineSettings
    shell: SimulatedShell
    trace: Callable[[str], None] | None
    check_invariants: bool
    state: JobState = field(init=False)
    up: bool = False
    events: int = 0
    decisions: int = 0
    knew_commits: bool = False
    judged_view: ViewPlan | None = None
    digest: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    end: EndJob | None = None
    crash_after: int | None = None
    _stalled_until: float = 0.0
    _stalled_from: float = 0.0
    _missed: list[MachineEvent] = field(default_factory=list)
    _tick_at: float = float("inf")
    _reports: dict[int, MemberReport] = field(default_factory=dict)

    def begin(self, began: SupervisorBegan) -> None:
        self.up = True
        self._tick_at = float("inf")
        self._missed = []
        self.state = JobState(self.settings)
        self.step(began)

    def crash(self) -> SupervisorBegan:
        """Crash, and return the snapshot: what it had written before it acted."""
        self.up = False
        self.crash_after = None
        return machine.snapshot(self.state)

    def stall(self, seconds: float) -> None:
        """Stop running for a while; what is sent meanwhile waits."""
        now = self.shell.time.now
        if self.up and now >= self._stalled_until:
            self._stalled_from, self._stalled_until = now, now + seconds
            self.shell.time.after(seconds, self._wake)

    def _wake(self) -> None:
        if not self.up:
            return
        missed, self._missed = self._missed, []
        self.step(Tick(self.shell.time.now - self._stalled_from))
        for event in missed:
            self.step(event)

    def suspended(self, seconds: float) -> None:
        """Continue after the whole host was suspended."""
        self._tick_at += seconds
        if self.shell.time.now - seconds < self._stalled_until:
            self._stalled_until += seconds
        elif self.up:
            self.step(Tick(seconds))

    def receive(self, event: MachineEvent) -> None:
        """Handle an event from outside; a stalled supervisor handles it later."""
        if not self.up:
            return
        if self.shell.time.now < self._stalled_until:
            self._missed.append(event)
        else:
            self.step(event)

    def step(self, event: MachineEvent) -> None:
        """Step the machine, check the invariants, and carry out the actions."""
        now = self.shell.time.now
        before = self.state
        self.judged_view = before.view
        self.events += 1
        try:
            after, actions, reason = machine.step(before, event, now)
        except Exception as error:
            self.shell.invariants.violation(f"the machine raised {type(error).__name__}: {error} on {event}")
            return
        self.state = after
        self.knew_commits = self.knew_commits or after.committed
        kind = machine.kind_of(event)
        phase = after.phase.value if after.phase is not before.phase else ""
        self.digest = crc32(f"{now.hex()}{kind.__name__}{len(actions)}{phase}".encode(), self.digest)
        if self.check_invariants:
            broken = invariants.validate_step(before, after, actions, reason)
            broken += invariants.validate_change(before, after)
            if not machine.allowed(before.phase, kind, after.phase):
                transition = f"from {before.phase.value} to {after.phase.value}"
                broken.append(f"{kind.__name__} led {transition}, not in the table")
            for invariant in broken:
                self.shell.invariants.violation(f"{invariant} (after {event})")
        if self.trace is not None and (actions or not is_routine(event)):
            self.trace(f"{now:9.4f}  {event}")
            self.trace(f"           {after.phase.value}: {reason}")
        if isinstance(event, FromMember) and isinstance(event.message, MemberReport):
            self._note_report(event.member, event.message)
        if actions:
            self.decisions += 1
            self._carry_out(actions)
        if self.up:
            self._plan_tick()

    def _note_report(self, member: int, report: MemberReport) -> None:
        if report.generation == self.state.generation:
            self._reports[member] = report

    def _carry_out(self, actions: tuple[Action, ...]) -> None:
        shell = self.shell
        for action in actions:
            if self.crash_after is not None:
                if self.crash_after == 0:
                    shell.crashed()
                    return
                self.crash_after -= 1
            self.actions[type(action).__name__] += 1
            if self.trace is not None:
                self.trace(f"             -> {action}")
            match action:
                case StartWorker(number, slot, agent_id):
                    shell.start(number, slot, agent_id)
                case KillWorker(number, _):
                    shell.kill(number)
                case ProbeWorkers(members):
                    for number in members:
                        shell.probe(number)
                case RequestDial(number, peers):
                    self._send((number,), DialRequest(peers=tuple((peer, 0, "", 0) for peer in peers)))
                    self._send(peers, DialRequest(peers=((number, 0, "", 0),)))
                case RejectAgent(agent_id, _):
                    shell.send_away(agent_id)
                case Send(members, message):
                    self._send(members, message)
                case InstallView(plan, _):
                    self._install(plan)
                case RecordVerdict():
                    shell.blamed(action)
                case EndJob():
                    self.end = action
                    shell.time.halt()

    def _send(self, members: tuple[int, ...], message: ControlMessage) -> None:
        for number in members:
            if (member := self.shell.members.get(number)) is not None:
                member.path.send_down(member.receive, message)

    def _install(self, plan: ViewPlan) -> None:
        reports = {n: r for n, r in self._reports.items() if r.generation == plan.generation}
        self._reports = {}
        self._check_nothing_thrown_away(plan, reports)
        self.shell.check_ways(plan)
        size = len(plan.members)
        where = {"hosts": ("",) * size, "hostnames": ("",) * size, "endpoints": (("", 0),) * size}
        self._send(plan.members, plan.to_view(pids=plan.members, **where))

    def _check_nothing_thrown_away(self, plan: ViewPlan, reports: Mapping[int, MemberReport]) -> None:
        """Check that no gradient that a survivor holds is computed again by another member."""
        known = [report.progress for n, report in reports.items() if n in plan.members and report.progress]
        if plan.restore or not known:
            return
        max_progress = max(known)
        holders: dict[int, set[int]] = {}
        for number, report in reports.items():
            if report.progress == max_progress and number in plan.members:
                for shard in report.held_shards:
                    holders.setdefault(shard, set()).add(number)
        if not holders:
            return
        owner = {shard: plan.members[index] for index, mine in enumerate(plan.shards) for shard in mine}
        for shard, held_by in holders.items():
            if owner.get(shard) not in held_by:
                self.shell.invariants.violation(
                    f"shard {shard}, held by {sorted(held_by)}, is computed again by {owner.get(shard)}"
                )

    def _check_no_slot_is_forgotten(self) -> None:
        """Check that a tick has started every worker that was due."""
        now = self.shell.time.now
        for slot in self.state.slots.values():
            if slot.start_at is not None and slot.start_at < now - 1.0 and self.state.stop_reason is None:
                self.shell.invariants.violation(
                    f"slot {slot.number} waits for a worker since {slot.start_at:.1f}"
                )

    def _plan_tick(self) -> None:
        due = machine.next_deadline(self.state)
        if due is not None and due < self._tick_at:
            self._tick_at = due
            self.shell.time.at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        if not self.up or self._tick_at < due:
            return
        self._tick_at = float("inf")
        if self.shell.time.now < self._stalled_until:
            self._tick_at = self._stalled_until
            self.shell.time.at(self._stalled_until, self._tick, self._stalled_until)
            return
        if self.shell.time.now >= self.state.next_tick_at:
            self.step(Tick())
            self._check_no_slot_is_forgotten()
        else:
            self._plan_tick()
