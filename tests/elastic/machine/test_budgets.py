"""What a failure costs its slot: back-off, budgets, second chances, the end."""

from __future__ import annotations

import pytest
from tests.elastic.machine.machine_driver import (
    Driven,
    asked,
    exception_of,
    failure_at,
    hello_of,
    installed_by,
    leave_of,
    only,
    sent,
    some,
    started,
    vote_of,
)

from paceline.control.messages import Prepare
from paceline.elastic.machine import budgets
from paceline.elastic.machine.actions import Action, EndJob, InstallView, RecordVerdict, StartWorker
from paceline.elastic.machine.machine_events import AgentJoined, AgentLost, WorkerLost
from paceline.elastic.machine.settings import MachineSettings
from paceline.elastic.machine.state import JobPhase, Slot


def fail(job: Driven, slot: int, kind: str = "crash") -> list[Action]:
    """The worker of this slot fails, and the others form a view."""
    told = job.tell(WorkerLost(job.of_slot(slot), kind, "gone"))  # type: ignore[arg-type]
    if job.state.phase is JobPhase.PREPARING:
        job.form_view()
    return told


def come_back(job: Driven, slot: int) -> None:
    job.tell(hello_of(job.of_slot(slot), slot))
    job.wait(0.5)
    job.form_view()


def test_waits_grow_and_are_the_same_for_the_same_seed():
    settings = MachineSettings(workers=1, shards=1, backoff=0.5, backoff_most=4.0, jitter=0.5, seed=7)
    waits = [budgets.wait_before_start(settings, 3, count, count) for count in range(1, 9)]
    assert waits[0] == 0.0
    for wait, most in zip(waits[1:], [0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0], strict=True):
        assert most / 2 <= wait <= most
    assert waits == [budgets.wait_before_start(settings, 3, count, count) for count in range(1, 9)]
    assert waits[1:] != [budgets.wait_before_start(settings, 2, count, count) for count in range(2, 9)]


def test_the_first_replacement_starts_at_once_and_the_second_waits():
    job = Driven(3, 6, jitter=0.0).running()
    job.beat_all()
    assert started(fail(job, 1)) == [1]
    come_back(job, 1)
    assert started(fail(job, 1)) == []
    job.beat_all()
    assert started(job.wait(0.4)) == []
    assert started(job.wait(0.2)) == [1]


def test_good_work_is_remembered_instead_of_failures():
    job = Driven(3, 6, forgive_seconds=20.0).running()
    job.beat_all()
    fail(job, 1)
    come_back(job, 1)
    for steps in range(6, 60):
        job.beat_all(steps=steps)
        job.wait(0.5)
    assert started(fail(job, 1)) == [1]
    assert job.state.slots[1].failures == 1


def test_a_spent_budget_leaves_the_job_smaller_and_then_ends_it():
    job = Driven(3, 6, max_worker_failures=1, min_workers=2).running()
    job.beat_all()
    fail(job, 2)
    fail(job, 2)
    assert job.state.slots[2].given_up
    assert job.state.phase is JobPhase.RUNNING
    fail(job, 1)
    told = fail(job, 1)
    verdict = only(told, RecordVerdict)
    assert (verdict.waiting, verdict.done) == ("", "the job ends")
    assert only(told, EndJob).ok is False


def test_preemptions_have_their_own_budget():
    job = Driven(2, 4, max_worker_failures=1, max_preemptions=2).running()
    job.beat_all()
    for _ in range(2):
        assert started(fail(job, 1, "preempted")) == [1]
        come_back(job, 1)
    assert job.state.slots[1].failures == 0
    fail(job, 1, "preempted")
    assert job.state.slots[1].given_up


def test_who_was_killed_for_memory_comes_back_with_fewer_shards():
    job = Driven(4, 8).running()
    job.beat_all()
    fail(job, 1, "memory")
    job.tell(hello_of(job.of_slot(1), 1))
    plan = job.form_view()
    counts = dict(zip(plan.slots, [len(mine) for mine in plan.shards], strict=True))
    assert counts[1] < min(counts[slot] for slot in (0, 2, 3))


def test_good_work_gives_the_weight_back_that_a_kill_for_memory_took():
    job = Driven(4, 8, forgive_seconds=60.0).running()
    job.beat_all()
    fail(job, 1, "memory")
    assert job.state.slots[1].weight == 0.5
    job.tell(hello_of(job.of_slot(1), 1))
    job.form_view()
    job.beat_all()
    job.now += 61.0
    job.beat_all(steps=9)
    fail(job, 1, "crash")
    assert job.state.slots[1].weight == 1.0


def test_time_without_a_committed_step_is_no_good_work():
    """A worker that keeps a view from forming was forgiven every failure, for 90 s of installing."""
    job = Driven(4, 8, forgive_seconds=60.0, max_worker_failures=3).running()
    job.beat_all()
    for count in (1, 2, 3):
        fail(job, 1, "silent")
        job.wait(10.0)
        job.join_all()
        job.report_all()
        job.now += 90.0
        job.install_all()
        job.beat_all()
        assert job.state.slots[1].failures == count
    fail(job, 1, "silent")
    assert job.state.slots[1].given_up


def test_an_error_of_the_user_ends_the_job_at_once():
    job = Driven(3, 6).running()
    end = only(job.tell(exception_of(2, "ConfigError: no such file", "user", 0, -1)), EndJob)
    assert (end.ok, end.failed) == (False, 2)


def test_an_error_gets_a_second_chance_but_not_in_the_same_step():
    job = Driven(3, 6).running()
    job.beat_all()
    assert started(job.tell(exception_of(2, "OSError: stale handle", "code", 7, 3))) == [1]
    job.form_view()
    assert job.tell(WorkerLost(2, "exit", "exit code 1")) == []
    assert not some(job.tell(exception_of(1, "OSError: stale handle", "code", 9, 3)), EndJob)
    job.form_view()
    end = only(job.tell(exception_of(3, "OSError: stale handle", "code", 7, 3)), EndJob)
    assert (end.ok, end.failed) == (False, 3)


def test_if_nothing_ever_worked_the_job_ends():
    job = Driven(2, 4, max_worker_failures=50)
    told: list[Action] = []
    for _ in range(2):
        for slot in (0, 1):
            if job.state.phase is not JobPhase.ENDED and job.state.slots[slot].worker is not None:
                told += job.tell(WorkerLost(job.of_slot(slot), "exit", "exit code 1"))
    assert only(told, EndJob).ok is False


def test_a_worker_that_never_says_hello_is_given_up_on():
    job = Driven(2, 4, start_seconds=5.0)
    job.tell(hello_of(1, 0))
    told = job.wait(1.0)
    assert not some(told, StartWorker)


@pytest.mark.parametrize("kind", ["crash", "silent", "hung"])
def test_what_befell_a_slot_does_not_count_against_another(kind):
    job = Driven(3, 6).running()
    job.beat_all()
    fail(job, 1, kind)
    assert [job.state.slots[slot].failures for slot in (0, 1, 2)] == [0, 1, 0]


def test_a_machine_brings_slots_and_takes_them_away():
    job = Driven(2, 8).running()
    job.beat_all()
    told = job.tell(AgentJoined(1, 2, "other"))
    assert [(start.slot, start.agent_id) for start in some(told, StartWorker)] == [(2, 1), (3, 1)]
    job.join_all()
    job.wait(0.5)
    assert job.form_view().slots == (0, 1, 2, 3)
    told = job.tell(AgentLost(1, "it left"))
    assert asked(told).members == (1, 2)
    assert started(told) == []
    assert sorted(job.state.slots) == [0, 1]
    assert job.tell(AgentLost(1, "it left")) == []


def test_a_dissenter_is_expelled_and_all_go_back():
    job = Driven(3, 6).running()
    job.beat_all(steps=10)
    for member in (1, 2, 3):
        job.tell(vote_of(member, 5, "good"))
    assert job.state.agreed_step == 5
    job.tell(vote_of(1, 10, "good"))
    job.tell(vote_of(2, 10, "bad"))
    told = job.tell(vote_of(3, 10, "good"))
    assert only(told, RecordVerdict).slot == 1
    plan = job.form_view((10, 0, 0))
    assert (plan.restore, plan.restore_before, plan.members) == (True, 5, (1, 3))


def test_a_checkpoint_from_the_wrong_time_is_not_restored_later_either():
    job = Driven(3, 6).running()
    job.beat_all(steps=10)
    for member, digest in ((1, "good"), (2, "bad"), (3, "good")):
        job.tell(vote_of(member, 10, digest))
    job.form_view((10, 0, 0))
    for member in list(job.members):
        job.tell(WorkerLost(member, "crash", "killed"))
    plan = only(job.join_all(), InstallView).plan
    assert (plan.restore, plan.restore_before) == (True, 0)


def test_a_job_that_has_too_few_workers_without_the_dissenter_ends():
    job = Driven(workers=3, shards=6, min_workers=3, max_worker_failures=0).running()
    for member, digest in ((1, "good"), (2, "bad"), (3, "good")):
        told = job.tell(vote_of(member, 10, digest))
    assert only(told, EndJob).ok is False
    assert sent(told, Prepare) == []


def test_a_vote_of_one_that_is_gone_still_counts():
    job = Driven(3, 6).running()
    job.beat_all()
    job.tell(vote_of(1, 5, "good"))
    job.tell(vote_of(2, 5, "bad"))
    job.tell(WorkerLost(3, "crash", "killed"))
    assert job.state.restore
    assert job.state.dispute is not None
    job = Driven(3, 6).running()
    job.beat_all()
    job.tell(vote_of(1, 5, "good"))
    job.tell(vote_of(3, 5, "good"))
    job.tell(vote_of(2, 5, "bad"))
    assert job.state.restore


def test_to_whom_all_data_looks_damaged_is_the_one_to_go():
    job = Driven(4, 8).running()
    job.beat_all()
    told = job.tell(failure_at(1, 1, "damaged", accused=(2, 3, 4)))
    assert only(told, RecordVerdict).slot == 0


def test_no_worker_left_that_could_come_stops_the_job_instead_of_losing_it():
    job = Driven(1, 2, max_preemptions=0).running()
    job.beat_all()
    job.tell(leave_of(1, "SIGTERM"))
    assert job.state.phase is JobPhase.STOPPING


def test_a_dissenter_that_is_gone_already_takes_all_back_too():
    job = Driven(3, 6).running()
    job.beat_all()
    job.tell(vote_of(2, 5, "bad"))
    job.tell(leave_of(2, "SIGTERM"))
    job.form_view()
    job.tell(vote_of(1, 5, "good"))
    told = job.tell(vote_of(3, 5, "good"))
    assert asked(told).abort is True
    assert job.form_view().restore is True


@pytest.mark.parametrize("told", [True, False])
def test_what_was_agreed_on_before_going_back_says_nothing_about_the_steps_done_again(told):
    job = Driven(3, 6).running()
    job.beat_all(steps=20)
    for member in (1, 2, 3):
        job.tell(vote_of(member, 20, "good", 1))
    for member, digest in ((1, "good"), (2, "bad"), (3, "good")):
        job.tell(vote_of(member, 25, digest, 1))
    job.report_all((25, 3, 0))
    for member in (1, 3):
        job.tell(installed_by(member, 2, (15, 2, 0) if told else None))
    job.tell(vote_of(1, 16, "good", 2))
    job.tell(hello_of(job.of_slot(1), 1))
    assert job.state.agreed_step == 15
    assert job.state.votes == {(16, ""): {1: "good"}}


def test_one_vote_alone_is_no_agreement():
    job = Driven(2, 4).running()
    job.beat_all()
    job.tell(vote_of(1, 5, "whatever"))
    job.tell(WorkerLost(2, "crash", "killed"))
    job.form_view()
    job.tell(vote_of(1, 10, "whatever"))
    assert job.state.agreed_step == 0


def test_a_worker_that_left_because_no_supervisor_was_there_costs_nothing():
    job = Driven(2, 4, max_worker_failures=0, max_preemptions=0).running()
    job.beat_all()
    for _ in range(3):
        assert started(fail(job, 1, "unattended")) == [1]
        come_back(job, 1)
    slot = job.state.slots[1]
    assert (slot.failures, slot.given_up, job.state.preemptions) == (0, False, 0)


def test_steps_that_only_reports_tell_of_are_steps():
    """All workers die twice before a heartbeat has told of the first step: the job did work."""
    job = Driven(2, 4)
    job.join_all()
    for number in sorted(job.state.pending):
        job.tell(installed_by(number, job.state.generation, (3, 0, 0)))
    assert not job.state.committed
    job.tell(WorkerLost(job.of_slot(0), "crash", "killed"))
    job.report_all((3, 0, 1))
    assert not job.state.committed, "an evaluation is no step"
    job.install_all()
    job.tell(WorkerLost(job.of_slot(1), "crash", "killed"))
    assert not job.state.committed

    job = Driven(2, 4)
    job.join_all()
    for number in sorted(job.state.pending):
        job.tell(installed_by(number, job.state.generation, (3, 0, 0)))
    job.tell(WorkerLost(job.of_slot(0), "crash", "killed"))
    job.report_all((4, 0, 0))
    assert job.state.committed


def test_failures_of_a_slot_are_counted_from_the_first():
    slot = Slot(0)
    for total in (1, 2, 3):
        # Forgiven each time: the count in a row starts again, and the draw of the next wait is another one.
        slot = budgets.after_failure(MachineSettings(workers=1, shards=1), slot, "crash", 1e9, 0.0)
        assert (slot.failures, slot.total_failures) == (1, total)
