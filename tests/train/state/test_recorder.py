"""What a checkpoint holds for the journal: all that no process is known to have written."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from tests.virtual_clock import VirtualClock

from paceline.core import events
from paceline.train.callbacks import Callbacks
from paceline.train.phases import StepTimes
from paceline.train.state.recorder import PendingStep, Recorder


class Journal:
    """When it was last known to have what it was sent, on a clock that moves only when told to."""

    def __init__(self) -> None:
        self.clock = VirtualClock(100.0)
        self.acked_at = 100.0

    def acknowledge(self) -> None:
        self.acked_at = self.clock.now()


@pytest.fixture
def journal() -> Journal:
    return Journal()


def recorder(journal: Journal, told: list[events.Event] | None = None) -> Recorder:
    tell = None if told is None else told.append
    acked_at = partial(getattr, journal, "acked_at")
    return Recorder(Callbacks([]), tell, torch.device("cpu"), acked_at=acked_at, clock=journal.clock)


def take(made: Recorder, journal: Journal, *numbers: int) -> None:
    for number in numbers:
        journal.clock.advance(1.0)
        event = events.StepCommitted(time=0.0, step=number, epoch=0, loss=0.0, samples=1, generation=1)
        made.commit(PendingStep(event, torch.zeros(1), False, ()))


def held(made: Recorder) -> list[Any]:
    found = map(events.from_json, made.state_dict()["unconfirmed"])
    return [e.step if isinstance(e, events.StepCommitted) else f"resumed {e.step}" for e in found]  # type: ignore[attr-defined]


def resumed(number: int) -> events.RunResumed:
    return events.RunResumed(time=1.0, version=1, step=number, epoch=0, workers=1)


def test_only_what_is_newer_than_the_last_word_of_the_journal(journal):
    made = recorder(journal)
    take(made, journal, *range(1, 7))
    assert held(made) == [1, 2, 3, 4, 5, 6]
    journal.acknowledge()
    assert held(made) == [4, 5, 6]  # what was told in the last two seconds may be on its way


def test_it_goes_from_checkpoint_to_checkpoint_until_it_is_acknowledged(journal):
    first = recorder(journal)
    take(first, journal, 25, 26)
    told: list[events.Event] = []
    second = recorder(journal, told)
    second.load_state_dict(first.state_dict())
    recalled = second.recall()
    assert [event.generation for event in recalled if isinstance(event, events.StepCommitted)] == [-1, -1]
    second.note(resumed(26))
    take(second, journal, 27)
    assert held(second) == [25, 26, "resumed 26", 27]
    journal.clock.advance(10.0)
    journal.acknowledge()
    take(second, journal, 28)
    assert held(second) == [28]


def test_steps_that_were_done_again_are_there_once_and_after_the_resume(journal):
    made = recorder(journal)
    take(made, journal, 1, 2, 3, 4)
    made.note(resumed(2))
    take(made, journal, 3)
    assert held(made) == [1, 2, "resumed 2", 3]
    assert [event.step for event in made.events_after(1)] == [2, 3]  # type: ignore[attr-defined]


def evaluated(number: int) -> events.Evaluated:
    return events.Evaluated(time=1.0, step=number, epoch=0, samples=1, metrics={"loss": 0.5})


def test_evaluations_and_ends_of_epochs_have_their_place_among_the_steps(journal):
    made = recorder(journal)
    take(made, journal, 1, 2)
    made.evaluated(evaluated(2))
    made.end_epoch(0, {})
    take(made, journal, 3)
    other = recorder(journal)
    other.load_state_dict(made.state_dict())
    kinds = ["step_committed", "step_committed", "evaluated", "epoch_ended", "step_committed"]
    assert [event.type for event in other.recall()] == kinds
    assert [event.type for event in other.recall(after=2)] == kinds[-1:]
    assert [event.type for event in other.events_after(1)] == kinds[1:]
    # Of the step that the journal has it may lack what came after it; a supervisor knows.
    assert [event.type for event in other.events_after(2)] == kinds[2:]
    made.note(resumed(1))
    assert [event.type for event in made.recall()] == ["step_committed", "run_resumed"]


def test_what_is_remembered_is_bounded(journal):
    made = recorder(journal)
    take(made, journal, *range(1, 9001))
    assert held(made) == list(range(9001 - 8192, 9001))
    journal.acknowledge()
    take(made, journal, 9001)
    assert len(made.events_after(0)) == 256


def test_a_checkpoint_from_before_it_held_any(journal):
    made = recorder(journal)
    state = made.state_dict()
    del state["unconfirmed"]
    made.load_state_dict(state)
    assert made.recall() == []


def test_times_of_a_step_are_rounded_and_those_before_it_do_not_count():
    clock, taken = VirtualClock(0.0), [StepTimes(9.0, 9.0, 9.0), StepTimes(0.1234567, 0.01, 0.3)]
    told: list[events.Event] = []
    made = Recorder(
        Callbacks([]), told.append, torch.device("cpu"), clock=clock, take_times=lambda: taken.pop(0)
    )
    made.start_clock()
    clock.advance(0.5)
    event = events.StepCommitted(time=0.0, step=1, epoch=0, loss=0.0, samples=2)
    record = made.commit(PendingStep(event, torch.tensor([0.25]), False, ()))
    assert record is not None
    assert (record.comm_time, record.data_time, record.compute_efficiency) == (0.123457, 0.01, 0.6)
    (committed,) = told
    assert committed == dataclasses.replace(
        event,
        time=committed.time,
        loss=0.25,
        seconds=0.5,
        comm_time=0.123457,
        data_time=0.01,
        compute_efficiency=0.6,
    )
    timeless = record.timeless()
    assert (timeless.seconds, timeless.comm_time, timeless.compute_efficiency) == (0.0, None, None)
