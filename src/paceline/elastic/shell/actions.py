"""Carries out what the machine decided: processes, messages, journal lines. Must not decide anything."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, final

from paceline.core.control import channel
from paceline.core.control.messages import Dial, Dismissed, Message, Prepare, Stop, View
from paceline.core.events import Repaired, ViewChanged
from paceline.elastic.model import (
    HOME,
    Action,
    Dismiss,
    EndJob,
    KillWorker,
    NoteFailure,
    NoteRepair,
    NoteVerdict,
    ProbeWorkers,
    SendAway,
    StartWorker,
    TellDial,
    TellPrepare,
    TellStop,
    TellView,
)
from paceline.elastic.shell.seats import Seat
from paceline.elastic.shell.views import endpoints

if TYPE_CHECKING:
    from paceline.elastic.supervisor import Supervisor

# A worker that raised reports its traceback and ends by itself; one that was dismissed closes its files.
RAISED_SECONDS: Final = 10.0
DISMISSED_SECONDS: Final = 30.0
REACH_REMEDY: Final = (
    "let the machines connect to each other on the ports of the workers, in both directions; ports= (or "
    "--ports) and interface= (or --interface) choose which"
)


@final
class Actions:
    """All actions but the last, EndJob."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._staff = supervisor.staff

    def carry_out(self, action: Action, reason: str, told: set[int]) -> None:
        """`told`: members about whom the same decision holds a verdict."""
        match action:
            case StartWorker():
                self._staff.start(action.member, action.slot, action.place)
            case KillWorker():
                self._kill(action)
            case ProbeWorkers():
                self._supervisor.probing.look(action.members)
            case TellDial():
                self._dial(action)
            case SendAway():
                self._supervisor.places.expel(action.place, action.reason)
            case TellPrepare():
                message = Prepare(generation=action.generation, abort=action.abort, reason=action.reason)
                for seat in self._tell(action.members, message):
                    seat.prepare = message
            case TellView():
                self._view(action)
            case TellStop():
                stop = Stop(reason=action.reason)
                for seat in self._tell(action.members, stop):
                    seat.stop = stop
            case Dismiss():
                self.dismiss(self._staff.find(action.member), action.reason, 0, DISMISSED_SECONDS)
            case NoteFailure():
                seat = self._staff.find(action.member)
                self._supervisor.verdicts.failure(action, seat, told=action.member in told)
                if action.kind == "unreachable" and seat.place != HOME:
                    self._supervisor.places.notify(seat.place, f"{action.reason}\n  try: {REACH_REMEDY}")
            case NoteVerdict():
                seat = self._staff.find(action.member)
                self._supervisor.verdicts.open(action, seat, time.monotonic())
            case NoteRepair():
                self._supervisor.chronicle.write(
                    Repaired(
                        time=time.time(),
                        generation=action.generation,
                        seconds=action.seconds,
                        lost=list(action.lost),
                    )
                )
            case EndJob():
                raise AssertionError("the end is not an action among others")

    def dismiss(self, seat: Seat, reason: str, code: int, seconds: float) -> None:
        """Let a worker end in peace."""
        if seat.pid:
            # While it can still tell it again, should this supervisor die before it is written.
            self._supervisor.chronicle.flush(seat.pid)
        seat.dismissed, seat.goodbye = True, Dismissed(reason=reason, code=code)
        if seat.member in self._staff.seats:
            if seat.connection is not None:
                seat.connection.send(seat.goodbye)
            self._staff.leave(seat, seconds)

    def _kill(self, action: KillWorker) -> None:
        seat = self._staff.seats.get(action.member)
        if seat is None:
            return
        seat.expelled = True
        if seat.raised is not None:
            self._staff.leave(seat, RAISED_SECONDS)
        elif not self._supervisor.verdicts.after(
            action.member, lambda: self._staff.kill(seat, action.reason)
        ):
            self._staff.kill(seat, action.reason)

    def _dial(self, action: TellDial) -> None:
        seats = [seat for number in action.peers if (seat := self._staff.seats.get(number)) is not None]
        newcomer = self._staff.seats.get(action.member)
        if newcomer is None:
            return
        found = endpoints([newcomer, *seats])
        asked = ((seat.member, seat.slot, *at) for seat, at in zip(seats, found[1:], strict=True))
        self._tell([newcomer.member], Dial(peers=tuple(asked)))
        back = Dial(peers=((newcomer.member, newcomer.slot, *found[0]),))
        self._tell([seat.member for seat in seats], back)

    def _view(self, action: TellView) -> None:
        supervisor, plan = self._supervisor, action.plan
        supervisor.chronicle.flush()
        seats = {member: self._staff.find(member) for member in plan.members}
        view = supervisor.views.make(plan, seats, supervisor.chronicle.journaled)
        for seat in self._tell(plan.members, view):
            seat.view, seat.prepare = view, None
        supervisor.chronicle.write(
            ViewChanged(
                time=time.time(),
                generation=plan.generation,
                reason=action.reason,
                members=list(plan.slots),
                shards=[list(shards) for shards in view.shards],
                pids=list(view.pids),
                hosts=list(view.hostnames),
                step=_committed(view, seats),
                behind=[plan.slots[rank] for rank in plan.behind],
            )
        )

    def _tell(self, members: Iterable[int], message: Message) -> list[Seat]:
        data = channel.frame(message)
        told = [seat for member in members if (seat := self._staff.seats.get(member)) is not None]
        for seat in told:
            if seat.connection is not None:
                seat.connection.send_frame(data)
        return told


def _committed(view: View, seats: dict[int, Seat]) -> int:
    """The last step that was committed before this view."""
    if view.restore:
        return 0 if view.journaled == 0 else view.journaled
    if view.source >= 0:
        source = seats[view.members[view.source]].progress
        return source[0] if source is not None else 0
    return max((seat.progress[0] for seat in seats.values() if seat.progress is not None), default=0)
