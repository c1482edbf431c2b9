"""The control connections between members and the supervisor, and the links between members.

A control connection behaves as TCP does: in order, late, later when packets are lost; when it is cut, what is
on its way is gone, and the member connects again. Messages to the supervisor may come twice. Connections of
different members are independent, so their messages overtake. A connection can be blocked in one direction or
both; what was sent meanwhile arrives when it is free again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random
from typing import Any, final

from paceline.elastic.simulation.virtual_time import VirtualTime

MIN_RTO = 0.2


@final
@dataclass
class NetworkConditions:
    """Delay, loss, duplicates and broken links of the network."""

    delay: float = 0.001
    loss: float = 0.01
    twice: float = 0.01
    cut_links: dict[tuple[int, int], float] = field(default_factory=dict)
    blocked_routes: set[tuple[int, int]] = field(default_factory=set)
    """(from, to) pairs of hosts between which no new connection can be made; existing ones stay."""

    def calm(self) -> None:
        """Return to the usual loss and delay."""
        self.loss, self.delay = 0.01, 0.001

    def unreachable(self, receiver: int, senders: Collection[int], now: float) -> dict[int, float]:
        """Return the senders whose data cannot reach a member now, each with the time when it can again."""
        return {
            sender: until
            for (sender, to), until in self.cut_links.items()
            if to == receiver and until > now and sender in senders
        }


@final
@dataclass
class ControlPath:
    """One member's control connection. `epoch` counts connections: messages of an earlier one are lost."""

    time: VirtualTime
    rng: Random
    network: NetworkConditions
    up: bool = False
    epoch: int = 0
    blocked_up: float = 0.0
    blocked_down: float = 0.0
    _last_up: float = 0.0
    _last_down: float = 0.0

    def connect(self) -> None:
        self.up = True
        self.epoch += 1

    def cut(self) -> None:
        """Close the connection and lose the messages in flight, in both directions."""
        self.up = False
        self.epoch += 1

    def send_up(self, repeats: bool, deliver: Callable[..., None], *args: Any) -> None:
        """Send from the member to the supervisor. `repeats`: a member that is not sure may send it twice."""
        if not self.up:
            return
        when = self._last_up = self._arrival(self._last_up, self.blocked_up)
        self.time.at(when, self._deliver, self.epoch, deliver, args)
        if repeats and self.rng.random() < self.network.twice:
            # Not in order: a repetition is known by its content only.
            self.time.at(when + self.rng.random() * 2, deliver, *args)

    def send_down(self, deliver: Callable[..., None], *args: Any) -> None:
        """Send from the supervisor to the member."""
        if not self.up:
            return
        self._last_down = self._arrival(self._last_down, self.blocked_down)
        self.time.at(self._last_down, self._deliver, self.epoch, deliver, args)

    def _arrival(self, last: float, blocked: float) -> float:
        """Return when a packet arrives: not before the last one, nor before the direction is free."""
        delay = self.network.delay * (0.5 + self.rng.random())
        while self.rng.random() < self.network.loss:
            delay += MIN_RTO
        arrival = self.time.now + delay
        if blocked and arrival < blocked + MIN_RTO:
            arrival = blocked + MIN_RTO
        return arrival if arrival > last else last

    def _deliver(self, epoch: int, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        if epoch == self.epoch:
            deliver(*args)
