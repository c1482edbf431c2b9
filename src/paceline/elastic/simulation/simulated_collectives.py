"""Simulated collectives: each member of a view contributes, and receives what all have contributed.

When a member is gone, stuck or has left after all have contributed, each of the others either has its part
already or waits for ever. That is drawn for each, so that a collective ends for some and not for others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol, final

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
    def broke(
        self, collective: SimulatedCollective, accused: tuple[int, ...], unreachable: tuple[int, ...]
    ) -> None: ...


@final
@dataclass(eq=False)
class SimulatedCollective:
    """One collective of one view. `blocked`: the members that wait for ever, and for which."""

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

    def resumed(self) -> None:
        """Handle a member that was stuck and continues: the others receive its part."""
        if self.full:
            unfinished = [peer for peer in self.members if peer not in self.finished]
            for peer in sorted(self.blocked) or unfinished:
                self.tools.time.after(self.tools.delay(), self._finish, peer)
            self.blocked.clear()

    def _share(self) -> None:
        tools = self.tools
        liars = tuple(sorted(self.damaged))
        parties = map(tools.find, self.members)
        absent = [party.number for party in parties if party.stuck or party.collective is not self]
        for number in self.members:
            if liars and number not in liars:
                tools.time.after(tools.delay(), self._found_damaged, number, liars)
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
                tools.time.at(now + _break_after, self._gave_up, number, away)
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

    def _gave_up(self, number: int, away: tuple[int, ...]) -> None:
        party = self.tools.find(number)
        if party.collective is self and number not in self.finished and not party.stuck:
            party.broke(self, (), away)

    def _found_damaged(self, number: int, liars: tuple[int, ...]) -> None:
        party = self.tools.find(number)
        if party.collective is self and not party.stuck:
            party.broke(self, liars, ())


@final
@dataclass(eq=False)
class SimulatedCollectives:
    """All collectives of a run, by purpose."""

    time: VirtualTime
    rng: Random
    network: NetworkConditions
    find: Callable[[int], Participant]
    _collectives: dict[Hashable, SimulatedCollective] = field(default_factory=dict)

    def of(self, key: Hashable, members: tuple[int, ...]) -> SimulatedCollective:
        """Return the collective of this name; the first member opens it."""
        found = self._collectives.get(key)
        if found is None:
            found = self._collectives[key] = SimulatedCollective(members, self)
        return found

    def delay(self) -> float:
        return self.network.delay * (0.2 + self.rng.random())
