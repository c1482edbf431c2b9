"""A member machine without a worker: events go in, actions come out, and the invariants are checked."""

from __future__ import annotations

from typing import Any

from paceline.control import member_machine
from paceline.control.field_types import Progress
from paceline.control.member_invariants import violations
from paceline.control.member_state import (
    MemberAction,
    MemberEvent,
    MemberPhase,
    MemberState,
    RunFinished,
    StateReady,
    SupervisorAway,
    ViewOpened,
)
from paceline.control.messages import (
    CollectiveFailed,
    MemberAccepted,
    MemberFinished,
    Prepare,
    View,
    WorkerException,
)

ME, PATIENCE = 4, 30.0


def view(generation: int, members: tuple[int, ...] = (3, ME, 5), **changes: Any) -> View:
    count = len(members)
    return View(
        generation=generation,
        members=members,
        slots=tuple(range(count)),
        pids=tuple(range(100, 100 + count)),
        hosts=("host",) * count,
        hostnames=("host",) * count,
        endpoints=(("127.0.0.1", 1),) * count,
        shards=tuple((number,) for number in range(count)),
        **changes,
    )


def prepare(generation: int, *, abort: bool = False) -> Prepare:
    return Prepare(generation=generation, abort=abort, reason=f"generation {generation}")


def abort(generation: int) -> Prepare:
    return prepare(generation, abort=True)


def failure(generation: int) -> CollectiveFailed:
    return CollectiveFailed(generation=generation, reason="a peer is gone", unreachable=(5,))


def exception(*, holds: bool) -> WorkerException:
    return WorkerException(summary="ValueError: no", traceback="", phase="forward", holds=holds)


def finished(generation: int, progress: Progress = (9, 1, 0)) -> MemberFinished:
    return MemberFinished(generation=generation, progress=progress, hash="abc")


class Driver:
    """One machine. `feed` returns the actions of an event, in their order."""

    def __init__(self) -> None:
        self.state = MemberState(ME, PATIENCE)
        self.now = 0.0

    @property
    def phase(self) -> MemberPhase:
        return self.state.phase

    def feed(self, event: MemberEvent) -> tuple[MemberAction, ...]:
        before = self.state
        self.state, actions = member_machine.step(before, event, self.now)
        assert violations(before, self.state, actions) == []
        return actions

    def away(self, seconds: float, **changes: Any) -> tuple[MemberAction, ...]:
        """The supervisor has been away for so long."""
        return self.feed(SupervisorAway(self.now - seconds, **changes))


def accepted() -> MemberAccepted:
    return MemberAccepted(heartbeat=0.25, patience=PATIENCE)


def waiting() -> Driver:
    driver = Driver()
    assert driver.feed(accepted()) == ()
    return driver


def opening(generation: int = 1, **changes: Any) -> Driver:
    driver = waiting()
    driver.feed(view(generation, **changes))
    return driver


def in_view(generation: int = 1, **changes: Any) -> Driver:
    """A member that trains; it restored the state, as the first view of a job does."""
    driver = opening(generation, **{"restore": True, **changes})
    driver.feed(ViewOpened())
    driver.feed(StateReady((0, 0, 0)))
    assert driver.phase is MemberPhase.IN_VIEW
    return driver


def at_end(generation: int = 1) -> Driver:
    driver = in_view(generation)
    driver.feed(RunFinished(finished(generation)))
    return driver


IN_EVERY_PHASE = {
    MemberPhase.JOINING: Driver,
    MemberPhase.WAITING: waiting,
    MemberPhase.OPENING: opening,
    MemberPhase.IN_VIEW: in_view,
    MemberPhase.FINISHED: at_end,
}
"""How to come into each phase that is not the end."""
