"""Simulated collectives: each member of a view contributes, and receives what all have contributed.

When a member is gone, stuck or has left after all have contributed, each of the others either has its part
already or waits for ever. That is drawn for each, so that a collective ends for some and not for others. A
member that leaves an open group closes it: the others fail as soon as they wait in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol, final

from paceline.control.messages import CollectiveFailed, View
from paceline.elastic.simulation.network import NetworkConditions
from paceline.elastic.simulation.virtual_time import VirtualTime

_break_after = 1.0  # a member whose peer cannot be reached for so long gives up


class Participant(Protocol):
    """A member, as a collective knows it."""

    number: int
    collective: SimulatedCollective | None

    @property
    def stuck(self) -> bool: ...
    def completed(self, collective: SimulatedCollective) -> None: ...
    def broke(self, accused: tuple[int, ...], unreachable: tuple[int, ...]) -> None: ...


@final
@dataclass(eq=False)
class SimulatedCollective:
    """One collective of one view. `blocked`: the members that wait for ever, and for which."""

    generation: int
    members: tuple[int, ...]
    tools: SimulatedCollectives
    brought: dict[int, Any] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    blocked: dict[int, tuple[int, ...]] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)
    result: Any = None

    @property
    def full(self) -> bool:
        return len(self.brought) == len(self.members)

    def bring(self, party: Participant, what: Any, damaged: bool = False) -> None:
        """Add the contribution of a member. `damaged`: the others' checksums will not match."""
        party.collective = self
        self.brought[party.number] = what
        if damaged:
            self.damaged.add(party.number)
        if self.full:
            self._share()
        self.fail_if_closed(party.number)

    def fail_if_closed(self, number: int) -> None:
        """Let a member that waits here fail soon, if another one has closed the group."""
        closed = self.tools.closed.get(self.generation)
        if closed is not None:
            self.tools.time.after(self.tools.delay(), self._break, number, *closed)

    def waits_for(self, number: int) -> tuple[int, ...]:
        """Return the members that this one waits for."""
        if not self.full:
            return tuple(peer for peer in self.members if peer not in self.brought)
        return self.blocked.get(number, ())

    def upset(self, number: int) -> None:
        """Handle a member that died, got stuck or left: members that lack its part wait."""
        if self.full:
            for peer in self.members:
                if peer != number and peer not in self.finished and self.tools.rng.random() < 0.5:
                    self.blocked[peer] = (*self.blocked.get(peer, ()), number)

    def resumed(self, number: int) -> None:
        """Handle a member that was stuck and continues: the others receive its part."""
        if self.full:
            unfinished = [peer for peer in self.members if peer not in self.finished]
            for peer in sorted(self.blocked) or unfinished:
                self.tools.time.after(self.tools.delay(), self._finish, peer)
            self.blocked.clear()
        self.fail_if_closed(number)

    def _share(self) -> None:
        tools = self.tools
        liars = tuple(sorted(self.damaged))
        parties = map(tools.find, self.members)
        absent = [party.number for party in parties if party.stuck or party.collective is not self]
        for number in self.members:
            if liars and number not in liars:
                tools.time.after(tools.delay(), self._break, number, liars, ())
                continue
            others = tuple(other for other in absent if other != number)
            if others and tools.rng.random() < 0.5:
                self.blocked[number] = others
                continue
            tools.time.at(self._reached(number), self._finish, number)

    def _reached(self, number: int) -> float:
        """Return when all parts have reached this member; it gives up where that takes too long."""
        tools = self.tools
        now = tools.time.now
        if tools.network.cut_links:
            late = tools.network.unreachable(number, self.members, now)
            latest = max(late.values(), default=now)
            if latest > now + _break_after:
                away = tuple(n for n, at in late.items() if at > now + _break_after)
                self.blocked[number] = away
                tools.time.at(now + _break_after, self._break, number, (), away)
            return latest + tools.delay()
        return now + tools.delay()

    def _finish(self, number: int) -> None:
        party = self.tools.find(number)
        if number in self.blocked or number in self.finished or party.collective is not self:
            return
        if party.stuck:
            # It receives the result when it continues.
            self.blocked[number] = ()
            return
        self.finished.add(number)
        party.completed(self)

    def _break(self, number: int, accused: tuple[int, ...], unreachable: tuple[int, ...]) -> None:
        party = self.tools.find(number)
        if party.collective is self and not party.stuck:
            party.broke(accused, unreachable)


@final
@dataclass(eq=False)
class SimulatedCollectives:
    """All collectives of a run, by generation and purpose. `closed`: the groups that a member has left, by
    generation, with the members that it accused and those that it did not reach."""

    time: VirtualTime
    rng: Random
    network: NetworkConditions
    find: Callable[[int], Participant]
    closed: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    _collectives: dict[tuple[int, str], SimulatedCollective] = field(default_factory=dict)

    def of(self, generation: int, what: str, members: tuple[int, ...]) -> SimulatedCollective:
        """Return the collective of this name; the first member opens it."""
        found = self._collectives.get((generation, what))
        if found is None:
            found = self._collectives[generation, what] = SimulatedCollective(generation, members, self)
        return found

    def close(self, view: View, number: int, failure: CollectiveFailed | None) -> None:
        """Close the group of a member that leaves it: its peers find what it found, or that it failed."""
        if view.generation in self.closed:
            return
        accused, unreachable = (failure.accused, failure.unreachable) if failure is not None else ((), ())
        self.closed[view.generation] = accused, unreachable or (() if accused else (number,))
        for peer in map(self.find, view.members):
            if peer.collective is not None and peer.collective.generation == view.generation:
                peer.collective.fail_if_closed(peer.number)

    def delay(self) -> float:
        return self.network.delay * (0.2 + self.rng.random())
