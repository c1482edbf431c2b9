"""The rules that real and simulated workers share besides the machine."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import pytest
from tests.control.member_driver import (
    Driver,
    abort,
    at_end,
    failure,
    finished,
    in_view,
    opening,
    prepare,
    view,
    waiting,
)

from paceline.control.member_shell_rules import (
    LACKS_RESIDUALS,
    is_first_alive,
    kept_shards,
    must_start_over,
    queue_up,
    running_mean,
    saving_after_error,
    why_unsaved,
)
from paceline.control.member_state import (
    Exit,
    GroupLeft,
    Interrupt,
    KeepState,
    MemberAction,
    MemberEvent,
    OpenView,
    RequestStop,
    Restore,
    SendMessage,
    SendReport,
    StopReconnecting,
    Train,
    TrainingAction,
    ViewOpened,
)
from paceline.control.messages import Stop

QUEUED = (OpenView(view(2)), SendReport(3), KeepState(), Exit("over"), Train("", -1))


def queued_up(
    event: MemberEvent, actions: Sequence[MemberAction], queued: Sequence[TrainingAction] = ()
) -> tuple[list[MemberAction], list[TrainingAction]]:
    queue = deque(queued)
    return queue_up(event, actions, queue), list(queue)


def test_what_cannot_wait_is_done_at_once_and_in_order():
    now: list[MemberAction] = [
        Interrupt("a"),
        SendMessage(finished(1)),
        RequestStop("b"),
        StopReconnecting("c"),
    ]
    at_once, queued = queued_up(prepare(2), (*now[:2], SendReport(2), *now[2:], Exit("over")))
    assert (at_once, queued) == (now, [SendReport(2), Exit("over")])


@pytest.mark.parametrize("left", [GroupLeft(), GroupLeft(failure(2))])
def test_a_thread_that_left_its_group_has_nothing_to_do_in_it_any_longer(left):
    """A report and an exit belong to no group; what this very event brings is for the next one."""
    assert queued_up(left, (SendReport(4),), QUEUED) == ([], [SendReport(3), Exit("over"), SendReport(4)])


@pytest.mark.parametrize("event", [prepare(3), abort(3), Stop(reason="enough"), ViewOpened()])
def test_other_events_leave_the_queue_of_the_training_thread_as_it_is(event):
    assert queued_up(event, (KeepState(),), QUEUED) == ([], [*QUEUED, KeepState()])


def test_only_a_worker_that_has_trained_starts_over_where_there_is_no_checkpoint():
    for trained, has_checkpoint in itertools.product((False, True), repeat=2):
        restore = Restore(-1, False, False, trained)
        assert must_start_over(restore, has_checkpoint) == (trained and not has_checkpoint)


# an orphan


@pytest.mark.parametrize(
    ("members", "alive", "first"),
    [((3, 4, 5), (), True), ((3, 4, 5), (2,), True), ((3, 4, 5), (0,), False), ((4, 5), (1,), True)],
)
def test_the_first_member_that_lives_saves(members, alive, first):
    driver = in_view(members=members)
    assert is_first_alive(driver.state, lambda index: index in alive) == first


def restoring() -> Driver:
    """In an open view whose checkpoint is not there yet: the state before is gone."""
    driver = in_view()
    driver.feed(abort(2))
    driver.feed(GroupLeft())
    driver.feed(view(2, restore=True))
    driver.feed(ViewOpened())
    return driver


without_state = pytest.mark.parametrize("make", [Driver, waiting, opening, restoring])


@without_state
def test_a_worker_without_a_state_saves_nothing(make):
    assert not is_first_alive(make().state, lambda index: False)


def orphan(driver: Driver) -> Driver:
    driver.feed(GroupLeft())
    driver.away(31.0)
    assert driver.state.ended
    return driver


@pytest.mark.parametrize("covers_all", [False, True])
@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_an_orphan_saves_what_no_version_has_and_no_other_member_saves(is_first, is_saved, covers_all):
    state = orphan(in_view()).state
    why = why_unsaved(state, lambda index: not is_first, covers_all=covers_all, is_saved=is_saved)
    assert (why is None) == (is_first and not is_saved and covers_all)
    if is_first and not is_saved:
        assert why == (None if covers_all else LACKS_RESIDUALS)


def test_an_orphan_that_has_finished_saved_with_its_group():
    state = orphan(at_end()).state
    assert why_unsaved(state, lambda index: False, covers_all=True, is_saved=False) is not None


def test_a_finished_worker_that_was_needed_again_saves_as_an_orphan():
    driver = at_end()
    driver.feed(prepare(2))
    assert why_unsaved(orphan(driver).state, lambda index: False, covers_all=True, is_saved=False) is None


# an error


@pytest.mark.parametrize(
    ("members", "worth_saving", "saving"),
    [
        ((4,), True, "alone"),
        ((3, 4), True, "in view"),
        ((3, 4, 5), True, "in view"),
        ((4,), False, "none"),
        ((3, 4), False, "none"),
    ],
)
def test_a_worker_whose_code_raised_saves_alone_only_where_it_is_alone(members, worth_saving, saving):
    assert saving_after_error(in_view(members=members).state, worth_saving) == saving


@without_state
def test_a_worker_without_a_state_whose_code_raised_saves_nothing(make):
    assert saving_after_error(make().state, True) == "none"


# a step


@pytest.mark.parametrize(
    ("held", "block", "kept"),
    [
        ((2, 3), (1, 2, 3), {2, 3}),
        ((2, 3), (2, 3), {2, 3}),
        ((2, 3), (1, 2), set()),
        ((2, 3), (), set()),
        ((), (1, 2), set()),
    ],
)
def test_held_shards_are_kept_all_or_none(held, block, kept):
    assert kept_shards(held, block) == kept


def test_a_running_mean_begins_with_the_first_value():
    assert running_mean(0.0, 3.0) == 3.0
    assert running_mean(1.0, 2.0) == pytest.approx(1.2)
    assert running_mean(2.0, 1.0) == pytest.approx(1.8)
