"""Random walks of the member machine: whatever comes in whatever order, the invariants hold."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from tests.control.member_driver import (
    Driver,
    abort,
    accepted,
    exception,
    failure,
    finished,
    prepare,
    view,
)

from paceline.control.member_state import (
    CodeRaised,
    Exit,
    GroupLeft,
    KeepState,
    LeaveRequested,
    MemberAction,
    MemberEvent,
    MemberPhase,
    OpenView,
    ReceiveState,
    Restore,
    RunFinished,
    SendState,
    StateReady,
    SupervisorAway,
    Train,
    ViewOpened,
)
from paceline.control.messages import Dismissed, Stop

STATE_ACTIONS = (KeepState, SendState, ReceiveState, Restore)


def any_event(rng: Random, driver: Driver) -> MemberEvent:
    """Anything at all, of generations around the present one."""
    generation = max(0, driver.state.generation + rng.randrange(-1, 4))
    roles: tuple[dict[str, Any], ...] = (
        {},
        {"restore": True},
        {"source": 1, "stale_indexes": (0,)},
        {"source": 0, "stale_indexes": (1, 2)},
    )
    events: list[MemberEvent] = [
        accepted(),
        prepare(generation),
        abort(generation),
        view(generation, **rng.choice(roles)),
        view(generation, members=(3, 5)),
        Stop(reason="enough"),
        ViewOpened(),
        StateReady((generation, 0, 0)),
        GroupLeft(),
        GroupLeft(failure(generation)),
        RunFinished(finished(generation)),
        LeaveRequested("SIGTERM"),
        SupervisorAway(
            driver.now - rng.choice((0.0, 1.0, 29.0)), blocked_since=rng.choice((None, driver.now - 40.0))
        ),
    ]
    if rng.random() < 0.05:
        events += [
            Dismissed(reason="no longer needed"),
            CodeRaised(exception(holds=rng.random() < 0.8)),
            SupervisorAway(driver.now - 31.0),
        ]
    return rng.choice(events)


def test_anything_in_any_order_keeps_the_invariants():
    """The driver checks them after each event; states without has_state may not send one."""
    reached: Counter[MemberPhase] = Counter()
    for seed in range(400):
        rng = Random(seed)
        driver = Driver()
        for _ in range(120):
            driver.now += rng.random()
            event = any_event(rng, driver)
            if isinstance(event, type(view(1))) and not event.restore and not driver.state.has_state:
                event = view(event.generation, restore=True)  # no supervisor takes a state that is not there
            driver.feed(event)
            reached[driver.phase] += 1
    assert set(reached) == set(MemberPhase)


def test_a_worker_that_follows_its_actions_always_comes_to_rest():
    """The training thread of a shell carries its actions out; interrupted collectives fail. After the last
    message it trains, waits, or has ended; it never stands in the middle of a view."""
    ends: Counter[MemberPhase] = Counter()
    for seed in range(400):
        rng = Random(seed)
        driver = Driver()
        todo: list[MemberAction] = list(driver.feed(accepted()))
        generation = 0
        for _ in range(60):
            driver.now += rng.random()
            choice = rng.random()
            if choice < 0.2:
                generation += 1
                todo += driver.feed(prepare(generation, abort=rng.random() < 0.5))
            elif choice < 0.4 and generation:
                todo += driver.feed(view(generation, restore=not driver.state.has_state))
            elif choice < 0.45:
                todo += driver.feed(accepted())
            elif choice < 0.47:
                todo += driver.feed(Dismissed(reason="no longer needed"))
            else:
                todo += training_thread(rng, driver, todo)
        for _ in range(20):
            todo += training_thread(Random(1), driver, todo)
        left = [one for one in todo if not isinstance(one, Exit)]
        assert left == []
        assert driver.phase is not MemberPhase.OPENING
        ends[driver.phase] += 1
    assert len(ends) >= 3


def training_thread(rng: Random, driver: Driver, todo: list[MemberAction]) -> tuple[MemberAction, ...]:
    """One thing that the training thread does: an action, a collective that was interrupted, or a step."""
    todo[:] = [one for one in todo if isinstance(one, (OpenView, Train, Exit, *STATE_ACTIONS))]
    if driver.state.interrupted is not None and driver.phase is MemberPhase.IN_VIEW:
        return driver.feed(GroupLeft(failure(driver.state.generation)))
    if not todo:
        if driver.phase is MemberPhase.IN_VIEW and driver.state.prepare is not None:
            return driver.feed(GroupLeft())
        return ()
    action = todo.pop(0)
    if isinstance(action, Train):
        return ()
    if isinstance(action, Exit):
        todo.insert(0, action)
        return ()
    if rng.random() < 0.2 or driver.state.interrupted is not None:
        return driver.feed(GroupLeft(failure(driver.state.generation)))
    if isinstance(action, OpenView):
        return driver.feed(ViewOpened())
    return driver.feed(StateReady((1, 0, 0)))
