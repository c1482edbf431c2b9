"""What a supervisor that begins again knows: nothing of a job is forgotten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.elastic.machine.machine_driver import finish_of, hello_of, installed_by, some, started
from tests.elastic.machine.made_states import NOW, after, change, made

from paceline.control.messages import ViewPlan
from paceline.elastic.machine import machine
from paceline.elastic.machine.actions import EndJob, KillWorker, RequestDial, StartWorker
from paceline.elastic.machine.hash_votes import Dispute
from paceline.elastic.machine.machine_events import ProcessProbed, SupervisorBegan, Tick, WorkerLost
from paceline.elastic.machine.settings import MachineSettings
from paceline.elastic.machine.state import JobPhase, JobState, Slot, Worker, WorkerStatus


def begun(event: SupervisorBegan, workers: int = 3, **settings: Any) -> tuple[JobState, list[Any]]:
    return after(JobState(MachineSettings(workers=workers, shards=6, **settings)), event)


def rich() -> JobState:
    """A job in which a bit of everything has happened."""
    job = made((0, 0, 1))
    job.workers[4] = Worker(4, 1, 0, WorkerStatus.STARTING, NOW)
    job.workers[5] = Worker(5, 3, 1, WorkerStatus.READY, NOW)
    change(job, 2, status=WorkerStatus.LEAVING, leave_reason="preempted")
    job.slots[1] = Slot(1, worker=4, failures=2, weight=0.5)
    job.slots[3] = Slot(3, 1, worker=5)
    job.slots[4] = Slot(4, failures=4, given_up=True)
    job.last_message_at[5] = NOW
    job.next_member = 9
    job.preemptions, job.committed, job.shard_seconds = 6, True, 0.25
    job.agreed_step, job.restore, job.restore_before, job.tainted_until = 40, True, 38, 44
    job.lineage = {2: 1}
    job.dispute = Dispute((41, ""), {1: "a", 3: "b"})
    job.dispute_count = 1
    job.votes = {(43, ""): {1: "x", 3: "y"}}
    job.trails = {1: ((41, "0/a"),)}
    return job


def test_nothing_is_forgotten():
    job = rich()
    again, actions = begun(machine.snapshot(job))
    assert started(actions) == []
    same = (
        "generation view next_member preemptions committed shard_seconds agreed_step restore restore_before "
        "tainted_until lineage dispute dispute_count votes trails stop_reason fatal_failure"
    )
    for name in same.split():
        assert getattr(again, name) == getattr(job, name), name
    assert {n: (w.slot, w.agent_id) for n, w in again.workers.items()} == {
        1: (0, 0),
        2: (1, 0),
        3: (2, 1),
        4: (1, 0),
        5: (3, 1),
    }
    fresh = WorkerStatus.STARTING
    assert [again.workers[n].status for n in (1, 2, 3, 4, 5)] == [
        WorkerStatus.MEMBER,
        WorkerStatus.LEAVING,
        WorkerStatus.MEMBER,
        fresh,
        fresh,
    ]
    assert [again.workers[n].reconnected for n in (1, 2, 3, 4, 5)] == [False, False, False, True, True]
    assert again.workers[2].leave_reason == "preempted"
    assert {n: s.worker for n, s in again.slots.items()} == {0: 1, 1: 4, 2: 3, 3: 5, 4: None}
    assert (again.slots[1].failures, again.slots[1].weight) == (2, 0.5)
    assert (again.slots[3].agent_id, again.slots[4].given_up) == (1, True)
    assert set(again.agents) == {1}
    assert set(again.last_message_at.values()) == {NOW}
    assert again.phase is JobPhase.RETURNING
    assert again.next_tick_at == NOW + 1.0
    clocks = (again.started_at, again.asked_at, again.progressed_at, again.assigned_at, again.productive_at)
    assert clocks == (NOW,) * 5


def test_what_is_known_of_a_stop_and_of_a_failure_is_known_again():
    job = rich()
    job.stop_reason, job.fatal_failure = "enough", (2, "it raised")
    job.slots[0] = replace(job.slots[0], worker=None, start_at=NOW)
    del job.workers[1]
    again, actions = begun(machine.snapshot(job))
    assert (again.stop_reason, again.stop_requested_at, again.fatal_failure) == (
        "enough",
        NOW,
        (2, "it raised"),
    )
    assert started(actions) == []


def test_votes_and_trails_are_remembered_only_while_they_decide_something():
    job = rich()
    job.restore, job.dispute = False, None
    told = machine.snapshot(job)
    assert (told.votes, told.trails) == ((), {})
    job.restore = True
    told = machine.snapshot(job)
    assert told.votes == ((43, "", {1: "x", 3: "y"}),)
    assert told.trails == {1: ((41, "0/a"),)}
    job.restore, job.dispute = False, Dispute((41, ""), {})
    assert machine.snapshot(job).votes != ()


def test_a_slot_that_is_not_wanted_is_not_remembered_and_its_member_leaves():
    job = made((0, 0, 0))
    job.slots[1] = replace(job.slots[1], wanted=False)
    change(job, 2, status=WorkerStatus.LEAVING, leave_reason="scaled")
    told = machine.snapshot(job)
    assert set(told.slots) == {0, 2}
    again, _ = begun(told)
    assert again.workers[2].leave_reason == "scaled"
    assert again.workers[2].status is WorkerStatus.LEAVING
    assert again.slots[1].wanted is False
    assert again.slots[1].worker == 2


def test_a_member_of_a_slot_that_was_given_up_leaves_and_does_not_get_it_back():
    again, _ = begun(
        SupervisorBegan(3, {1: (0, 0), 2: (1, 0)}, 3, slots={0: (0, 0, 1.0, False), 1: (0, 4, 1.0, True)})
    )
    assert (again.workers[2].leave_reason, again.workers[2].status) == ("preempted", WorkerStatus.LEAVING)
    assert (again.slots[1].worker, again.slots[1].given_up) == (None, True)
    assert again.workers[1].status is WorkerStatus.MEMBER


def test_without_slots_all_are_wanted_and_begin_anew():
    again, actions = begun(SupervisorBegan(3, {7: (1, 0)}), workers=3)
    assert set(again.slots) == {0, 1, 2}
    assert again.slots[1].worker == 7
    assert again.slots[1].wanted
    assert started(actions) == [0, 2]
    assert again.next_member == 10
    assert {again.slots[0].worker, again.slots[2].worker} == {8, 9}


def test_members_are_kept_in_the_order_of_their_numbers():
    told = machine.snapshot(made((0, 0, 0)))
    job, _ = begun(replace(told, members=dict(reversed(list(told.members.items())))))
    assert list(job.workers) == [1, 2, 3]


def test_numbers_are_never_given_twice():
    again, _ = begun(SupervisorBegan(3, {7: (0, 0)}, next_member=20), workers=1)
    assert again.next_member == 20
    again, _actions = begun(SupervisorBegan(), workers=1)
    assert again.next_member == 2
    assert list(again.workers) == [1]


def test_the_view_is_the_one_that_was_sent_or_that_of_the_members():
    view = ViewPlan(generation=3, members=(1, 2), slots=(0, 1), shards=((0, 1, 2), (3, 4, 5)))
    members = {1: (0, 0), 2: (1, 0)}
    assert begun(SupervisorBegan(3, members, 3, view=view))[0].view == view
    unknown = begun(SupervisorBegan(3, {2: (0, 0), 1: (1, 0)}, 3))[0].view
    assert unknown == ViewPlan(generation=3, members=(2, 1), slots=(0, 1), shards=())
    assert (unknown.source, unknown.restore, unknown.restore_before, unknown.disputed) == (-1, False, -1, -1)
    only_starting = SupervisorBegan(3, members, 3, starting=(1, 2), view=view)
    again, _ = begun(only_starting, workers=2)
    assert again.view is None
    assert again.phase is JobPhase.STARTING
    assert again.next_tick_at == NOW + again.settings.start_seconds


def test_no_member_to_stop_and_too_few_to_go_on_are_ends():
    again, actions = begun(SupervisorBegan(3, {}, 3, stop_reason="enough"))
    (ended,) = some(actions, EndJob)
    assert (ended.ok, started(actions)) == (False, [])
    spent = dict.fromkeys(range(2), (0, 4, 1.0, True))
    again, actions = begun(SupervisorBegan(3, {}, 3, slots={**spent, 2: (0, 0, 1.0, False)}))
    assert not some(actions, EndJob)
    again, actions = begun(SupervisorBegan(3, {}, 3, slots={**spent, 2: (0, 0, 1.0, False)}), min_workers=2)
    assert some(actions, EndJob)
    again, actions = begun(SupervisorBegan(3, {}, 3, slots=spent), min_workers=0)
    assert some(actions, EndJob)
    assert again.phase is JobPhase.ENDED


def test_a_new_job_distrusts_no_checkpoint():
    job, _ = begun(SupervisorBegan(), workers=1)
    job, _ = after(job, hello_of(1))
    job, _ = after(job, installed_by(1, job.generation, (5, 0, 0)))
    told = machine.snapshot(job)
    assert (told.restore, told.restore_before, told.tainted_until) == (False, -1, -1)


def test_a_job_begins_once():
    job = made((0, 0))
    again, actions = after(replace_phase(job, JobPhase.STARTING), SupervisorBegan())
    assert actions == []
    assert again.generation == 3


def replace_phase(job: JobState, phase: JobPhase) -> JobState:
    copy = job.copy()
    copy.phase = phase
    if phase is JobPhase.STARTING:
        copy.view, copy.workers, copy.last_message_at = None, {}, {}
        copy.slots = {n: Slot(n, start_at=NOW + 50.0) for n in copy.slots}
        copy.next_tick_at = NOW + 50.0
    return copy


# members come back


def returning(*agents: int, **settings: Any) -> JobState:
    """Members 1, 2, ... are expected back in generation 3."""
    told = machine.snapshot(made(agents or (0, 0, 0), **settings))
    return begun(told, workers=len(agents or (0, 0, 0)), **settings)[0]


def test_when_all_are_back_in_the_view_it_goes_on():
    job = returning()
    for member in (1, 2):
        job, actions = after(job, hello_of(member, member - 1, 0, 3, (5, 0, 0)))
        assert job.phase is JobPhase.RETURNING
        assert job.workers[member].reconnected
    job, actions = after(job, hello_of(3, 2, 0, 3, (5, 0, 0)), NOW + 0.5)
    assert (job.phase, job.generation, actions) == (JobPhase.RUNNING, 3, [])
    assert job.last_message_at[3] == NOW + 0.5


@pytest.mark.parametrize("seen", [2, 4])
def test_one_that_is_back_from_another_view_makes_all_meet(seen):
    job = returning(0, 0)
    job, _ = after(job, hello_of(1, 0, 0, seen, (5, 0, 0)))
    assert job.abort
    job, _ = after(job, hello_of(2, 1, 0, 3, (5, 0, 0)))
    assert job.phase is JobPhase.PREPARING
    assert job.generation == max(seen, 3) + 1


def test_one_that_is_back_from_another_view_makes_all_meet_also_when_a_starting_worker_is_lost():
    old = made((0, 0))
    old.workers[3] = Worker(3, 2, 0, WorkerStatus.STARTING, NOW)
    old.slots[2] = Slot(2, worker=3)
    old.next_member = 4
    job, _ = begun(machine.snapshot(old), workers=3)
    job, _ = after(job, hello_of(1, 0, 0, 2, (5, 0, 0)))
    job, _ = after(job, WorkerLost(3, "crash", "killed"))
    job, _ = after(job, hello_of(2, 1, 0, 3, (5, 0, 0)))
    assert (job.phase, job.abort) == (JobPhase.PREPARING, True)


def test_what_was_to_be_restored_is_restored_after_the_restart():
    old = made((0, 0))
    old.restore = True
    job, _ = begun(machine.snapshot(old), workers=2)
    job, _ = after(job, hello_of(1, 0, 0, 3))
    job, _ = after(job, hello_of(2, 1, 0, 3))
    assert (job.phase, job.abort) == (JobPhase.PREPARING, True)


def test_members_of_which_one_is_gone_meet_without_it():
    old = made((0, 0, 0))
    del old.workers[3]
    job, _ = begun(replace(machine.snapshot(old)), workers=3)
    for member in (1, 2):
        job, _ = after(job, hello_of(member, member - 1, 0, 3))
    assert job.phase is JobPhase.PREPARING


def test_who_is_back_and_done_ends_the_job():
    job = returning(0, 0)
    for member in (1, 2):
        job, actions = after(job, finish_of(member, (9, 1, 0), "same", None, 3))
        assert job.workers[member].reconnected
    (ended,) = some(actions, EndJob)
    assert ended.ok


def test_with_the_last_that_is_back_and_done_the_others_go_on():
    job = returning(0, 0)
    job, _ = after(job, hello_of(1, 0, 0, 3, (8, 0, 0)))
    assert job.phase is JobPhase.RETURNING
    job, _ = after(job, finish_of(2, (9, 1, 0), "same", None, 3))
    assert job.phase is JobPhase.RUNNING


def test_who_does_not_come_back_in_time_is_killed():
    job = returning(0, 0)
    job, _ = after(job, hello_of(1, 0, 0, 3))
    late = 4 * job.settings.silence_least
    job.last_message_at[1] = NOW + late
    early, actions = after(job, Tick(), NOW + late - 0.1)
    assert not some(actions, KillWorker)
    assert early.phase is JobPhase.RETURNING
    job, actions = after(job, Tick(), NOW + late)
    assert [kill.member for kill in some(actions, KillWorker)] == [2]
    assert job.phase is JobPhase.PREPARING
    assert job.pending == frozenset({1})
    assert job.slots[1].failures == 1


def test_who_cannot_come_back_because_its_interpreter_is_held_is_waited_for():
    job = returning(0, 0)
    job, _ = after(job, hello_of(1, 0, 0, 3))
    late = NOW + 4 * job.settings.silence_least
    job.last_message_at[1] = late
    job.probes[2] = (late - 0.1, ProcessProbed(2, stopped=False))
    job, actions, reason = machine.step(job, Tick(), late)
    assert (job.phase, some(actions, KillWorker)) == (JobPhase.RETURNING, [])
    assert "no member is past its limit; 1 member has not come back" in reason


def test_a_replacement_dials_a_member_once_that_member_is_back():
    """Before, the supervisor does not know where the member listens."""
    job, _ = begun(machine.snapshot(made((0, 0, 1))))
    job, actions = after(job, WorkerLost(3, "crash", "killed"))
    (start,) = some(actions, StartWorker)
    job, actions = after(job, hello_of(start.member, 2, 1))
    assert some(actions, RequestDial) == []
    job, actions = after(job, hello_of(2, 1, 0, generation=3))
    assert some(actions, RequestDial) == [RequestDial(start.member, (2,))]
    job, actions = after(job, Tick(0.0))
    assert some(actions, RequestDial) == []
    job, actions = after(job, hello_of(1, 0, 0, generation=3))
    assert some(actions, RequestDial) == [RequestDial(start.member, (1,))]
