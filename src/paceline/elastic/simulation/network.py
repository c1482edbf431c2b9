"""The lines between members and supervisor, and between members.

A control line behaves as TCP does: in order, late, later when packets are lost; when it is cut, what is on
its way is gone, and the member connects again. Messages to the supervisor may come twice. Lines of different
members know nothing of each other, so their messages overtake. A line can be blocked in one direction or
both; what was sent meanwhile comes when it is free again. Must not know the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random
from typing import Any, final

from paceline.elastic.simulation.timeline import Timeline

MIN_RTO = 0.2


@final
@dataclass
class Weather:
    """How the network is."""

    delay: float = 0.001
    loss: float = 0.01
    twice: float = 0.01
    cut_links: dict[tuple[int, int], float] = field(default_factory=dict)
    walls: set[tuple[int, int]] = field(default_factory=set)
    """From which place to which no connection can be made; those that are there stay."""

    def unreachable(self, receiver: int, senders: Collection[int], now: float) -> dict[int, float]:
        """Whose data does not get to a member now, and when it does."""
        return {
            sender: until
            for (sender, to), until in self.cut_links.items()
            if to == receiver and until > now and sender in senders
        }


@final
class Line:
    """One member's control line. `epoch` counts connections: what belongs to an earlier one is gone."""

    def __init__(self, time: Timeline, rng: Random, weather: Weather):
        self._time = time
        self._rng = rng
        self._weather = weather
        self.up = False
        self.epoch = 0
        self.blocked_up = self.blocked_down = 0.0
        self._last_up = self._last_down = 0.0

    def connect(self) -> None:
        self.up = True
        self.epoch += 1

    def cut(self) -> None:
        """Both directions are lost, with all that is on its way."""
        self.up = False
        self.epoch += 1

    def send_up(self, repeats: bool, deliver: Callable[..., None], *args: Any) -> None:
        """From the member to the supervisor. `repeats`: a member that is not sure may say it twice."""
        if not self.up:
            return
        when = max(self._last_up, self.blocked_up + MIN_RTO if self.blocked_up else 0.0, self._arrival())
        self._last_up = when
        self._time.at(when, self._deliver, self.epoch, deliver, args)
        if repeats and self._rng.random() < self._weather.twice:
            # Not in order: a repetition is known by its content only.
            self._time.at(when + self._rng.random() * 2, deliver, *args)

    def send_down(self, deliver: Callable[..., None], *args: Any) -> None:
        """From the supervisor to the member."""
        if not self.up:
            return
        when = max(
            self._last_down, self.blocked_down + MIN_RTO if self.blocked_down else 0.0, self._arrival()
        )
        self._last_down = when
        self._time.at(when, self._deliver, self.epoch, deliver, args)

    def _arrival(self) -> float:
        delay = self._weather.delay * (0.5 + self._rng.random())
        while self._rng.random() < self._weather.loss:
            delay += MIN_RTO
        return self._time.now + delay

    def _deliver(self, epoch: int, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        if epoch == self.epoch:
            deliver(*args)
