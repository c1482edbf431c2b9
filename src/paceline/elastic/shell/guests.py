"""Who proved to know the secret and has not said yet what it is: a worker, another machine, or a tool.

Must not know what becomes of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, final

from paceline.core.control.messages import Answer, Ask, Dismissed, End, Foreign, Hello, Message, Offer
from paceline.core.errors import WireError
from paceline.elastic.shell.connection import Connection

GUEST_SECONDS: Final = 5.0
_COMPLAINTS: Final = 64


@final
class Guests:
    """The owner of connections until their first message."""

    def __init__(
        self,
        member: Callable[[Connection, Hello], None],
        agent: Callable[[Connection, Offer], None],
        tool: Callable[[Connection, Ask], None],
        complain: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._member = member
        self._agent = agent
        self._tool = tool
        self._complain = complain
        self._complained: set[tuple[str, str]] = set()
        self._waiting: dict[Connection, float] = {}

    @property
    def due(self) -> float:
        return next(iter(self._waiting.values()), float("inf"))

    def add(self, connection: Connection, now: float) -> None:
        """Somebody came through the gate."""
        self._waiting[connection] = now + GUEST_SECONDS

    def part(self, connection: Connection) -> None:
        """Somebody was sent away: the connection stays for a moment, so that it hears why."""
        connection.owner = _Parting(self)
        self.add(connection, time.monotonic())

    def hear(self, connection: Connection, number: int, message: Message) -> None:
        """The first message says who it is."""
        match message:
            case Hello():
                self._waiting.pop(connection, None)
                self._member(connection, message)
            case Offer():
                self._waiting.pop(connection, None)
                self._agent(connection, message)
            case Ask():
                # A tool may ask again, and stays a guest while it does.
                self._tool(connection, message)
            case Foreign():
                self._waiting.pop(connection, None)
                self._refuse(connection, message)
            case _:
                raise WireError(f"a {message.kind} message before a Hello, an Offer or an Ask")

    def _refuse(self, connection: Connection, foreign: Foreign) -> None:
        """Another version: tell both terminals. These answers are understood by every version."""
        text = foreign.text
        refusal: Message
        match foreign.what:
            case "Hello":
                refusal = Dismissed(reason=text, code=1)
            case "Offer":
                refusal = End(member=-1, reason=text, code=1)
            case _:
                refusal = Answer(done=False, text=text)
        connection.send(refusal)
        self.part(connection)
        case = (connection.host, text)
        if case not in self._complained and len(self._complained) < _COMPLAINTS:
            self._complained.add(case)
            self._complain(f"{connection.host}: {text}")

    def lose(self, connection: Connection, why: str) -> None:
        self._waiting.pop(connection, None)

    def tick(self, now: float) -> None:
        """Close those who say nothing."""
        for connection, limit in list(self._waiting.items()):
            if now < limit:
                break
            del self._waiting[connection]
            connection.close()

    def close(self) -> None:
        for connection in list(self._waiting):
            connection.close()
        self._waiting.clear()


@final
class _Parting:
    """Hears nothing any more."""

    def __init__(self, guests: Guests) -> None:
        self._guests = guests

    def hear(self, connection: Connection, number: int, message: Message) -> None:
        return

    def lose(self, connection: Connection, why: str) -> None:
        self._guests.lose(connection, why)
