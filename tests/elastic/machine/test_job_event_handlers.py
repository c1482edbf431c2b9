"""Scaling, stopping, and a supervisor that begins again."""

from __future__ import annotations

import dataclasses

import pytest
from tests.elastic.machine.machine_driver import (
    Driven,
    asked,
    failure_at,
    finish_of,
    hello_of,
    only,
    only_sent,
    sent,
    some,
    started,
)

from paceline.control.messages import Dismissed, Prepare
from paceline.elastic.machine import machine
from paceline.elastic.machine.actions import Action, EndJob, KillWorker, RecordFailure
from paceline.elastic.machine.machine_events import (
    ScaleRequested,
    StopRequested,
    SupervisorBegan,
    Tick,
    WorkerLost,
)
from paceline.elastic.machine.state import JobPhase


def test_growing_starts_workers_for_new_slots():
    job = Driven(2, 8).running()
    job.beat_all()
    assert started(job.tell(ScaleRequested(4))) == [2, 3]
    job.join_all()
    job.wait(0.5)
    plan = job.form_view()
    assert plan.slots == (0, 1, 2, 3)
    assert [len(mine) for mine in plan.shards] == [2, 2, 2, 2]


def test_shrinking_lets_the_highest_leave_at_a_boundary():
    job = Driven(4, 8).running()
    job.beat_all()
    told = job.tell(ScaleRequested(2))
    assert asked(told).abort is False
    told = job.report_all()
    assert {bye.member for bye in sent(told, Dismissed)} == {3, 4}
    assert not some(told, RecordFailure)
    job.install_all()
    assert sorted(job.state.slots) == [0, 1]


def test_a_change_of_mind_keeps_who_has_not_left():
    job = Driven(3, 6).running()
    job.beat_all()
    job.tell(ScaleRequested(2))
    assert started(job.tell(ScaleRequested(3))) == []
    assert job.form_view().slots == (0, 1, 2)


def test_a_size_that_makes_no_sense_is_refused_with_a_reason():
    job = Driven(3, 6, min_workers=2).running()
    for wanted in (0, -4, 1):
        assert job.tell(ScaleRequested(wanted)) == []
        assert "fewer" in job.reason
    assert job.tell(ScaleRequested(3)) == []
    limited = Driven(3, 6, most_workers=6).running()
    assert limited.tell(ScaleRequested(7)) == []
    assert "more than the 6 shards" in limited.reason
    assert len(started(limited.tell(ScaleRequested(6)))) == 3


def test_asking_for_more_gives_a_spent_slot_another_chance():
    job = Driven(2, 4, max_worker_failures=0).running()
    job.beat_all()
    job.tell(WorkerLost(2, "crash", "killed"))
    job.form_view()
    assert job.state.slots[1].given_up
    assert started(job.tell(ScaleRequested(2))) == [1]


def test_a_stop_before_any_worker_came_ends_at_once():
    job = Driven(2, 4)
    job.tell(hello_of(1, 0))
    told = job.tell(StopRequested("ctrl-c"))
    assert only_sent(told, Dismissed).member == 1
    assert only(told, KillWorker).member == 2
    end = only(told, EndJob)
    assert (end.ok, end.stopped) == (True, "ctrl-c")


def test_a_stop_that_takes_too_long_ends_with_a_verdict():
    job = Driven(2, 4, stop_seconds=5.0).running()
    job.beat_all()
    job.tell(StopRequested("ctrl-c"))
    assert only(job.wait(6.0), EndJob).ok is False


def test_after_the_end_nothing_is_decided():
    job = Driven(1, 1).running()
    job.tell(finish_of(1, (9, 0, 0), "x"))
    assert job.state.phase is JobPhase.ENDED
    assert machine.next_deadline(job.state) is None
    for event in (WorkerLost(1, "crash", "x"), StopRequested("x"), ScaleRequested(4), Tick()):
        assert job.tell(event) == []


def again(job: Driven) -> Driven:
    """The supervisor dies, and another one begins with what it wrote down."""
    settings = job.state.settings
    return Driven(settings.workers, settings.shards, machine.snapshot(job.state))


def test_a_new_supervisor_goes_on_in_the_old_view_when_all_come_back():
    job = Driven(3, 6).running()
    job = again(job)
    assert job.state.phase is JobPhase.RETURNING
    assert job.actions == []
    for member in (3, 1, 2):
        told = job.tell(hello_of(member, member - 1, generation=1, progress=(5, 0, 0)))
        assert not sent(told, Prepare)
    assert (job.state.phase, job.state.generation) == (JobPhase.RUNNING, 1)
    assert job.state.view is not None
    assert job.state.view.shards == ((0, 1), (2, 3), (4, 5))


def test_with_only_the_numbers_it_goes_on_too():
    job = Driven(2, 4, began=SupervisorBegan(3, {5: (0, 0), 6: (1, 0)}, 7))
    for member in (5, 6):
        job.tell(hello_of(member, member - 5, generation=3, progress=(5, 0, 0)))
    assert (job.state.phase, job.state.generation) == (JobPhase.RUNNING, 3)


def test_who_does_not_come_back_is_lost():
    job = again(Driven(3, 6).running())
    for member in (1, 2):
        job.tell(hello_of(member, member - 1, generation=1, progress=(5, 0, 0)))
        job.beat_all()
    told = job.wait(9.0)
    assert only(told, RecordFailure).slot == 2
    assert asked(told).members == (1, 2)
    assert asked(told).generation == 2


def test_a_regroup_that_was_interrupted_is_done_again_with_another_generation():
    job = Driven(3, 6).running()
    job.tell(WorkerLost(3, "crash", "killed"))
    job = again(job)
    for member in (1, 2):
        told = job.tell(hello_of(member, member - 1, generation=1, progress=(5, 0, 0)))
    assert (asked(told).generation, asked(told).abort) == (3, True)


def test_what_broke_without_a_supervisor_is_repaired():
    job = again(Driven(3, 6).running())
    job.tell(hello_of(1, 0, generation=1, progress=(5, 0, 0)))
    job.tell(failure_at(1, 1, "a peer is gone"))
    job.tell(WorkerLost(2, "crash", "killed"))
    told = job.tell(hello_of(3, 2, generation=1, progress=(5, 0, 0)))
    assert asked(told).members == (1, 3)


def test_a_generation_is_never_used_twice():
    job = Driven(2, 4, began=SupervisorBegan(3, {5: (0, 0), 6: (1, 0)}, 7))
    job.tell(hello_of(5, 0, generation=9, progress=(5, 0, 0)))
    told = job.tell(hello_of(6, 1, generation=9, progress=(5, 0, 0)))
    assert asked(told).generation == 10


def test_workers_that_were_starting_are_still_expected():
    job = Driven(3, 6).running()
    job.beat_all()
    job.tell(WorkerLost(3, "crash", "killed"))
    job.form_view()
    job = again(job)
    assert job.actions == []
    for member in (1, 2):
        job.tell(hello_of(member, member - 1, generation=2, progress=(5, 0, 0)))
    assert job.state.phase is JobPhase.RUNNING
    assert asked(job.tell(hello_of(4, 2))).abort is False


def test_a_run_that_ended_without_a_supervisor_ends():
    job = again(Driven(2, 4).running())
    told: list[Action] = []
    for member in (1, 2):
        told += job.tell(hello_of(member, member - 1, generation=1, progress=(9, 0, 0)))
        told += job.tell(finish_of(member, (9, 0, 0), "same", None, 1))
    assert only(told, EndJob).ok


@pytest.mark.parametrize("committed", [True, False])
def test_that_steps_were_committed_is_remembered(committed):
    """Else a job that has lost each worker twice by now would count as one that never worked."""
    job = Driven(2, 4, max_worker_failures=9).running()
    if committed:
        job.beat_all()
    known = machine.snapshot(job.state)
    failing = {
        number: (agent_id, 2, weight, False) for number, (agent_id, _, weight, _) in known.slots.items()
    }
    job = Driven(2, 4, dataclasses.replace(known, slots=failing), max_worker_failures=9)
    # No member has said yet how far it is.
    assert bool(some(job.tell(WorkerLost(2, "crash", "killed")), EndJob)) is not committed


def test_budgets_are_remembered():
    job = Driven(2, 4, max_worker_failures=3).running()
    job.beat_all()
    job.tell(WorkerLost(2, "memory", "killed"))
    job = again(job)
    assert (job.state.slots[1].failures, job.state.slots[1].weight) == (1, 0.5)
