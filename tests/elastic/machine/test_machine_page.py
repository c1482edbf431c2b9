"""docs/machine.md says what the table says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.elastic.machine import machine_page

from paceline.control import messages
from paceline.elastic.machine import machine
from paceline.elastic.machine.machine_events import FromMember, MachineEvent
from paceline.elastic.machine.state import JobPhase

PAGE = Path(__file__).parents[3] / "docs" / "machine.md"


FROM_MEMBERS = {
    "MemberHello",
    "DialResult",
    "Heartbeat",
    "MemberReport",
    "ViewInstalled",
    "CollectiveFailed",
    "WorkerException",
    "StepReceipt",
    "LeaveRequest",
    "MemberFinished",
}


def test_the_page_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert machine_page.rendered(text) == text, (
        "run: python -m tests.elastic.machine.machine_page docs/machine.md"
    )


def test_the_page_has_every_generated_part_once():
    text = PAGE.read_text(encoding="utf-8")
    assert sorted(re.findall(r"<!-- begin (\w+) -->", text)) == sorted(machine_page.PARTS)


def test_the_table_speaks_of_every_event_and_the_end_is_final():
    of_members = {row.event for row in machine.TABLE if issubclass(row.event, messages.ControlMessage)}
    assert {message.__name__ for message in of_members} == FROM_MEMBERS
    assert {row.event for row in machine.TABLE} - of_members == set(MachineEvent.__args__) - {FromMember}
    assert all(JobPhase.ENDED not in row.leads for row in machine.TABLE)
    assert len(JobPhase) < 10


def test_every_phase_can_be_reached_and_left():
    ways = {(phase, to) for row in machine.TABLE for phase, leads in row.leads.items() for to in leads}
    for phase in JobPhase:
        assert phase is JobPhase.STARTING or any(to is phase and before is not phase for before, to in ways)
        assert phase is JobPhase.ENDED or any(before is phase and to is not phase for before, to in ways)


def test_all_invariants_are_on_the_page():
    numbers = re.findall(r"^(\d+)\.", machine_page.invariants(), re.MULTILINE)
    assert numbers == [str(number) for number in range(1, 11)]


def test_a_way_that_the_table_does_not_know_is_not_drawn(monkeypatch):
    rows = tuple(row for row in machine.TABLE if row.event.__name__ != "StopRequested")
    monkeypatch.setattr(machine, "TABLE", rows)
    with pytest.raises(KeyError, match="StopRequested"):
        machine_page.main_way()
