"""Copies of a state, and which events the supervisor takes without writing its snapshot."""

from __future__ import annotations

import pytest
from tests.elastic.machine.machine_driver import beat_of, hello_of, report_of
from tests.elastic.machine.made_states import made

from paceline.elastic.machine.machine_events import MachineEvent, StopRequested, Tick, WorkerLost, is_routine


@pytest.mark.parametrize(
    ("event", "routine"),
    [
        (Tick(), True),
        (Tick(stalled=3.0), True),
        (beat_of(1, "forward", 0.1), True),
        (hello_of(1), False),
        (report_of(1, 4, (5, 0, 0)), False),
        (WorkerLost(1, "crash", "killed"), False),
        (StopRequested("enough"), False),
    ],
)
def test_heartbeats_and_ticks_are_routine(event: MachineEvent, routine: bool) -> None:
    assert is_routine(event) is routine


def test_a_copy_of_a_state_shares_no_dictionary_with_it() -> None:
    job = made()
    job.votes, job.lineage = {(5, ""): {1: "a"}}, {2: 1}
    copy = job.copy()
    assert copy == job
    assert [
        name for name, value in vars(job).items() if isinstance(value, dict) and vars(copy)[name] is value
    ] == []
