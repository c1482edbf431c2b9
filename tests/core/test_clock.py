"""Clocks: the real one moves forward, the virtual one when told."""

from __future__ import annotations

import threading

import pytest
from tests.virtual_clock import VirtualClock

from paceline.core.clock import Clock, MonotonicClock, WallClock


@pytest.mark.parametrize("clock", [MonotonicClock(), WallClock()])
def test_real_clocks_move_forward(clock: Clock):
    before = clock.now()
    clock.sleep(0)
    clock.sleep(-1)
    assert clock.now() >= before


def test_an_autojumping_clock_sleeps_in_no_time():
    clock = VirtualClock(start=5.0, autojump=True)
    clock.sleep(3600)
    assert clock.now() == 3605.0


def test_a_sleeper_wakes_when_the_clock_has_moved_far_enough():
    clock = VirtualClock()
    woke: list[float] = []

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        woke.append(clock.now())

    sleepers = [threading.Thread(target=sleep, args=(seconds,)) for seconds in (1.0, 2.0)]
    for sleeper in sleepers:
        sleeper.start()
    assert clock.wait_for_sleepers(2)
    clock.advance(1.5)
    sleepers[0].join()
    assert woke == [1.5]
    assert not clock.wait_for_sleepers(2, timeout=0.0)
    clock.advance(0.5)
    sleepers[1].join()
    assert woke == [1.5, 2.0]


def test_time_does_not_go_back():
    with pytest.raises(ValueError, match="cannot go back"):
        VirtualClock().advance(-1)
