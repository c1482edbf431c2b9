"""A simulated worker process: its faults, its two threads, and its control connection.

The control thread feeds the member machine (control/member_machine.py) with messages, and sends heartbeats as
long as the process runs. The training thread can hang while the control thread runs; a stopped process runs
neither. What the training thread does is in simulated_member.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from paceline.control import member_machine, member_shell_rules, member_state, messages
from paceline.control.field_types import Progress
from paceline.control.member_invariants import violations
from paceline.core.time_limits import CONNECT_SECONDS
from paceline.elastic.machine.actions import FailureKind
from paceline.elastic.machine.machine_events import FromMember, MachineEvent
from paceline.elastic.simulation.network import MIN_RTO, ControlPath
from paceline.elastic.simulation.run_invariants import RunInvariants, SimulatedStorage
from paceline.elastic.simulation.run_plan import RunPlan
from paceline.elastic.simulation.simulated_collectives import SimulatedCollective, SimulatedCollectives
from paceline.elastic.simulation.virtual_time import VirtualTime

Callback = Callable[[], None]

PhaseTrigger = tuple[int, str, Callback]
"""(member, phase, action): what happens when the member next enters the phase, or has "committed"."""

PATIENCE_SECONDS = 6.0
"""Seconds that a member trains on without a supervisor."""


class ProcessEnvironment(Protocol):
    """Environment of a process: time, the supervisor's side of its connection, and faults."""

    time: VirtualTime
    rng: Random
    plan: RunPlan
    invariants: RunInvariants
    collectives: SimulatedCollectives
    started_again: bool
    last_commit: float
    triggers: list[PhaseTrigger]

    def deliver(self, event: MachineEvent) -> None: ...
    def reaches_supervisor(self) -> bool: ...
    def way_to(self, member: SimulatedProcess, peer: int) -> str | None: ...
    def entered(self, member: SimulatedProcess, phase: str) -> None: ...
    def die(self, number: int, kind: FailureKind, reason: str) -> None: ...


class MemberEnvironment(ProcessEnvironment, Protocol):
    """Environment of a process and of its training thread, which also needs storage and raises errors."""

    storage: SimulatedStorage

    def raises(self, number: int, step: int, shards: list[int]) -> bool: ...
    def seems_alive(self, number: int, agent_id: int) -> bool: ...


@dataclass(eq=False)
class SimulatedProcess(ABC):
    """One worker process: its faults, its membership, and its two threads."""

    world: MemberEnvironment
    number: int
    slot: int
    agent_id: int
    path: ControlPath
    alive: bool = True
    stopped: bool = False  # both threads: by SIGSTOP, or because ...
    holds_gil: bool = False  # ... a call holds the interpreter's lock; the process runs
    stalled_at: float = 0.0
    hung: bool = False  # the training thread
    factor: float = 1.0  # how much slower than others
    dismissed: bool = False
    stop_requested: str = ""
    # the training thread
    todo: deque[member_state.TrainingAction] = field(default_factory=deque)
    idle: bool = True  # it waits for the next action
    collective: SimulatedCollective | None = None
    phase: str = "start"
    token: int = 0
    parked: Callback | None = None
    step_began: float = 0.0
    step_mean: float = 0.0
    shard_mean: float = 0.0
    compute_began: float = 0.0
    computing: list[int] = field(default_factory=list)
    per_shard: float = 0.0

    def __post_init__(self) -> None:
        self.time = self.world.time
        self.phase_since = self.time.now
        self.lost_at = self.time.now  # when the last connection was lost; before the first, the start
        self.membership = member_state.MemberState(self.number, PATIENCE_SECONDS)

    # threads

    @property
    def stuck(self) -> bool:
        """Whether the training thread does not react."""
        return not self.alive or self.stopped or self.hung

    @property
    @abstractmethod
    def progress(self) -> Progress | None:
        """Progress of this member; None: it has no state."""

    def main(self, seconds: float, act: Callback) -> None:
        """Let the training thread do this next, instead of what was planned."""
        self.token += 1
        self.idle = False
        self.time.after(seconds, self._fire, self.token, act)

    def _fire(self, token: int, act: Callback) -> None:
        if token != self.token or not self.alive:
            return
        if self.stopped or self.hung:
            self.parked = act
        else:
            act()

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.phase_since = self.time.now
        if self.world.triggers:
            self.world.entered(self, phase)

    def computed_so_far(self) -> int:
        if self.per_shard <= 0:
            return len(self.computing)
        return min(int((self.time.now - self.compute_began) / self.per_shard), len(self.computing))

    def phase_began(self) -> float:
        """Return since when it is in its phase, which begins anew with each shard."""
        if self.phase != "forward" or self.stuck:
            return self.phase_since
        return max(self.phase_since, self.compute_began + self.computed_so_far() * self.per_shard)

    def stall(self, stopped: bool) -> None:
        """Stop the process, or let its training thread hang."""
        self.phase_since = self.phase_began()
        if stopped:
            self.stalled_at = self.stalled_at if self.stopped else self.time.now
            self.stopped, self.holds_gil = True, False
        else:
            self.hung = True
        if self.collective is not None:
            self.collective.upset(self.number)

    def resume(self) -> None:
        """Continue after a stop or a hang."""
        if not self.alive:
            return
        self.stopped = self.hung = self.holds_gil = False
        if self.collective is not None:
            self.collective.resumed(self.number)
        parked, self.parked = self.parked, None
        if parked is not None:
            parked()
        if self.membership.interrupted is not None:
            self.interrupted()

    def slept(self, seconds: float) -> None:
        """Shift all times: the host was suspended, and monotonic clocks stood still."""
        self.phase_since += seconds
        self.stalled_at += seconds
        self.step_began += seconds
        self.compute_began += seconds
        self.lost_at += seconds

    def die(self) -> None:
        self.alive = False
        self.token += 1
        if self.collective is not None:
            self.collective.upset(self.number)

    # the member machine

    def feed(self, event: member_state.MemberEvent) -> None:
        """Step the machine, and carry out at once what does not wait for the training thread."""
        before = self.membership
        self.membership, actions = member_machine.step(before, event, self.time.now)
        for rule in violations(before, self.membership, actions):
            self.world.invariants.violation(f"member {self.number}: {rule} (after {event})")
        for action in member_shell_rules.queue_up(event, actions, self.todo):
            match action:
                case member_state.SendMessage(message):
                    self.send(message)
                case member_state.Interrupt():
                    if not self.stuck:
                        self.interrupted()
                case member_state.RequestStop(reason):
                    self.stop_requested = self.stop_requested or reason
                case member_state.StopReconnecting(reason):
                    self.world.die(self.number, "exit", reason)
        if self.idle and self.todo:
            self.main(0.001, self.take_action)

    @abstractmethod
    def take_action(self) -> None:
        """Let the training thread carry out the next action."""

    @abstractmethod
    def interrupted(self) -> None:
        """End what the training thread waits for."""

    # the control thread

    def send(self, message: messages.ControlMessage) -> None:
        if self.alive:
            event = FromMember(self.number, message)
            self.path.send_up(not isinstance(message, messages.Heartbeat), self.world.deliver, event)

    def receive(self, message: messages.ControlMessage) -> None:
        """Handle a message of the supervisor."""
        if self.stopped and self.alive:
            self.time.after(0.1, self.receive, message)
        elif self.alive and isinstance(message, messages.DialRequest):
            for peer, *_ in message.peers:
                self.time.after(self.world.collectives.delay(), self._dialed, peer, self.time.now)
        elif self.alive:
            self.feed(message)

    def _dialed(self, peer: int, began: float) -> None:
        way = self.world.way_to(self, peer)
        if way is None:
            return  # the peer is gone, or does not run: the supervisor learns of it elsewhere
        if way and self.time.now - began < CONNECT_SECONDS:
            self.time.after(MIN_RTO, self._dialed, peer, began)
            return
        self.send(messages.DialResult(peer=peer, trouble=way, lossy=bool(way)))

    def boot(self) -> None:
        """Connect and send a hello: the process is up, or its connection was lost."""
        if not self.alive or self.path.up:
            return
        if self.stopped or not self.world.reaches_supervisor():
            self.time.after(0.2, self.boot)
            if not self.stopped:
                self._not_connected()
            return
        self.path.connect()
        if self.phase == "start":
            self.enter("wait")
            self.time.after(0.0, self.send_heartbeat)
        self.send(
            messages.MemberHello(
                member=self.number,
                slot=self.slot,
                pid=self.number,
                host="",
                hostname="",
                endpoint=("", 0),
                generation=self.membership.generation,
                progress=self.progress,
            )
        )
        # The supervisor's first answer: all that it sends on this connection comes after it.
        self.path.send_down(self.receive, messages.MemberAccepted(heartbeat=0.0, patience=0.0))

    def _not_connected(self) -> None:
        """Feed the time without a supervisor, as a real control client does after each failed attempt."""
        # A real worker that was never accepted gives up in `ControlClient.start`, after START_SECONDS: before
        # there is a membership to decide on. Sooner here, so that schedules come to it.
        joining = self.membership.phase is member_state.MemberPhase.JOINING
        if joining and self.time.now - self.lost_at > PATIENCE_SECONDS:
            self.world.die(self.number, "exit", "no supervisor has accepted this worker")
            return
        waits = self.collective is not None and self.collective.waits_for(self.number)
        blocked_since, again = self.phase_since if waits else None, self.world.started_again
        self.feed(member_state.SupervisorAway(self.lost_at, blocked_since, restarting=again, replaced=again))

    def send_heartbeat(self) -> None:
        if not self.alive:
            return
        self.time.after(self.world.plan.settings.heartbeat, self.send_heartbeat)
        if self.stopped or not self.path.up:
            return
        waits = self.collective.waits_for(self.number) if self.collective is not None else ()
        self.send(
            messages.Heartbeat(
                phase=self.phase,
                seconds=self.time.now - self.phase_began(),
                progress=self.progress,
                waits_for=waits,
                shard_seconds=self.shard_mean,
                step_seconds=self.step_mean,
            )
        )

    def lose_connection(self, away: float) -> None:
        """Lose the connection, and connect again after a while."""
        self.path.cut()
        self.lost_at = self.time.now
        self.time.after(away, self.boot)
