"""Faults of a simulated run: drawn from the seed, applied to the world at their time.

A fault is plain data, so that a schedule can be printed, counted and repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, TypeAlias, final

from paceline.control.member_state import LeaveRequested
from paceline.elastic.machine import machine_events as events
from paceline.elastic.machine.settings import LOCAL_AGENT
from paceline.elastic.simulation.simulated_member import SimulatedMember
from paceline.elastic.simulation.simulated_process import PATIENCE_SECONDS
from paceline.elastic.simulation.world import World

Members: TypeAlias = list[SimulatedMember]

PHASES = ("forward", "collective", "optimizer", "checkpoint", "evaluation", "wait", "committed")
_ENGINE_SECONDS = 2.0  # within which an engine replaces a lost agent
_GRACE_SECONDS = 3.0  # from asking a worker to go to killing it
_SUSPENDED_SECONDS = 20.0
_ABSENT_SECONDS = 5 * PATIENCE_SECONDS
_TRIGGER_SECONDS = 4.0  # after which a trigger that has not fired is removed


@final
@dataclass(frozen=True)
class ScheduledFault:
    """One fault. `who` picks one or several of the workers alive then; `lasts`: for how long; 0: for good."""

    at: float
    kind: str
    who: int
    lasts: float = 0.0
    phase: str = ""
    amount: int = 0

    def __str__(self) -> str:
        phase = f" in {self.phase}" if self.phase else ""
        lasts = f" for {self.lasts:.2f} s" if self.lasts else ""
        return f"{self.at:.3f} {self.kind}{phase}{lasts} (who {self.who}, amount {self.amount})"

    @property
    def over_by(self) -> float:
        """Time by which the fault has had all its direct effects."""
        return self.at + self.lasts + KINDS[self.kind].seconds


@final
@dataclass(frozen=True)
class FaultKind:
    """The weight of a kind in the draw, and its effect: on each member that `victims` picks or, without, on
    the world. `lasts`: most of the time it ends after a while. `seconds`: how long its effects take besides
    that."""

    weight: int
    effect: Callable[[World, ScheduledFault, Any], None]
    victims: Callable[[ScheduledFault, Members], Members] | None = None
    lasts: bool = False
    seconds: float = 0.0


def drawn(rng: Random, workers: int) -> tuple[ScheduledFault, ...]:
    """Draw a schedule: none, one, or several faults, sometimes at the same moment."""
    count = rng.choice((0, 1, 1, 2, 3, 4, 5, 6, 8, 12))
    if workers > 64:
        count += rng.randrange(8)
    weights = [kind.weight for kind in KINDS.values()]
    at = 0.0
    faults: list[ScheduledFault] = []
    for _ in range(count):
        # One in four comes while the last one is being repaired.
        at = at + rng.random() * 0.05 if faults and rng.random() < 0.25 else rng.random() * 6.0
        kind = rng.choices(list(KINDS), weights)[0]
        faults.append(
            ScheduledFault(
                at,
                kind,
                rng.randrange(1 << 20),
                lasts=rng.choice((0.1, 0.5, 1.2, 3.0, 8.0))
                if KINDS[kind].lasts and rng.random() < 0.8
                else 0.0,
                phase=rng.choice(PHASES) if kind.endswith("in phase") else "",
                amount=rng.randrange(1 << 20),
            )
        )
    return tuple(sorted(faults, key=lambda fault: fault.at))


def apply(world: World, fault: ScheduledFault) -> None:
    """Apply a fault now."""
    world.note(f"FAULT {fault}")
    kind = KINDS[fault.kind]
    living = [member for member in world.members.values() if member.alive and not member.dismissed]
    if kind.victims is None:
        kind.effect(world, fault, living)
        return
    victims = kind.victims(fault, living)
    world.mark_affected(victims)
    for member in victims:
        kind.effect(world, fault, member)


def _one(fault: ScheduledFault, living: Members) -> Members:
    return [living[fault.who % len(living)]] if living else []


def _several(fault: ScheduledFault, living: Members) -> Members:
    count = min(1 + fault.amount % max(1, len(living) - 1), len(living))
    return [living[(fault.who + offset) % len(living)] for offset in range(count)]


def _all(fault: ScheduledFault, living: Members) -> Members:
    return living


def _deliver_event(world: World, event: events.MachineEvent) -> None:
    """Deliver an event from outside; while there is no supervisor, try again."""
    if world.supervisor.up:
        world.deliver(event)
    else:
        world.time.after(0.3, _deliver_event, world, event)


def _crash(world: World, fault: ScheduledFault, member: SimulatedMember) -> None:
    world.die(member.number, "memory" if fault.kind == "memory" else "crash", "killed")


def _crash_soon(world: World, fault: ScheduledFault, member: SimulatedMember) -> None:
    world.time.after(world.rng.random() * 0.02, world.die, member.number, "crash", "killed with others")


def _set_trigger(world: World, fault: ScheduledFault, member: SimulatedMember) -> None:
    """Apply the fault when the member next enters the phase."""
    trigger = (member.number, fault.phase, partial(_triggered, world, fault, member))
    world.triggers.append(trigger)
    world.time.after(
        _TRIGGER_SECONDS, lambda: world.triggers.remove(trigger) if trigger in world.triggers else None
    )


def _triggered(world: World, fault: ScheduledFault, member: SimulatedMember) -> None:
    world.note(f"TRIGGERED in {fault.phase} of member {member.number}")
    if fault.kind.startswith("crash"):
        world.die(member.number, "crash", f"killed in {fault.phase}")
    else:
        _hang(world, fault, member)


def _hang(world: World, fault: ScheduledFault, member: SimulatedMember) -> None:
    """Stall the training thread; "stop" and "stop all" stop the process."""
    stops = fault.kind.startswith("stop")
    member.stall(stops)
    if fault.lasts:
        world.time.after(fault.lasts, member.resume)
    elif stops:
        world.stopped_for_good(member)


def _stop_all(world: World, fault: ScheduledFault, living: Members) -> None:
    """Stop all processes with SIGSTOP, and later SIGCONT, within a moment and in some order."""
    world.stopped_all_at = world.time.now
    world.stopped_together = {member.number for member in living if not member.stopped}
    world.mark_affected(living)
    for member in living:
        world.time.after(world.rng.random() * 0.05, _hang, world, fault, member)


def _hold_interpreter(world: World, fault: ScheduledFault, member: SimulatedMember) -> None:
    """Let a call hold the interpreter lock (GIL)."""
    if member.stopped:
        return
    member.stall(stopped=True)
    member.holds_gil = True
    if fault.lasts:
        world.time.after(fault.lasts, member.resume)


def _slow(world: World, fault: ScheduledFault, member: SimulatedMember) -> None:
    member.factor = 2.0 + fault.amount % 4
    if fault.lasts:
        world.time.after(fault.lasts, setattr, member, "factor", 1.0)


def _cut_connection(world: World, fault: ScheduledFault, member: SimulatedMember) -> None:
    if member.path.up:
        member.lose_connection(min(fault.lasts, 3.0) + 0.02)


def _partition(world: World, fault: ScheduledFault, member: SimulatedMember) -> None:
    """Block the connection to the supervisor, in both directions or in one; half the time it then breaks."""
    until = world.time.now + (fault.lasts or 1.0)
    if fault.kind != "one way down":
        member.path.blocked_up = max(member.path.blocked_up, until)
    if fault.kind != "one way up":
        member.path.blocked_down = max(member.path.blocked_down, until)
    if fault.amount % 2:
        world.time.at(until, _break_connection, member)


def _break_connection(member: SimulatedMember) -> None:
    if member.alive and member.path.up:
        member.lose_connection(0.05)


def _cut_link(world: World, fault: ScheduledFault, living: Members) -> None:
    """Cut the link between two members, or between one member and all others."""
    if len(living) < 2:
        return
    first = fault.who % len(living)
    one = living[first]
    others = living[:first] + living[first + 1 :]
    if fault.kind != "isolate":
        others = [others[fault.amount % len(others)]]
    world.mark_affected([one, *others] if fault.kind != "isolate" else [one])
    until = world.time.now + (fault.lasts or 1.0)
    for other in others:
        world.network.cut_links[one.number, other.number] = until
        if fault.kind != "one way link":
            world.network.cut_links[other.number, one.number] = until


def _packet_loss(world: World, fault: ScheduledFault, living: Members) -> None:
    world.all_affected = True
    world.network.loss, world.network.delay = 0.3, 0.02
    world.time.after(fault.lasts or 1.0, world.network.calm)


def _supervisor_crash(world: World, fault: ScheduledFault, living: Members) -> None:
    """Crash the supervisor at once, or in the middle of the actions of a later decision."""
    if not world.supervisor.up:
        return
    if fault.amount % 3 == 0:
        world.crashed()
        return
    world.supervisor.crash_after = fault.amount % 5
    world.time.after(1.0, _crash_at_last, world)


def _crash_at_last(world: World) -> None:
    if world.supervisor.up and world.supervisor.crash_after is not None:
        world.crashed()


def _supervisor_absent(world: World, fault: ScheduledFault, living: Members) -> None:
    """Crash the supervisor, and start the next one only after a while, or after all members have left. One
    time in three the run is started again, and that start waits for them."""
    if world.supervisor.up:
        world.started_again = fault.amount % 3 == 0
        world.crashed(fault.lasts or _ABSENT_SECONDS)


def _supervisor_stall(world: World, fault: ScheduledFault, living: Members) -> None:
    world.supervisor.stall(fault.lasts or 5.0)


def _suspend(world: World, fault: ScheduledFault, living: Members) -> None:
    for member in living:
        member.slept(_SUSPENDED_SECONDS)
        member.path.blocked_up += _SUSPENDED_SECONDS if member.path.blocked_up else 0.0
        member.path.blocked_down += _SUSPENDED_SECONDS if member.path.blocked_down else 0.0
    world.last_commit += _SUSPENDED_SECONDS
    world.time.suspend(_SUSPENDED_SECONDS)
    world.supervisor.suspended(_SUSPENDED_SECONDS)


def _agent_joins(world: World, fault: ScheduledFault, living: Members) -> None:
    """Let a host join. An unreachable one reaches the control port and nothing else, or no other host reaches
    it: for a while or for good. The members must not notice."""
    agent_id = 1 + len(world.agents) + len(world.gone_agents)
    if fault.kind.startswith("blocked"):
        others = [LOCAL_AGENT, *world.agents]
        blocked_routes = {(agent_id, other) for other in others} if fault.amount % 3 else set()
        blocked_routes |= {(other, agent_id) for other in others} if fault.amount % 3 != 1 else set()
        world.network.blocked_routes |= blocked_routes
        if fault.lasts:
            world.time.after(fault.lasts, world.network.blocked_routes.difference_update, blocked_routes)
    world.agents[agent_id] = 1 + fault.amount % 3
    _deliver_event(world, events.AgentJoined(agent_id, world.agents[agent_id], f"host{agent_id}"))


def start_agent(world: World) -> None:
    """Let an agent of the engine join, unless all nodes have one."""
    if len(world.agents) >= world.plan.nodes:
        return
    agent_id = 1 + len(world.agents) + len(world.gone_agents)
    world.agents[agent_id] = world.workers // world.plan.nodes
    _deliver_event(world, events.AgentJoined(agent_id, world.agents[agent_id], f"host{agent_id}"))


def _agent_lost(world: World, fault: ScheduledFault, living: Members) -> None:
    """Cut a host off: its workers end, or continue where no other process reaches them."""
    if not world.agents:
        return
    agent_id = sorted(world.agents)[fault.who % len(world.agents)]
    del world.agents[agent_id]
    world.gone_agents.add(agent_id)
    lost = [member for member in living if member.agent_id == agent_id]
    world.mark_affected(lost)
    until = world.time.now + 30.0
    for member in lost:
        if fault.amount % 2:
            world.die(member.number, "crash", "its host is gone")
            continue
        member.path.blocked_up = member.path.blocked_down = until
        for other in living:
            if other.agent_id != agent_id:
                world.network.cut_links[other.number, member.number] = until
                world.network.cut_links[member.number, other.number] = until
    world.time.after(0.5, _deliver_event, world, events.AgentLost(agent_id, "the connection is closed"))
    if world.plan.nodes:
        world.time.after(_ENGINE_SECONDS, start_agent, world)


def _scale(world: World, fault: ScheduledFault, living: Members) -> None:
    _deliver_event(world, events.ScaleRequested(1 + fault.amount % (world.workers + world.workers // 2 + 1)))


def _leave(world: World, fault: ScheduledFault, member: SimulatedMember) -> None:
    member.feed(LeaveRequested("SIGTERM"))
    world.time.after(_GRACE_SECONDS, world.die, member.number, "preempted", "killed after its grace")


def _raise(world: World, fault: ScheduledFault, member: SimulatedMember) -> None:
    if fault.kind == "raise always":
        step = min(world.plan.steps - 1, world.invariants.steps + 2)
        world.raise_always.add((step, fault.amount % world.plan.settings.shards))
    else:
        world.raise_next[member.number] = "user" if fault.kind == "raise user" else "code"


def _turn_bad(world: World, fault: ScheduledFault, member: SimulatedMember) -> None:
    member.turns_bad = True


def _damage(world: World, fault: ScheduledFault, member: SimulatedMember) -> None:
    # A member to which all peers look damaged counts as the faulty one: so most must not be.
    living = [one for one in world.members.values() if one.alive]
    damaged = sum(one.damages for one in living)
    member.damages = not damaged or len(living) - damaged > 4


def _bad_start(world: World, fault: ScheduledFault, living: Members) -> None:
    world.bad_starts += 1 + fault.amount % 3


def _stop_job(world: World, fault: ScheduledFault, living: Members) -> None:
    world.stop_requested = True
    _deliver_event(world, events.StopRequested("enough"))


KINDS: dict[str, FaultKind] = {
    "crash": FaultKind(10, _crash, _one),
    "crash in phase": FaultKind(14, _set_trigger, _one, seconds=_TRIGGER_SECONDS),
    "crash of many": FaultKind(4, _crash_soon, _several),
    "crash of all": FaultKind(1, _crash, _all),
    "memory": FaultKind(2, _crash, _one),
    "hang": FaultKind(4, _hang, _one, lasts=True),
    "hang in phase": FaultKind(5, _set_trigger, _one, lasts=True, seconds=_TRIGGER_SECONDS),
    "stop": FaultKind(4, _hang, _one, lasts=True),
    "stop all": FaultKind(2, _stop_all, lasts=True),
    "hold interpreter": FaultKind(4, _hold_interpreter, _one, lasts=True),
    "slow": FaultKind(4, _slow, _one, lasts=True),
    "cut connection": FaultKind(5, _cut_connection, _one, lasts=True),
    "partition": FaultKind(4, _partition, _several, lasts=True),
    "one way up": FaultKind(3, _partition, _one, lasts=True),
    "one way down": FaultKind(3, _partition, _one, lasts=True),
    "cut link": FaultKind(4, _cut_link, lasts=True),
    "one way link": FaultKind(3, _cut_link, lasts=True),
    "isolate": FaultKind(2, _cut_link, lasts=True),
    "packet loss": FaultKind(3, _packet_loss, lasts=True),
    "supervisor crash": FaultKind(6, _supervisor_crash, seconds=4.0),
    "supervisor absent": FaultKind(3, _supervisor_absent, lasts=True, seconds=_ABSENT_SECONDS),
    "supervisor stall": FaultKind(2, _supervisor_stall, lasts=True),
    "suspend": FaultKind(2, _suspend, seconds=_SUSPENDED_SECONDS),
    "agent joins": FaultKind(4, _agent_joins),
    "blocked agent comes": FaultKind(3, _agent_joins, lasts=True),
    "agent lost": FaultKind(3, _agent_lost, seconds=1.0),
    "scale": FaultKind(5, _scale),
    "leave": FaultKind(5, _leave, _one, seconds=_GRACE_SECONDS),
    "leave all": FaultKind(1, _leave, _all, seconds=_GRACE_SECONDS),
    "raise once": FaultKind(3, _raise, _one),
    "raise always": FaultKind(1, _raise, _one),
    "raise user": FaultKind(1, _raise, _one),
    "dissent": FaultKind(2, _turn_bad, _one),
    "damaged data": FaultKind(2, _damage, _one),
    "bad start": FaultKind(3, _bad_start),
    "stop job": FaultKind(1, _stop_job),
}
"""Up is from a member to the supervisor; a link is between members."""
