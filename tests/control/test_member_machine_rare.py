"""Decisions of the member machine that few runs come to: each was a planted bug that no test noticed."""

from __future__ import annotations

import msgspec
import pytest
from tests.control.member_driver import Driver, in_view, opening, waiting

from paceline.control.member_shell_rules import is_first_alive, saving_after_error
from paceline.control.member_state import KeepState, MemberPhase, StateReady, ViewOpened

# The member of `member_driver` has view index 1 of 3.


@pytest.mark.parametrize(
    ("alive", "first"),
    [((), True), ((0,), False), ((2,), True), ((0, 2), False), ((1, 2), True)],
)
def test_of_the_orphans_of_a_view_the_first_that_lives_saves(alive: tuple[int, ...], first: bool):
    assert is_first_alive(in_view().state, lambda index: index in alive) is first


@pytest.mark.parametrize("alive", [(0,), (1,)])
def test_the_third_saves_only_where_both_before_it_are_gone(alive: tuple[int, ...]):
    driver = in_view(members=(3, 5, 4))
    assert not is_first_alive(driver.state, lambda index: index in alive)
    assert is_first_alive(driver.state, lambda index: False)


def test_who_was_in_no_view_or_holds_no_state_does_not_save():
    assert not is_first_alive(waiting().state, lambda index: False)
    left = in_view().state
    assert not is_first_alive(msgspec.structs.replace(left, has_state=False), lambda index: False)
    without_view = msgspec.structs.replace(left, view=None)
    assert not is_first_alive(without_view, lambda index: False)
    assert saving_after_error(without_view, worth_saving=True) == "none"


def test_who_has_kept_its_state_in_a_view_is_not_fresh():
    driver: Driver = opening()
    assert driver.feed(ViewOpened()) == (KeepState(),)
    driver.feed(StateReady((3, 0, 0)))
    assert driver.phase is MemberPhase.IN_VIEW
    assert not driver.state.fresh
    assert driver.state.trained
