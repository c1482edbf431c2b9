"""A channel in the supervisor's loop: hears when something comes, sends when there is room, ends once.

What a peer sends may be anything, also from one that has the token. A message that its owner cannot handle
ends this connection, whatever the owner raised: never the loop, which all other peers depend on. Only what
the message cannot have caused (the disk, the operating system) goes on upwards. Must not know what messages
mean.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable
from typing import Protocol, final

from paceline.core.control import channel as channels
from paceline.core.control.channel import Channel
from paceline.core.control.messages import Message
from paceline.core.errors import PlatformError, WireError


class Owner(Protocol):
    """Who is at the other end, as far as the supervisor knows."""

    def hear(self, connection: Connection, number: int, message: Message) -> None:
        """A message came."""

    def lose(self, connection: Connection, why: str) -> None:
        """The connection is gone; called once, and not for a connection that was closed here."""


@final
class Connection:
    """One channel, registered with the loop. `owner` may change: a guest becomes a member. `refill` is called
    when all that waited was sent: for something long that is sent in pieces. `complain` gets what a peer sent
    that ended its connection."""

    def __init__(
        self,
        channel: Channel,
        host: str,
        selector: selectors.BaseSelector,
        owner: Owner,
        complain: Callable[[Connection, str], None] = lambda connection, what: None,
    ) -> None:
        self._complain = complain
        self.channel = channel
        self.host = host
        self.owner = owner
        self.is_open = True
        self.refill: Callable[[], None] | None = None
        self._selector = selector
        self._mask = selectors.EVENT_READ
        selector.register(channel, self._mask, self.ready)

    def send(self, message: Message) -> None:
        """Send, now or when there is room."""
        self.send_frame(channels.frame(message))

    def send_frame(self, data: bytes) -> None:
        """Send what `channel.frame` made: for one message to many."""
        if self.is_open:
            self.channel.send_frame(data)
            self._update()

    def ready(self, mask: int, now: float) -> None:
        """The loop's call: something can be read or written."""
        if not self.is_open:
            return
        if mask & selectors.EVENT_WRITE:
            self.channel.flush()
            if self.refill is not None and not self.channel.wants_write:
                self.refill()
        if mask & selectors.EVENT_READ:
            self.drain()
        self._update()
        self.check()

    def drain(self) -> None:
        """Hear all that has arrived."""
        for number, message in self.channel.receive():
            try:
                self.owner.hear(self, number, message)
            except (OSError, PlatformError):
                raise
            except Exception as error:
                why = error.message if isinstance(error, WireError) else f"{type(error).__name__}: {error}"
                what = f"a {message.kind} message could not be handled: {why}"
                self.channel.closed, self.channel.nonsense = what, True
                return
            if not self.is_open:
                return

    def check(self) -> None:
        """Tell the owner if the channel ended."""
        if self.is_open and self.channel.closed:
            why = self.channel.closed
            self.close()
            if self.channel.nonsense:
                self._complain(self, why)
            self.owner.lose(self, why)

    def close(self) -> None:
        """End it here."""
        if self.is_open:
            self.is_open = False
            self._selector.unregister(self.channel)
            self.channel.close()

    def _update(self) -> None:
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.channel.wants_write else 0)
        if mask != self._mask and self.is_open:
            self._mask = mask
            self._selector.modify(self.channel, mask, self.ready)
