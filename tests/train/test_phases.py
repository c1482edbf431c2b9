"""Phases that not every step has: how long they took, for deadlines."""

from __future__ import annotations

import pytest
from tests.virtual_clock import VirtualClock

from paceline.train import phases as names
from paceline.train.phases import Phases


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(100.0)


def passing(phases: Phases, clock: VirtualClock, *walk: tuple[str, float]) -> None:
    for phase, seconds in walk:
        phases.enter(phase)
        clock.advance(seconds)


def test_the_longest_of_those_that_not_every_step_has(clock):
    phases = Phases(clock=clock)
    assert phases.longest(names.EVALUATION) == 0.0
    passing(
        phases, clock, (names.EVALUATION, 3.0), (names.DATA, 9.0), (names.EVALUATION, 2.0), (names.DATA, 0)
    )
    assert phases.longest(names.EVALUATION) == 3.0
    assert phases.longest(names.DATA) == 0.0
    assert phases.longest(names.CHECKPOINT) == 0.0


def test_one_that_was_broken_off_says_nothing(clock):
    phases = Phases(clock=clock)
    passing(phases, clock, (names.EVALUATION, 0.1), (names.WAIT, 1.0), (names.EVALUATION, 0.2))
    assert phases.longest(names.EVALUATION) == 0.0
    passing(phases, clock, (names.COLLECTIVE, 1.0))
    assert phases.longest(names.EVALUATION) == pytest.approx(0.2)


def test_a_view_change_meets_no_fault_and_tells_nothing_about_saving(clock):
    met: list[tuple[str, int]] = []
    phases = Phases(lambda phase, step: met.append((phase, step)), clock=clock)
    phases.enter(names.WAIT)
    for phase in (names.COLLECTIVE, names.CHECKPOINT, names.COLLECTIVE):
        phases.enter(phase, in_view_change=True)
        assert phases.now == (phase, 0.0)
        clock.advance(5.0)
    phases.enter(names.DATA)
    assert met == [(names.WAIT, 0), (names.DATA, 0)]
    assert phases.longest(names.CHECKPOINT) == 0.0


def test_what_the_time_of_a_step_went_to(clock):
    phases = Phases(clock=clock)
    phases.take_times()
    walk = [(names.DATA, 1.0), (names.FORWARD, 2.0), (names.BACKWARD, 4.0), (names.DATA, 0.5)]
    passing(phases, clock, *walk, (names.COLLECTIVE, 8.0), (names.OPTIMIZER, 16.0))
    begun = phases.now
    assert phases.take_times() == (8.0, 1.5, 22.0)
    assert phases.now == begun  # heartbeats still see when the phase began
    clock.advance(3.0)
    passing(phases, clock, (names.EVALUATION, 100.0), (names.DATA, 0.25))
    assert phases.take_times() == (0.0, 0.25, 3.0)
    assert phases.take_times() == (0.0, 0.0, 0.0)
