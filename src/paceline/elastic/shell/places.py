"""Other machines that joined: their agents, the payload they get, the workers they are asked to start.

An agent that comes back within `agent_seconds` is the same place. Must not know what workers do.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, final

from paceline.core.control.messages import (
    End,
    Exited,
    Granted,
    LookAt,
    Message,
    Notice,
    Offer,
    Piece,
    Seen,
    Start,
)
from paceline.core.errors import WireError
from paceline.elastic.model import AgentCame, AgentLost, Event
from paceline.elastic.shell.connection import Connection

PIECE_BYTES: Final = 1 << 20


@final
@dataclass
class _Place:
    number: int
    offer: Offer
    connection: Connection | None
    gone_at: float = float("inf")
    unsent: list[Message] = field(default_factory=list)


@final
class Places:
    """`granted` is what an agent needs to start workers; `exited` hears of workers that ended there, `seen`
    where one was found, `gone` of machines that left with all their workers."""

    def __init__(
        self,
        payload: int,
        granted: dict[str, Any],
        patience: float,
        feed: Callable[[Event], None],
        exited: Callable[[int, Exited], None],
        seen: Callable[[int, Seen], None],
        gone: Callable[[int], None],
    ) -> None:
        self._payload = payload
        self._granted = granted
        self._patience = patience
        self._feed = feed
        self._exited = exited
        self._seen = seen
        self._gone = gone
        self._places: dict[int, _Place] = {}
        self._digest = ""
        self._newest = 0

    @property
    def due(self) -> float:
        return min((place.gone_at for place in self._places.values()), default=float("inf"))

    def come(self, connection: Connection, offer: Offer) -> None:
        """A machine offers workers."""
        connection.owner = self
        known = self._places.get(offer.agent)
        if known is not None:
            if known.connection is not None:
                known.connection.close()
            known.offer, known.connection, known.gone_at = offer, connection, float("inf")
            self._grant(known, connection)
            self._feed(AgentCame(known.number, offer.workers, offer.hostname))
            return
        self._newest += 1
        number = self._newest
        place = _Place(number, offer, connection)
        self._places[number] = place
        self._grant(place, connection)
        self._feed(AgentCame(number, offer.workers, offer.hostname))

    def resume(self, number: int) -> None:
        """A place that an earlier supervisor knew: its agent is expected back under this number."""
        offer = Offer(workers=0, host="", hostname="", pid=0)
        self._newest = max(self._newest, number)
        self._places.setdefault(number, _Place(number, offer, None, time.monotonic() + self._patience))

    def hear(self, connection: Connection, number: int, message: Message) -> None:
        """From an agent, about the workers of its machine: it cannot speak for those of another."""
        place = self._of(connection)
        match message:
            case Exited() if place is not None:
                self._exited(place.number, message)
            case Seen() if place is not None:
                self._seen(place.number, message)
            case Offer(workers=0) if place is not None:
                self._leave(place, "it was asked to leave")
            case Exited() | Seen() | Offer(workers=0):
                # Its place was given up in the meantime.
                return
            case _:
                raise WireError(f"a {message.kind} message is not an agent's to send")

    def lose(self, connection: Connection, why: str) -> None:
        place = self._of(connection)
        if place is not None:
            place.connection = None
            place.gone_at = time.monotonic() + self._patience

    def tick(self, now: float) -> None:
        """Give up agents that stayed away."""
        for place in [place for place in self._places.values() if place.gone_at <= now]:
            self._leave(place, f"the agent on {place.offer.hostname} is gone")

    def start(self, place: int, member: int, slot: int, attempt: int) -> bool:
        """Ask for a worker there; False where there is no such machine."""
        return self._say(place, Start(member=member, slot=slot, attempt=attempt))

    def end(self, place: int, member: int, reason: str) -> None:
        """Have a worker killed there."""
        self._say(place, End(member=member, reason=reason))

    def look_at(self, place: int, member: int) -> bool:
        """Ask where a worker is; False where nobody can be asked now."""
        return not self.is_away(place) and self._say(place, LookAt(member=member))

    def probe(self, place: int, member: int) -> None:
        """Ask whether the process of a worker runs, where somebody can be asked now."""
        if not self.is_away(place):
            self._say(place, LookAt(member=member, probe=True))

    def is_away(self, place: int) -> bool:
        """Whether the connection of its agent is closed."""
        held = self._places.get(place)
        return held is None or held.connection is None

    def give_up(self, place: int, reason: str) -> None:
        """Do not wait for this agent any longer; should it come back, it comes as a new one."""
        held = self._places.get(place)
        if held is not None and held.connection is None:
            self._leave(held, reason)

    def expel(self, place: int, reason: str) -> None:
        """This machine is not wanted."""
        self._say(place, End(member=-1, reason=reason, code=1))
        held = self._places.get(place)
        if held is not None:
            if held.connection is not None:
                # Not closed here: what was said last is to arrive.
                held.connection.owner = _Nobody()
            self._leave(held, reason)

    def notify(self, place: int, text: str) -> None:
        """Show this to whoever started the agent."""
        self._say(place, Notice(text=text))

    def close(self, reason: str) -> None:
        for place in self._places.values():
            if place.connection is not None:
                place.connection.send(End(member=-1, reason=reason))
                place.connection.close()
        self._places.clear()

    def _leave(self, place: _Place, reason: str) -> None:
        del self._places[place.number]
        self._feed(AgentLost(place.number, reason))
        self._gone(place.number)

    def _of(self, connection: Connection) -> _Place | None:
        return next((place for place in self._places.values() if place.connection is connection), None)

    def _say(self, place: int, message: Message) -> bool:
        held = self._places.get(place)
        if held is None:
            return False
        if held.connection is None or held.connection.refill is not None:
            held.unsent.append(message)
        else:
            held.connection.send(message)
        return True

    def _grant(self, place: _Place, connection: Connection) -> None:
        size = os.fstat(self._payload).st_size
        self._digest = self._digest or _digest(self._payload, size)
        connection.send(
            Granted(agent=place.number, payload_bytes=size, digest=self._digest, options=self._granted)
        )
        if place.offer.agent:
            self._say_unsent(place, connection)
            return
        offset = 0

        def refill() -> None:
            nonlocal offset
            while offset < size and not connection.channel.wants_write:
                piece = os.pread(self._payload, PIECE_BYTES, offset)
                connection.send(Piece(offset=offset, data=piece))
                offset += len(piece)
            if offset >= size:
                connection.refill = None
                self._say_unsent(place, connection)

        connection.refill = refill
        refill()

    def _say_unsent(self, place: _Place, connection: Connection) -> None:
        for message in place.unsent:
            connection.send(message)
        place.unsent.clear()


@final
class _Nobody:
    def hear(self, connection: Connection, number: int, message: Message) -> None:
        return

    def lose(self, connection: Connection, why: str) -> None:
        return


def _digest(descriptor: int, size: int) -> str:
    digest = hashlib.sha256()
    for offset in range(0, size, PIECE_BYTES):
        digest.update(os.pread(descriptor, PIECE_BYTES, offset))
    return digest.hexdigest()
