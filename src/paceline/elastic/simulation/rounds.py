"""Collectives: everybody of a view brings something, and gets everybody's.

When somebody is gone, stuck or has left after all had brought theirs, each of the others has its part already
or waits for ever: a coin decides for each, so a collective ends for some and not for others. Must not know
what is brought.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from random import Random
from typing import Any, Protocol, final

from paceline.elastic.simulation.network import Weather
from paceline.elastic.simulation.timeline import Timeline

_break_after = 1.0  # a member whose peer cannot be reached for so long gives up


class Party(Protocol):
    """A member, as a collective knows it."""

    number: int
    round: Round | None

    @property
    def stuck(self) -> bool: ...
    def completed(self, round: Round) -> None: ...
    def broke(self, round: Round, accused: tuple[int, ...], unreachable: tuple[int, ...]) -> None: ...


@final
class Round:
    """One collective of one view."""

    def __init__(self, members: tuple[int, ...], find: Callable[[int], Party], tools: Rounds):
        self.members = members
        self.brought: dict[int, Any] = {}
        self.finished: set[int] = set()
        self.blocked: dict[int, tuple[int, ...]] = {}  # who waits for ever, and for whom
        self.damaged: set[int] = set()
        self.result: Any = None
        self.votes: frozenset[int] = frozenset()  # told by those who brought something, once all have
        self._find = find
        self._tools = tools

    @property
    def full(self) -> bool:
        return len(self.brought) == len(self.members)

    def bring(self, party: Party, what: Any, damaged: bool = False) -> None:
        """A member is here. `damaged`: the others' checksums will not match."""
        party.round = self
        self.brought[party.number] = what
        if damaged:
            self.damaged.add(party.number)
        if self.full:
            self._share()

    def waits_for(self, number: int) -> tuple[int, ...]:
        """Whom this member waits for."""
        if not self.full:
            return tuple(peer for peer in self.members if peer not in self.brought)
        return self.blocked.get(number, ())

    def upset(self, number: int) -> None:
        """A member died, got stuck or left: who has not its part waits."""
        if self.full:
            for peer in self.members:
                if peer != number and peer not in self.finished and self._tools.rng.random() < 0.5:
                    self.blocked[peer] = (*self.blocked.get(peer, ()), number)

    def resumed(self) -> None:
        """A member that was stuck goes on, and the others get its part."""
        if self.full and self.blocked:
            for peer in sorted(self.blocked):
                self._tools.time.after(self._tools.delay(), self._finish, peer)
            self.blocked.clear()
        elif self.full:
            for peer in self.members:
                if peer not in self.finished:
                    self._tools.time.after(self._tools.delay(), self._finish, peer)

    def _absent(self, number: int) -> bool:
        party = self._find(number)
        return party.stuck or party.round is not self

    def _share(self) -> None:
        tools = self._tools
        liars = tuple(sorted(self.damaged))
        absent = [number for number in self.members if self._absent(number)]
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
        """When all parts have come to this member; it gives up waiting when that takes too long."""
        tools = self._tools
        now = tools.time.now
        if tools.weather.cut_links:
            late = tools.weather.unreachable(number, self.members, now)
            latest = max(late.values(), default=now)
            if latest > now + _break_after:
                away = tuple(n for n, at in late.items() if at > now + _break_after)
                self.blocked[number] = away
                tools.time.at(now + _break_after, self._gave_up, number, away)
            return latest + tools.delay()
        return now + tools.delay()

    def _finish(self, number: int) -> None:
        party = self._find(number)
        if number in self.blocked or number in self.finished or party.round is not self:
            return
        if party.stuck:
            # It gets it when it goes on.
            self.blocked[number] = ()
            return
        self.finished.add(number)
        party.completed(self)

    def _gave_up(self, number: int, away: tuple[int, ...]) -> None:
        party = self._find(number)
        if party.round is self and number not in self.finished and not party.stuck:
            party.broke(self, (), away)

    def _found_damaged(self, number: int, liars: tuple[int, ...]) -> None:
        party = self._find(number)
        if party.round is self and not party.stuck:
            party.broke(self, liars, ())


@final
class Rounds:
    """All collectives of a run, by what they are for."""

    def __init__(self, time: Timeline, rng: Random, weather: Weather, find: Callable[[int], Party]):
        self.time = time
        self.rng = rng
        self.weather = weather
        self._find = find
        self._rounds: dict[Hashable, Round] = {}

    def of(self, key: Hashable, members: tuple[int, ...]) -> Round:
        """The collective of this name; the first to come opens it."""
        found = self._rounds.get(key)
        if found is None:
            found = self._rounds[key] = Round(members, self._find, self)
        return found

    def delay(self) -> float:
        return self.weather.delay * (0.2 + self.rng.random())
