"""One control connection in the supervisor's loop: delivers messages to its owner, sends when there is room.

A peer may send anything, also one that has the token. A message that its owner cannot handle ends this
connection, whatever the owner raised: never the loop, which all other peers depend on. Only errors that a
message cannot have caused (the disk, the operating system) are passed on.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, final

from paceline.control import channel as channels
from paceline.control.channel import Channel
from paceline.control.messages import ControlMessage
from paceline.core.clock import Clock
from paceline.core.errors import PacelineError, PlatformError, WireError

_REPORT_SECONDS: Final = 1.0
_MAX_CHARACTERS: Final = 500


class ConnectionOwner(Protocol):
    """Handles what a peer sends."""

    def receive(self, connection: Connection, number: int, message: ControlMessage) -> None:
        """Handle one message; `number` is 0 for messages without one."""

    def disconnected(self, connection: Connection, reason: str) -> None:
        """Handle the end of a connection: called once, and not for one that was closed here."""


@final
@dataclass(eq=False)
class Connection:
    """One channel, registered with the loop. `owner` may change: a handshake becomes a member. `refill` is
    called when all that waited was sent: for something long that is sent in chunks. `report_invalid` gets
    what a peer sent that ended its connection."""

    channel: Channel
    host: str
    selector: selectors.BaseSelector
    owner: ConnectionOwner
    report_invalid: Callable[[str, str], None] = lambda host, what: None
    is_open: bool = True
    refill: Callable[[], None] | None = None
    _mask: int = selectors.EVENT_READ

    def __post_init__(self) -> None:
        self.selector.register(self.channel, self._mask, self.ready)

    def send(self, message: ControlMessage) -> None:
        """Send, now or when there is room."""
        self.send_frame(channels.frame(message))

    def send_frame(self, data: bytes) -> None:
        """Send an encoded message: for one message to many members."""
        if self.is_open:
            self.channel.send_frame(data)
            self._update()

    def ready(self, mask: int, now: float) -> None:
        """Read or write; called by the loop."""
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
        """Deliver all messages that have arrived."""
        for number, message in self.channel.receive():
            try:
                self.owner.receive(self, number, message)
            except (OSError, PlatformError):
                raise
            except Exception as error:
                why = error.message if isinstance(error, WireError) else f"{type(error).__name__}: {error}"
                self.reject(f"a {message.kind} message could not be handled: {why}")
                return
            if not self.is_open:
                return

    def reject(self, what: str) -> None:
        """Mark what the peer sent as invalid; the next `check` ends the connection."""
        self.channel.closed, self.channel.nonsense = what, True

    def check(self) -> None:
        """Close the connection if the channel ended, and tell the owner."""
        if self.is_open and self.channel.closed:
            why = self.channel.closed
            self.close()
            if self.channel.nonsense:
                self.report_invalid(self.host, why)
            self.owner.disconnected(self, why)

    def close(self) -> None:
        """Close the connection without telling its owner."""
        if self.is_open:
            self.is_open = False
            self.selector.unregister(self.channel)
            self.channel.close()

    def _update(self) -> None:
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.channel.wants_write else 0)
        if mask != self._mask and self.is_open:
            self._mask = mask
            self.selector.modify(self.channel, mask, self.ready)


@final
@dataclass
class InvalidPeers:
    """Counts connections that were dropped for what an authenticated peer sent, and reports them: at most one
    a second, because a peer can connect and send more often than anyone reads."""

    clock: Clock
    report: Callable[[PacelineError], None]
    dropped: int = 0
    _quiet_until: float = 0.0

    def add(self, host: str, what: str) -> None:
        self.dropped += 1
        now = self.clock.now()
        if now < self._quiet_until:
            return
        self._quiet_until = now + _REPORT_SECONDS
        self.report(
            WireError(
                f"a connection from {host} was dropped: {what[:_MAX_CHARACTERS]} ({self.dropped} in all)",
                remedy="a worker connects again by itself; else see who has the job's token",
            )
        )
