"""What members say, as the machine's events. Must not decide anything."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, final

from paceline.core.control import channel
from paceline.core.control.messages import (
    Beat,
    Broken,
    Claimed,
    Dialed,
    Done,
    Injected,
    Installed,
    Leaving,
    Message,
    Raised,
    Receipt,
    Report,
    ShardDone,
    Told,
)
from paceline.core.errors import WireError
from paceline.elastic.model import (
    Beaten,
    HasBroken,
    HasDialed,
    Hashed,
    HasInstalled,
    HasRaised,
    IsDone,
    Reported,
    WantsToLeave,
)
from paceline.elastic.shell.connection import Connection
from paceline.elastic.shell.seats import Seat

if TYPE_CHECKING:
    from paceline.elastic.supervisor import Supervisor

# A link that gives up old messages for lack of room leaves a gap, of at most so many.
_MOST_AHEAD: Final = 1 << 20


@final
class Ear:
    """The owner of a member's connection."""

    def __init__(self, supervisor: Supervisor, seat: Seat) -> None:
        self._supervisor = supervisor
        self._seat = seat

    def lose(self, connection: Connection, why: str) -> None:
        if self._seat.connection is connection:
            self._supervisor.staff.cut(self._seat, why)

    def hear(self, connection: Connection, number: int, message: Message) -> None:
        """One message; those that were heard before a reconnect, and those of the expelled, are left out."""
        seat = self._seat
        if seat.expelled or seat.connection is not connection:
            return
        if number:
            if number <= seat.heard:
                return
            if number > seat.heard + _MOST_AHEAD:
                # Believed, it would have all that the worker says next count as heard already.
                raise WireError(f"message {number} after message {seat.heard}")
            seat.heard = number
        if isinstance(message, Beat):
            self._beat(message)
        else:
            self._say(message)

    def _beat(self, beat: Beat) -> None:
        seat, supervisor = self._seat, self._supervisor
        seat.beat, seat.beat_at, seat.progress = beat, time.monotonic(), beat.progress
        written = supervisor.chronicle.complete and not supervisor.chronicle.holds_back(seat.pid)
        if seat.heard > seat.confirmed and written:
            supervisor.staff.confirm_seat(seat)
        supervisor.feed(
            Beaten(
                seat.member,
                beat.phase,
                beat.seconds,
                beat.progress,
                beat.waits_for,
                beat.shard_seconds,
                beat.step_seconds,
                beat.longest,
            )
        )

    @property
    def _known(self) -> int:
        return self._seat.progress[0] if self._seat.progress is not None else 0

    def _say(self, message: Message) -> None:
        seat, supervisor = self._seat, self._supervisor
        member = seat.member
        match message:
            case Told():
                supervisor.chronicle.tell(message.lines, seat.pid, self._known)
            case Receipt():
                supervisor.chronicle.receive(seat.slot, seat.pid, message, self._known)
                for step, digest in message.hashes.items():
                    supervisor.feed(
                        Hashed(member, int(step), digest, message.generation, message.agreed, message.trail)
                    )
            case Injected():
                supervisor.injections.hear(seat, message)
            case Dialed():
                supervisor.feed(HasDialed(member, message.peer, message.trouble, message.lossy))
            case Report():
                seat.progress = message.progress
                supervisor.feed(
                    Reported(
                        member,
                        message.generation,
                        message.progress,
                        message.held,
                        message.alone,
                        message.digest,
                        message.agreed,
                        message.owed,
                        message.trail,
                        message.spoiled,
                        message.doubted,
                    )
                )
            case Installed():
                if message.progress is not None:
                    seat.progress = message.progress
                supervisor.views.installed(member, message.generation)
                supervisor.feed(HasInstalled(member, message.generation, message.progress))
            case Broken():
                supervisor.feed(
                    HasBroken(
                        member, message.generation, message.reason, message.accused, message.unreachable
                    )
                )
            case Raised():
                seat.raised = message
                supervisor.feed(
                    HasRaised(
                        member,
                        message.summary,
                        message.fault,
                        message.step,
                        message.shard,
                        message.holds,
                        message.progress,
                    )
                )
            case Leaving():
                supervisor.feed(WantsToLeave(member, message.reason))
            case Done():
                seat.done, seat.progress = True, message.progress
                supervisor.feed(
                    IsDone(member, message.progress, message.hash, message.stopped, message.generation)
                )
            case ShardDone():
                self._claim(message)
            case _:
                raise WireError(f"a {message.kind} message is not a worker's to send")

    def _claim(self, done: ShardDone) -> None:
        views, staff = self._supervisor.views, self._supervisor.staff
        if views.latest is None or not views.claim(done.generation, done.step, done.shard):
            return
        data = channel.frame(Claimed(step=done.step, shard=done.shard, generation=done.generation))
        for member in views.latest.members:
            other = staff.seats.get(member)
            if other is not None and other is not self._seat and other.connection is not None:
                other.connection.send_frame(data)
