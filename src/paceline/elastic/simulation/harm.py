"""Faults done to the world: each kind has one function here.

Must not know the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from paceline.elastic.model import HOME, AgentCame, AgentLost, Event, ScaleAsked, StopAsked
from paceline.elastic.simulation.faults import Fault
from paceline.elastic.simulation.member import Member
from paceline.elastic.simulation.process import Process

if TYPE_CHECKING:
    from paceline.elastic.simulation.world import World

_grace = 3.0  # from asking a worker to go to killing it
_suspended = 20.0


@final
@dataclass(frozen=True)
class Trap:
    """Springs when this member next enters the phase."""

    member: int
    phase: str
    fault: Fault


def over_by(fault: Fault) -> float:
    """When a fault has done all it does by itself. Traps are taken away after a while."""
    extra = {
        "leave": _grace,
        "leave all": _grace,
        "coordinator crash": 4.0,
        "agent goes": 1.0,
        "crash in phase": 4.0,
        "hang in phase": 4.0,
        "suspend": _suspended,
    }
    return fault.at + fault.lasts + extra.get(fault.kind, 0.0)


def apply(world: World, fault: Fault) -> None:
    """It happens now."""
    world.note(f"FAULT {fault}")
    living = [m for m in world.members.values() if m.alive and not m.dismissed]
    _harms[fault.kind](world, fault, living)


def spring(world: World, member: Process, phase: str) -> None:
    """A member enters a phase: perhaps something was waiting there."""
    for trap in world.traps:
        if trap.member == member.number and trap.phase == phase:
            world.traps.remove(trap)
            world.time.after(world.rng.random() * 0.003, _sprung, world, trap)
            return


def _sprung(world: World, trap: Trap) -> None:
    member = world.members[trap.member]
    world.note(f"TRAP in {trap.phase} of member {member.number}")
    if trap.fault.kind.startswith("crash"):
        world.die(member.number, "crash", f"killed in {trap.phase}")
    else:
        _stall(world, member, trap.fault.lasts, stopped=False)


def _one(fault: Fault, living: list[Member]) -> list[Member]:
    return [living[fault.who % len(living)]] if living else []


def _several(world: World, fault: Fault, living: list[Member]) -> list[Member]:
    if not living:
        return []
    count = 1 + fault.amount % max(1, len(living) - 1)
    first = fault.who % len(living)
    return [living[(first + offset) % len(living)] for offset in range(min(count, len(living)))]


def _touch(world: World, members: list[Member]) -> list[Member]:
    world.touched.update(member.number for member in members)
    return members


def _tell(world: World, event: Event) -> None:
    """From outside: tries again while there is no supervisor."""
    if world.coordinator.up:
        world.hear(event)
    else:
        world.time.after(0.3, _tell, world, event)


def _crash(world: World, fault: Fault, living: list[Member]) -> None:
    for member in _touch(world, _one(fault, living)):
        world.die(member.number, "memory" if fault.kind == "memory" else "crash", "killed")


def _crash_many(world: World, fault: Fault, living: list[Member]) -> None:
    for member in _touch(world, _several(world, fault, living)):
        world.time.after(world.rng.random() * 0.02, world.die, member.number, "crash", "killed with others")


def _crash_all(world: World, fault: Fault, living: list[Member]) -> None:
    for member in _touch(world, living):
        world.die(member.number, "crash", "killed with all")


def _trap(world: World, fault: Fault, living: list[Member]) -> None:
    for member in _touch(world, _one(fault, living)):
        trap = Trap(member.number, fault.phase, fault)
        world.traps.append(trap)
        world.time.after(4.0, _take_away, world, trap)


def _take_away(world: World, trap: Trap) -> None:
    if trap in world.traps:
        world.traps.remove(trap)


def _stall(world: World, member: Member, lasts: float, stopped: bool) -> None:
    member.stall(stopped)
    if lasts:
        world.time.after(lasts, member.go_on)
    elif stopped:
        world.stopped_for_good(member)


def _hang(world: World, fault: Fault, living: list[Member]) -> None:
    for member in _touch(world, _one(fault, living)):
        _stall(world, member, fault.lasts, stopped=fault.kind == "stop")


def _stop_all(world: World, fault: Fault, living: list[Member]) -> None:
    """By one hand, SIGSTOP and later SIGCONT: in a moment, in some order."""
    world.stopped_all_at = world.time.now
    world.stopped_by_hand = {member.number for member in living if not member.stopped}
    for member in _touch(world, living):
        world.time.after(world.rng.random() * 0.05, _stall, world, member, fault.lasts, True)


def _grip(world: World, fault: Fault, living: list[Member]) -> None:
    for member in _touch(world, _one(fault, living)):
        if member.stopped:
            continue
        member.stall(stopped=True)
        member.gripped = True
        if fault.lasts:
            world.time.after(fault.lasts, member.go_on)


def _slow(world: World, fault: Fault, living: list[Member]) -> None:
    for member in _touch(world, _one(fault, living)):
        member.factor = 2.0 + fault.amount % 4
        if fault.lasts:
            world.time.after(fault.lasts, setattr, member, "factor", 1.0)


def _cut_line(world: World, fault: Fault, living: list[Member]) -> None:
    for member in _touch(world, _one(fault, living)):
        if member.line.up:
            member.lose_line(min(fault.lasts, 3.0) + 0.02)


def _partition(world: World, fault: Fault, living: list[Member]) -> None:
    """Members and supervisor do not hear each other, both ways or one way; then perhaps the line breaks."""
    until = world.time.now + (fault.lasts or 1.0)
    members = _several(world, fault, living) if fault.kind == "partition" else _one(fault, living)
    for member in _touch(world, members):
        if fault.kind != "one way down":
            member.line.blocked_up = max(member.line.blocked_up, until)
        if fault.kind != "one way up":
            member.line.blocked_down = max(member.line.blocked_down, until)
        if fault.amount % 2:
            world.time.at(until, _break_line, member)


def _break_line(member: Member) -> None:
    if member.alive and member.line.up:
        member.lose_line(0.05)


def _cut_link(world: World, fault: Fault, living: list[Member]) -> None:
    """Members do not reach each other: two of them, or one and all others."""
    if len(living) < 2:
        return
    first = fault.who % len(living)
    one = living[first]
    others = living[:first] + living[first + 1 :]
    if fault.kind != "isolate":
        others = [others[fault.amount % len(others)]]
    _touch(world, [one, *others] if fault.kind != "isolate" else [one])
    until = world.time.now + (fault.lasts or 1.0)
    for other in others:
        world.weather.cut_links[one.number, other.number] = until
        if fault.kind != "one way link":
            world.weather.cut_links[other.number, one.number] = until


def _packet_loss(world: World, fault: Fault, living: list[Member]) -> None:
    world.anyone = True
    world.weather.loss = 0.3
    world.weather.delay = 0.02
    world.time.after(fault.lasts or 1.0, _calm, world)


def _calm(world: World) -> None:
    world.weather.loss = 0.01
    world.weather.delay = 0.001


def _coordinator_crash(world: World, fault: Fault, living: list[Member]) -> None:
    """At once, or in the middle of the actions of a later decision."""
    if not world.coordinator.up:
        return
    if fault.amount % 3 == 0:
        world.crashed()
        return
    world.coordinator.crash_after = fault.amount % 5
    world.time.after(1.0, _crash_at_last, world)


def _crash_at_last(world: World) -> None:
    if world.coordinator.up and world.coordinator.crash_after is not None:
        world.crashed()


def _coordinator_stall(world: World, fault: Fault, living: list[Member]) -> None:
    world.coordinator.stall(fault.lasts or 5.0)


def _suspend(world: World, fault: Fault, living: list[Member]) -> None:
    for member in living:
        member.slept(_suspended)
    for member in living:
        member.line.blocked_up += _suspended if member.line.blocked_up else 0.0
        member.line.blocked_down += _suspended if member.line.blocked_down else 0.0
    world.last_commit += _suspended
    world.time.suspend(_suspended)
    world.coordinator.suspended(_suspended)


def _agent_comes(world: World, fault: Fault, living: list[Member]) -> None:
    place = 1 + len(world.agents) + len(world.gone_agents)
    world.agents[place] = 1 + fault.amount % 3
    _tell(world, AgentCame(place, world.agents[place], f"host{place}"))


def _walled_agent_comes(world: World, fault: Fault, living: list[Member]) -> None:
    """A machine that reaches the control port and nothing else, or that nobody else reaches: for a while or
    for good. The others must not notice."""
    place = 1 + len(world.agents) + len(world.gone_agents)
    others = [HOME, *world.agents]
    walls = {(place, other) for other in others} if fault.amount % 3 else set()
    walls |= {(other, place) for other in others} if fault.amount % 3 != 1 else set()
    world.weather.walls |= walls
    if fault.lasts:
        world.time.after(fault.lasts, world.weather.walls.difference_update, walls)
    _agent_comes(world, fault, living)


def _agent_goes(world: World, fault: Fault, living: list[Member]) -> None:
    """A machine is lost: its workers end, or live on where nobody reaches them."""
    if not world.agents:
        return
    place = sorted(world.agents)[fault.who % len(world.agents)]
    del world.agents[place]
    world.gone_agents.add(place)
    for member in _touch(world, [m for m in living if m.place == place]):
        if fault.amount % 2:
            world.die(member.number, "crash", "its machine is gone")
        else:
            member.line.blocked_up = member.line.blocked_down = world.time.now + 30.0
            for other in living:
                if other.place != place:
                    world.weather.cut_links[other.number, member.number] = world.time.now + 30.0
                    world.weather.cut_links[member.number, other.number] = world.time.now + 30.0
    world.time.after(0.5, _tell, world, AgentLost(place, "the connection is closed"))


def _scale(world: World, fault: Fault, living: list[Member]) -> None:
    _tell(world, ScaleAsked(1 + fault.amount % (world.workers + world.workers // 2 + 1)))


def _leave(world: World, fault: Fault, living: list[Member]) -> None:
    members = living if fault.kind == "leave all" else _one(fault, living)
    for member in _touch(world, members):
        member.leave("SIGTERM")
        world.time.after(_grace, world.die, member.number, "preempted", "killed after its grace")


def _raise(world: World, fault: Fault, living: list[Member]) -> None:
    for member in _touch(world, _one(fault, living)):
        if fault.kind == "raise always":
            step = min(world.plan.steps - 1, world.truth.steps + 2)
            world.raise_always.add((step, fault.amount % world.plan.settings.shards))
        else:
            world.raise_next[member.number] = "user" if fault.kind == "raise user" else "code"


def _dissent(world: World, fault: Fault, living: list[Member]) -> None:
    for member in _touch(world, _one(fault, living)):
        member.turns_bad = True


def _damage(world: World, fault: Fault, living: list[Member]) -> None:
    for member in _touch(world, _one(fault, living)):
        member.damages = True


def _bad_start(world: World, fault: Fault, living: list[Member]) -> None:
    world.bad_starts += 1 + fault.amount % 3


def _stop_job(world: World, fault: Fault, living: list[Member]) -> None:
    _tell(world, StopAsked("enough"))


_harms: dict[str, Callable[[World, Fault, list[Member]], None]] = {
    "crash": _crash,
    "crash in phase": _trap,
    "crash of many": _crash_many,
    "crash of all": _crash_all,
    "memory": _crash,
    "hang": _hang,
    "hang in phase": _trap,
    "stop": _hang,
    "stop all": _stop_all,
    "grip": _grip,
    "slow": _slow,
    "cut line": _cut_line,
    "partition": _partition,
    "one way up": _partition,
    "one way down": _partition,
    "cut link": _cut_link,
    "one way link": _cut_link,
    "isolate": _cut_link,
    "packet loss": _packet_loss,
    "coordinator crash": _coordinator_crash,
    "coordinator stall": _coordinator_stall,
    "suspend": _suspend,
    "agent comes": _agent_comes,
    "walled agent comes": _walled_agent_comes,
    "agent goes": _agent_goes,
    "scale": _scale,
    "leave": _leave,
    "leave all": _leave,
    "raise once": _raise,
    "raise always": _raise,
    "raise user": _raise,
    "dissent": _dissent,
    "damaged data": _damage,
    "bad start": _bad_start,
    "stop job": _stop_job,
}
