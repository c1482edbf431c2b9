"""A simulated supervisor: the real machine, with a shell that carries actions out in the simulated world.

It can crash after any action, and begins again with what the machine says is to be remembered; it can stall.
After every event the laws are checked. Must not know what members compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol, final
from zlib import crc32

from paceline.elastic import machine
from paceline.elastic.model import (
    Action,
    Beaten,
    Began,
    Dismiss,
    EndJob,
    Event,
    KillWorker,
    NoteVerdict,
    ProbeWorkers,
    Reported,
    SendAway,
    Settings,
    StartWorker,
    TellDial,
    TellPrepare,
    TellStop,
    TellView,
    Ticked,
    ViewPlan,
)
from paceline.elastic.simulation.member import Member
from paceline.elastic.simulation.plan import RunPlan
from paceline.elastic.simulation.timeline import Timeline
from paceline.elastic.simulation.truth import Truth
from paceline.elastic.state import State


class Shell(Protocol):
    """What the coordinator does to the world."""

    time: Timeline
    plan: RunPlan
    truth: Truth

    def member(self, number: int) -> Member | None: ...
    def start(self, number: int, slot: int, place: int) -> None: ...
    def kill(self, number: int) -> None: ...
    def probe(self, number: int) -> None: ...
    def send_away(self, place: int) -> None: ...
    def check_ways(self, plan: ViewPlan) -> None: ...
    def blamed(self, verdict: NoteVerdict) -> None: ...
    def ended(self, end: EndJob) -> None: ...
    def crashed(self) -> None: ...


@final
class Coordinator:
    """One supervisor after another, over one job."""

    def __init__(self, settings: Settings, shell: Shell, tracer: Callable[[str], None] | None, laws: bool):
        self._settings = settings
        self._shell = shell
        self._trace = tracer
        self._laws = laws
        self.state: State = machine.initial(settings)
        self.up = False
        self.events = 0
        self.decisions = 0
        self.heard_of_steps = False  # by any of the coordinators so far
        self.digest = 0
        self.actions: Counter[str] = Counter()
        self.crash_after: int | None = None
        self._stalled_until = 0.0
        self._stalled_from = 0.0
        self._missed: list[Event] = []
        self._tick_at = float("inf")
        self._reports: dict[int, Reported] = {}

    def begin(self, began: Began) -> None:
        self.up = True
        self._tick_at = float("inf")
        self._missed = []
        self.state = machine.initial(self._settings)
        self.tell(began)

    def crash(self) -> Began:
        """Gone, with all but what it wrote down before it acted."""
        self.up = False
        self.crash_after = None
        return machine.remembered(self.state)

    def stall(self, seconds: float) -> None:
        """It does not run for a while; what is sent to it waits."""
        now = self._shell.time.now
        if self.up and now >= self._stalled_until:
            self._stalled_from, self._stalled_until = now, now + seconds
            self._shell.time.after(seconds, self._wake)

    def _wake(self) -> None:
        if not self.up:
            return
        missed, self._missed = self._missed, []
        self.tell(Ticked(self._shell.time.now - self._stalled_from))
        for event in missed:
            self.tell(event)

    def suspended(self, seconds: float) -> None:
        """The whole machine slept."""
        self._tick_at += seconds
        if self._shell.time.now - seconds < self._stalled_until:
            self._stalled_until += seconds
        elif self.up:
            self.tell(Ticked(seconds))

    def hear(self, event: Event) -> None:
        """Something came from outside."""
        if not self.up:
            return
        if self._shell.time.now < self._stalled_until:
            self._missed.append(event)
        else:
            self.tell(event)

    def tell(self, event: Event) -> None:
        """One step of the machine, checked, and what follows from it."""
        now = self._shell.time.now
        before = self.state
        self.events += 1
        try:
            after, actions, reason = machine.step(before, event, now)
        except Exception as error:
            self._shell.truth.violation(f"the machine raised {type(error).__name__}: {error} on {event}")
            return
        self.state = after
        self.heard_of_steps = self.heard_of_steps or after.committed
        self.digest = crc32(
            f"{now:.6f}{type(event).__name__}{len(actions)}{after.phase.value}".encode(), self.digest
        )
        if self._laws:
            self._check(before, event, actions, reason)
        if self._trace is not None and (actions or not isinstance(event, Beaten | Ticked)):
            self._trace(f"{now:9.4f}  {event}")
            self._trace(f"           {after.phase.value}: {reason}")
        if isinstance(event, Reported) and event.generation == after.generation:
            self._reports[event.member] = event
        if actions:
            self.decisions += 1
            self._carry_out(actions)
        if self.up:
            self._plan_tick()

    def _check(self, before: State, event: Event, actions: tuple[Action, ...], reason: str) -> None:
        after = self.state
        broken = machine.validate_step(before, after, actions, reason)
        broken += machine.validate_change(before, after)
        if not machine.allowed(before.phase, event, after.phase):
            name = type(event).__name__
            broken.append(f"{name} led from {before.phase.value} to {after.phase.value}, not in the table")
        for law in broken:
            self._shell.truth.violation(f"{law} (after {event})")

    def _carry_out(self, actions: tuple[Action, ...]) -> None:
        shell = self._shell
        for action in actions:
            if self.crash_after is not None:
                if self.crash_after == 0:
                    shell.crashed()
                    return
                self.crash_after -= 1
            self.actions[type(action).__name__] += 1
            if self._trace is not None:
                self._trace(f"             -> {action}")
            match action:
                case StartWorker(number, slot, place):
                    shell.start(number, slot, place)
                case KillWorker(number, _):
                    shell.kill(number)
                case ProbeWorkers(members):
                    for number in members:
                        shell.probe(number)
                case TellDial(number, peers):
                    self._dial(number, peers)
                case SendAway(place, _):
                    shell.send_away(place)
                case TellPrepare(members, generation, abort, _):
                    for number in members:
                        member = shell.member(number)
                        if member is not None:
                            member.line.send_down(member.on_prepare, generation, abort)
                case TellView(plan, _):
                    self._send(plan)
                case TellStop(members, reason):
                    for number in members:
                        member = shell.member(number)
                        if member is not None:
                            member.line.send_down(member.on_stop, reason)
                case Dismiss(number, _):
                    member = shell.member(number)
                    if member is not None:
                        member.line.send_down(member.on_dismiss)
                case NoteVerdict():
                    shell.blamed(action)
                case EndJob():
                    shell.ended(action)

    def _dial(self, number: int, peers: tuple[int, ...]) -> None:
        for one, other in [(number, peer) for peer in peers] + [(peer, number) for peer in peers]:
            member = self._shell.member(one)
            if member is not None:
                member.line.send_down(member.on_dial, other)

    def _send(self, plan: ViewPlan) -> None:
        reports = {n: r for n, r in self._reports.items() if r.generation == plan.generation}
        self._reports = {}
        self._check_nothing_thrown_away(plan, reports)
        self._shell.check_ways(plan)
        for number in plan.members:
            member = self._shell.member(number)
            if member is not None:
                member.line.send_down(member.on_view, plan)

    def _check_nothing_thrown_away(self, plan: ViewPlan, reports: Mapping[int, Reported]) -> None:
        """Gradients that a survivor holds are not computed again by somebody else."""
        known = [report.progress for n, report in reports.items() if n in plan.members and report.progress]
        if plan.restore or not known:
            return
        furthest = max(known)
        holders: dict[int, set[int]] = {}
        for number, report in reports.items():
            if report.progress == furthest and number in plan.members:
                for shard in report.held:
                    holders.setdefault(shard, set()).add(number)
        if not holders:
            return
        owner = {shard: plan.members[rank] for rank, mine in enumerate(plan.shards) for shard in mine}
        for shard, held_by in holders.items():
            if owner.get(shard) not in held_by:
                self._shell.truth.violation(
                    f"shard {shard}, held by {sorted(held_by)}, is computed again by {owner.get(shard)}"
                )

    def _check_nobody_is_forgotten(self) -> None:
        """A tick starts what is to be started."""
        now = self._shell.time.now
        for slot in self.state.slots.values():
            if slot.starts_at is not None and slot.starts_at < now - 1.0 and self.state.stop is None:
                self._shell.truth.violation(
                    f"slot {slot.number} waits for a worker since {slot.starts_at:.1f}"
                )

    def _plan_tick(self) -> None:
        due = machine.next_deadline(self.state)
        if due is not None and due < self._tick_at:
            self._tick_at = due
            self._shell.time.at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        if not self.up or self._tick_at < due:
            return
        self._tick_at = float("inf")
        if self._shell.time.now < self._stalled_until:
            self._tick_at = self._stalled_until
            self._shell.time.at(self._stalled_until, self._tick, self._stalled_until)
            return
        if self._shell.time.now >= self.state.due:
            self.tell(Ticked())
            self._check_nobody_is_forgotten()
        else:
            self._plan_tick()
