"""Workers come into slots and go out of them: what is recorded, what is started again and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.elastic.machine.machine_driver import only, sent, some, started
from tests.elastic.machine.made_states import NOW, beat, change, fresh_actions, made

from paceline.control.messages import Dismissed, MemberReport
from paceline.elastic.machine import slots
from paceline.elastic.machine.actions import Action, KillWorker, RecordFailure, RecordVerdict, StartWorker
from paceline.elastic.machine.hang_detection import FaultFinding
from paceline.elastic.machine.machine_events import ProcessProbed
from paceline.elastic.machine.state import JobState, Slot, WorkerStatus


def job_of(*agents: int, **settings: Any) -> JobState:
    job = made(agents or (0, 0), **settings)
    job.next_tick_at = NOW + 500.0
    return job


def lost(job: JobState, member: int, kind: Any = "crash", **more: Any) -> list[Action]:
    out = fresh_actions(job)
    slots.lose(job, job.workers[member], kind, "a test", **more)
    return out


def test_a_start_gives_the_next_number_to_the_slot():
    job = job_of(start_seconds=30.0)
    job.slots[2] = Slot(2, 1, start_at=NOW)
    out = fresh_actions(job)
    assert slots.start_due(job) == [2]
    assert out == [StartWorker(3, 2, 1)]
    assert (job.next_member, job.slots[2].worker, job.slots[2].start_at) == (4, 3, None)
    worker = job.workers[3]
    assert (worker.slot, worker.agent_id, worker.status, worker.since) == (2, 1, WorkerStatus.STARTING, NOW)
    assert job.next_tick_at == NOW + 30.0


def test_only_slots_whose_time_has_come_are_filled():
    job = job_of()
    job.slots.update(
        {2: Slot(2, start_at=NOW + 0.1), 3: Slot(3, start_at=NOW, given_up=True), 4: Slot(4, start_at=NOW)}
    )
    assert slots.start_due(job) == [4]
    assert job.next_tick_at == NOW + 0.1
    job.stop_reason = "enough"
    job.slots[5] = Slot(5, start_at=NOW)
    assert slots.start_due(job) == []


def test_a_loss_is_recorded_and_the_slot_filled_again():
    job = job_of()
    beat(job, 2, "backward")
    out = lost(job, 2)
    failure = only(out, RecordFailure)
    assert (failure.member, failure.slot, failure.phase, failure.kind) == (2, 1, "backward", "crash")
    assert (failure.sure, failure.final, some(out, KillWorker)) == (False, False, [])
    assert (started(out), job.slots[1].worker, job.slots[1].failures) == ([1], 3, 1)
    assert (job.lost_slots, job.failed_at) == ((1,), NOW)


def test_a_loss_whose_phase_is_known_and_that_is_killed():
    job = job_of()
    job.failed_at, job.lost_slots = NOW - 5.0, (7,)
    out = lost(job, 2, kill="it hangs", phase="data", final=True)
    failure = only(out, RecordFailure)
    assert (failure.phase, failure.sure, failure.final) == ("data", True, True)
    assert only(out, KillWorker) == KillWorker(2, "it hangs")
    assert (job.failed_at, list(job.lost_slots)) == (NOW - 5.0, [7, 1])


def test_a_lost_worker_is_taken_off_all_books():
    job = job_of(0, 0, 0)
    beat(job, 2)
    job.probes[2] = (NOW, ProcessProbed(2, True))
    job.stopped_together = frozenset({1, 2})
    job.pending_dials = frozenset({(1, 2), (2, 1), (1, 3)})
    job.reports = {2: MemberReport(generation=3, progress=None, held_shards=(), has_private_state=False)}
    job.pending = frozenset({2, 3})
    lost(job, 2)
    assert 2 not in {*job.workers, *job.last_message_at, *job.heartbeats, *job.probes, *job.reports}
    assert (job.stopped_together, job.pending) == (frozenset({1}), frozenset({3}))
    assert job.pending_dials == frozenset({(1, 3)})


@pytest.mark.parametrize(
    ("kind", "failures", "preemptions", "replacements"),
    [
        ("crash", 1, 0, 0),
        ("preempted", 0, 1, 0),
        ("straggler", 0, 0, 1),
        ("unattended", 0, 0, 0),
        ("restart", 0, 0, 0),
    ],
)
def test_each_kind_of_loss_has_its_budget(kind, failures, preemptions, replacements):
    job = job_of()
    lost(job, 2, kind)
    slot = job.slots[1]
    assert (slot.failures, job.preemptions, slot.replacements) == (failures, preemptions, replacements)


def test_good_work_counts_only_in_a_view():
    for status, failures in ((WorkerStatus.MEMBER, 1), (WorkerStatus.READY, 3)):
        job = job_of(forgive_seconds=60.0)
        job.productive_seconds = 100.0
        change(job, 2, status=status, productive_before=40.0)
        job.slots[1] = replace(job.slots[1], failures=2)
        lost(job, 2)
        assert job.slots[1].failures == failures
    job = job_of(forgive_seconds=0.5)
    change(job, 2, status=WorkerStatus.READY)
    job.slots[1] = replace(job.slots[1], failures=2)
    lost(job, 2)
    assert job.slots[1].failures == 3
    job = job_of(forgive_seconds=60.0)
    job.productive_seconds = 100.0
    change(job, 2, productive_before=40.1)
    job.slots[1] = replace(job.slots[1], failures=2)
    lost(job, 2)
    assert job.slots[1].failures == 3


def test_a_slot_that_is_not_wanted_or_is_another_ones_is_left_alone():
    job = job_of()
    job.slots[1] = replace(job.slots[1], wanted=False)
    lost(job, 2)
    assert sorted(job.slots) == [0]
    job = job_of()
    job.slots[1] = replace(job.slots[1], worker=9)
    lost(job, 2)
    assert (job.slots[1].worker, job.slots[1].failures) == (9, 0)
    job = job_of()
    del job.slots[1]
    lost(job, 2)
    assert sorted(job.slots) == [0]


def test_a_verdict_is_recorded_before_the_kill_and_a_hang_is_counted():
    for kind, hangs in (("hung", 1), ("silent", 0), ("unreachable", 0)):
        job = job_of()
        out = fresh_actions(job)
        slots.expel(job, FaultFinding(job.workers[2], kind, "data", "it does", "all wait"))  # type: ignore[arg-type]
        verdict = only(out, RecordVerdict)
        assert (verdict.member, verdict.slot, verdict.phase) == (2, 1, "data")
        assert (verdict.what, verdict.waiting) == ("it does", "all wait")
        # The phase is that of its last heartbeat.
        assert (verdict.sure, only(out, RecordFailure).sure) == (False, False)
        assert out.index(verdict) < out.index(only(out, KillWorker))
        assert (job.hangs, only(out, RecordFailure).kind) == (hangs, kind)


@pytest.mark.parametrize(
    ("reason", "kinds"), [("preempted", ["preempted"]), ("straggler", ["straggler"]), ("scaled", [])]
)
def test_who_leaves_is_let_go_in_peace(reason, kinds):
    job = job_of()
    out = fresh_actions(job)
    slots.depart(job, replace(job.workers[2], leave_reason=reason))
    assert [failure.kind for failure in some(out, RecordFailure)] == kinds
    assert not any(failure.sure or failure.final for failure in some(out, RecordFailure))
    assert [one.member for one in sent(out, Dismissed)] == [2]
    assert (2 in job.workers, started(out)) == (False, [1])


def test_a_slot_is_handed_over_while_its_worker_is_still_there():
    for why, preemptions, replacements in (("preempted", 1, 0), ("straggler", 0, 1)):
        job = job_of()
        out = fresh_actions(job)
        slots.reassign_slot(job, job.workers[2], why)
        assert (job.workers[2].leave_reason, job.workers[2].status) == (why, WorkerStatus.MEMBER)
        assert (started(out), job.slots[1].worker) == ([1], 3)
        assert (job.preemptions, job.slots[1].replacements) == (preemptions, replacements)
