"""Decisions that few schedules come to: each was a planted bug that no other test noticed."""

from __future__ import annotations

from dataclasses import replace

from tests.elastic.machine.machine_driver import exception_of, only, vote_of
from tests.elastic.machine.made_states import NOW, after, beat, change, job_with_limits, made

from paceline.control.messages import ViewPlan
from paceline.elastic.machine import (
    hang_detection,
    job_event_handlers,
    link_probes,
    liveness,
    machine,
    view_change,
)
from paceline.elastic.machine.actions import EndJob
from paceline.elastic.machine.hash_votes import Dispute
from paceline.elastic.machine.machine_events import ProcessProbed, SupervisorBegan, Tick
from paceline.elastic.machine.state import JobPhase, Slot, Worker, WorkerStatus


def test_the_most_shards_of_a_member():
    assert (
        ViewPlan(generation=1, members=(1, 2, 3), slots=(0, 1, 2), shards=((0,), (1, 2), (3,))).max_shards
        == 2
    )
    assert ViewPlan(generation=1, members=(1,), slots=(0,), shards=()).max_shards == 0


def test_a_verdict_without_a_further_cause_ends_where_it_ends():
    job = job_with_limits()
    beat(job, 1, "forward", 9.0)
    for member in (2, 3):
        beat(job, member, "collective", 9.0, (1,))
    job.progressed_at = NOW - 90.0
    (found,) = hang_detection.find_overdue(job)
    assert found.worker.number == 1
    assert not found.what.endswith("; ")


def test_members_that_did_not_come_back_are_named_in_the_reason():
    job = made((0, 0), JobPhase.RETURNING)
    for member in (1, 2):
        change(job, member, reconnected=member == 1)
    job.committed, job.now = True, NOW + 10**6
    job.next_tick_at = job.now
    _, _, reason = machine.step(job, Tick(), job.now)
    assert "rank 1 did not come back" in reason


def test_nothing_is_decided_after_the_job_ends_for_members_that_did_not_come_back():
    """A worker that is not a member is silent long enough to be probed at the same moment."""
    job = made((0, 0), JobPhase.RETURNING, min_workers=3, max_worker_failures=0)
    change(job, 2, reconnected=False)
    job.workers[3] = Worker(3, 2, 0, WorkerStatus.READY, NOW)
    job.slots[2] = Slot(2, 0, worker=3)
    job.next_member, job.committed = 4, True
    late = NOW + 4 * job.settings.silence_least
    job.last_message_at = {1: late, 2: late, 3: late - liveness.probe_limit(job)}
    job.next_tick_at = late
    ended, actions = after(job, Tick(), late)
    assert ended.phase is JobPhase.ENDED
    assert isinstance(actions[-1], EndJob)


def test_a_member_that_runs_shows_that_the_others_are_not_stopped_together():
    """Also one that was first in a view after they fell silent: it was there all the time."""
    job = job_with_limits()
    for member in (1, 2):
        job.last_message_at[member] = NOW - 1.0
        job.probes[member] = (NOW - 0.1, ProcessProbed(member, stopped=True))
    change(job, 3, since=NOW - 0.5)
    liveness.update_stopped_together(job)
    assert job.stopped_together == frozenset()
    change(job, 3, status=WorkerStatus.READY)
    liveness.update_stopped_together(job)
    assert job.stopped_together == {1, 2}


def test_the_loss_of_the_only_member_that_is_not_done_ends_a_job_that_fails():
    job = made()
    job.committed = True
    for member in (2, 3):
        change(job, member, status=WorkerStatus.DONE, digest="x")
    _, actions = after(job, exception_of(1, "ValueError: bad", "user", 7, 0))
    assert only(actions, EndJob).ok is False


def test_contributions_are_kept_only_while_a_disputed_step_is_computed_again():
    trail = ((6, "a/b"),)
    for dispute, restore, kept in (
        (None, False, {}),
        (Dispute((7, ""), {}), True, {}),
        (Dispute((7, ""), {}), False, {1: trail}),
    ):
        job = made((0, 0))
        job.dispute, job.restore = dispute, restore
        job.votes, job.next_tick_at = {(7, ""): {}}, NOW + 1.0
        job, _ = after(job, vote_of(1, 7, "a", 3, trail=trail))
        assert job.trails == kept


def test_a_view_whose_source_is_one_of_two_that_leave_is_waited_for():
    job = made((0, 0, 0), JobPhase.INSTALLING)
    job.asked_at = NOW - 9.0
    job.pending = frozenset({3})
    for member in (1, 2):
        change(job, member, status=WorkerStatus.LEAVING, leave_reason="preempted")
    assert view_change.too_slow_to_form(job) is not None
    assert job.view is not None
    job.view = replace(job.view, source=0, stale_indexes=(2,))
    assert view_change.too_slow_to_form(job) is None


def test_a_tick_tells_of_dials_without_an_answer_only_when_the_time_for_answers_is_over():
    job = made((0, 1))
    job.next_tick_at = NOW
    for asked, seconds, told in (
        (frozenset(), 0.0, False),
        (frozenset({(1, 2), (2, 1)}), job.settings.check_seconds - 0.1, False),
        (frozenset({(1, 2), (2, 1)}), job.settings.check_seconds, True),
    ):
        job.pending_dials, job.dials_sent_at = asked, NOW - seconds
        _, _, reason = machine.step(job, Tick(), NOW)
        assert ("not all dials were answered" in reason) is told


def test_a_tick_that_refuses_a_newcomer_also_ends_a_link_probe_without_answers():
    job = made((0, 1))
    newcomer = Worker(3, 2, 1, WorkerStatus.READY, NOW - 10**4, dialing=frozenset({1}), dialed_at=NOW - 10**4)
    job.workers[3] = newcomer
    job.slots[2] = replace(job.slots[1], number=2, worker=3)
    job.last_message_at[3] = NOW
    job.next_member = 4
    job.pending_dials, job.dials_sent_at = frozenset({(1, 2)}), NOW - 10**4
    job.next_tick_at = NOW
    job, _ = after(job, Tick())
    assert 3 not in job.workers
    assert job.pending_dials == frozenset()


def test_links_without_a_way_are_no_meetings_however_many_of_their_dials_were_answered():
    """Of two links that are blocked the same end goes, whichever of them both ends told of."""
    gone = []
    for twice, once in (((1, 3), (2, 4)), ((2, 4), (1, 3))):
        job = made((0, 0, 1, 1))
        job.dials_sent_at = NOW
        job.dial_results = {twice: "no way", twice[::-1]: "no way", once: "no way"}
        gone.append(link_probes.judge(job)[0].number)
    assert gone[0] == gone[1]


def test_a_job_that_fails_is_looked_at_when_the_time_to_save_is_over():
    job = made()
    job.committed, job.next_tick_at = True, NOW + 10**6
    job, _ = after(job, exception_of(1, "ValueError: bad", "user", 7, 0))
    assert job.fatal_failure is not None
    assert job.next_tick_at > NOW


def test_a_job_begins_once_also_where_only_workers_or_only_slots_are_left():
    workers, slots = made((0,)), made((0,))
    workers.slots, slots.workers = {}, {}
    for job in (workers, slots):
        assert job_event_handlers.on_began(job, SupervisorBegan(generation=9)) == "the job has begun already"
        assert job.generation == 3


def test_a_hash_of_a_step_that_is_agreed_on_counts_only_where_members_differ_or_dispute_it():
    for agreed, dispute, counts in (
        (-1, None, False),
        (-1, Dispute((6, ""), {}), False),
        (-1, Dispute((7, ""), {}), True),
        (5, None, True),
        (5, Dispute((6, ""), {}), True),
    ):
        job = made((0, 0))
        job.committed, job.agreed_step, job.dispute, job.next_tick_at = True, 9, dispute, NOW + 1.0
        _, _, reason = machine.step(job, vote_of(1, 7, "a", 3, agreed=agreed), NOW)
        assert ("agreed on already" not in reason) is counts, (agreed, dispute)
