"""Silence, hangs and stragglers: who is named, when, and who never is."""

from __future__ import annotations

import pytest
from tests.elastic.machine.heartbeats import but, keep_beating
from tests.elastic.machine.machine_driver import (
    Driven,
    asked,
    beat_of,
    hello_of,
    leave_of,
    only,
    only_sent,
    report_of,
    sent,
    some,
    started,
)

from paceline.control.messages import Prepare
from paceline.elastic.machine import machine
from paceline.elastic.machine.actions import Action, KillWorker, RecordVerdict
from paceline.elastic.machine.machine_events import FromMember, Tick, WorkerLost
from paceline.elastic.machine.state import JobPhase

STEP = 0.02


def beat(
    member: int, phase: str, seconds: float = 0.0, waits_for: tuple[int, ...] = (), steps: int = 5
) -> FromMember:
    return beat_of(member, phase, seconds, (steps, 0, 0), waits_for, 0.01, STEP)


def test_a_silent_member_is_named_and_killed():
    job = Driven(3, 6).running()
    job.beat_all()
    told: list[Action] = []
    for _ in range(12):
        job.now += 0.25
        for member in (1, 3):
            told += job.tell(beat(member, "collective", waits_for=(2,)))
        if job.now >= job.state.next_tick_at:
            told += job.tell(Tick())
    verdict = only(told, RecordVerdict)
    assert (verdict.slot, verdict.phase) == (1, "forward")
    assert "no heartbeat" in verdict.what
    assert verdict.waiting == "ranks 0 and 2 wait for it"
    assert told.index(verdict) < told.index(only(told, KillWorker))
    assert only_sent(told, Prepare).members == (1, 3)


def test_silence_follows_the_measured_step():
    job = Driven(2, 2).running()
    for member in (1, 2):
        job.tell(beat_of(member, "forward", 0.1, (3, 0, 0), (), 2.0, 2.0))
    job.tell(Tick(), after=2.0)
    assert job.state.step_seconds == 2.0
    assert not some(job.wait(7.0, beating=False), RecordVerdict)
    assert some(job.wait(3.0, beating=False), RecordVerdict)


def test_a_suspended_host_blames_no_worker():
    job = Driven(3, 6).running()
    job.beat_all()
    job.now += 3600.0
    assert job.tell(Tick(stalled=3600.0)) == []
    job.beat_all()
    assert not some(job.wait(1.0), RecordVerdict)


def test_who_hangs_is_named_not_those_who_wait():
    job = Driven(4, 8).running()
    job.beat_all()
    told = keep_beating(
        job,
        10.0,
        m1=beat(1, "collective", waits_for=(2,)),
        m2=beat(2, "data"),
        m3=beat(3, "collective", waits_for=(2,)),
        m4=beat(4, "collective", waits_for=(2,)),
    )
    verdict = only(told, RecordVerdict)
    assert (verdict.slot, verdict.phase, verdict.waiting) == (1, "data", "ranks 0, 2 and 3 wait for it")


def test_a_hang_inside_the_collective_is_found_by_who_waits():
    job = Driven(3, 6).running()
    job.beat_all()
    told = keep_beating(
        job,
        10.0,
        m1=beat(1, "collective", waits_for=(3,)),
        m2=beat(2, "collective", waits_for=(3,)),
        m3=beat(3, "collective"),
    )
    assert only(told, RecordVerdict).slot == 2


def test_of_those_who_wait_for_each_other_the_most_waited_for_goes():
    job = Driven(3, 6).running()
    job.beat_all()
    told = keep_beating(
        job,
        10.0,
        m1=beat(1, "collective", waits_for=(2,)),
        m2=beat(2, "collective", waits_for=(1,)),
        m3=beat(3, "collective", waits_for=(2,)),
    )
    assert only(told, RecordVerdict).slot == 1


def test_two_that_hang_are_both_named():
    job = Driven(4, 8).running()
    job.beat_all()
    told = keep_beating(
        job,
        10.0,
        m1=beat(1, "collective", waits_for=(2, 4)),
        m2=beat(2, "data"),
        m3=beat(3, "collective", waits_for=(2, 4)),
        m4=beat(4, "backward"),
    )
    assert {verdict.slot for verdict in some(told, RecordVerdict)} == {1, 3}


@pytest.mark.parametrize("phase", ["checkpoint", "evaluation"])
def test_slow_phases_have_more_time(phase):
    job = Driven(2, 4, slow_phase_seconds=30.0).running()
    job.beat_all()
    slow = {"m1": beat(1, phase), "m2": beat(2, "collective", waits_for=(1,))}
    assert not some(keep_beating(job, 20.0, **slow), RecordVerdict)
    assert only(keep_beating(job, 20.0, m1=beat(1, phase, 20.0), m2=slow["m2"]), RecordVerdict).slot == 0


@pytest.mark.parametrize("phase", ["checkpoint", "evaluation"])
def test_slow_phases_have_the_time_that_they_took_before(phase):
    job = Driven(2, 4, slow_phase_seconds=600.0, hang_steps=20.0).running()
    job.beat_all()
    others = beat(2, "collective", waits_for=(1,))
    slow = but(beat(1, phase), longest=1.0)
    assert not some(keep_beating(job, 19.0, m1=slow, m2=others), RecordVerdict)
    later = but(slow, seconds=19.0)
    verdict = only(keep_beating(job, 2.0, m1=later, m2=others), RecordVerdict)
    assert (verdict.slot, verdict.phase) == (0, phase)


def test_the_first_step_has_more_time():
    job = Driven(2, 4, slow_phase_seconds=30.0).running()
    for _ in range(40):
        job.now += 0.25
        for member in (1, 2):
            job.tell(beat_of(member, "forward", 10.0, (0, 0, 0)))
        job.tell(Tick())
    assert job.state.phase is JobPhase.RUNNING


def test_who_has_the_shards_of_many_has_the_time_of_many():
    """Steps of 0.5 s with 40 workers; then one has it all to do, and is not hung for taking 20 s."""
    job = Driven(40, 40, max_worker_failures=0).running()
    for member in job.members:
        job.tell(beat_of(member, "forward", 0.1, (5, 0, 0), (), 0.5, 0.5))
    job.tell(Tick(), after=2.0)
    for member in job.members[1:]:
        job.tell(WorkerLost(member, "crash", "a test"))
    assert job.form_view().shards == (tuple(range(40)),)
    alone = beat_of(1, "forward", 0.0, (5, 0, 0), (), 0.5, 0.5)
    assert not some(keep_beating(job, 300.0, m1=alone), RecordVerdict)
    assert some(keep_beating(job, 1800.0, m1=but(alone, seconds=300.0)), RecordVerdict)


def test_one_worker_alone_can_hang_too():
    job = Driven(1, 2).running()
    job.beat_all()
    told = keep_beating(job, 60.0, m1=beat(1, "data"))
    assert only(told, RecordVerdict).slot == 0


def test_who_does_not_report_in_time_is_left_out():
    job = Driven(3, 6).running()
    job.beat_all()
    job.tell(WorkerLost(1, "crash", "killed"))
    job.tell(report_of(2, 2, (5, 0, 0)))
    told = job.wait(6.0)
    assert only(told, RecordVerdict).slot == 2
    assert job.state.view is not None
    assert job.state.view.members == (2,)


def test_on_the_way_to_a_boundary_who_goes_from_shard_to_shard_is_not_late():
    """A few compute the first step of many, others want to join: it takes longer than any limit."""
    job = Driven(2, 40, slow_phase_seconds=20.0).running()
    began = job.now

    def passes(seconds: float, hangs: bool) -> list[Action]:
        told: list[Action] = []
        until, since = job.now + seconds, job.now
        while job.now < until and job.state.phase is JobPhase.PREPARING:
            job.now += 0.25
            job.tell(beat_of(1, "forward", job.now - since if hangs else 0.1, (0, 0, 0)))
            job.tell(beat_of(2, "collective", job.now - began, (0, 0, 0), (1,)))
            told += job.tell(Tick())
        return told

    job.tell(beat_of(1, "forward", 0.1, (0, 0, 0)))
    assert not only_sent(job.tell(leave_of(2, "a test")), Prepare).abort
    assert not some(passes(120.0, hangs=False), RecordVerdict)
    assert job.state.phase is JobPhase.PREPARING
    assert only(passes(25.0, hangs=True), RecordVerdict).slot == 0


def test_who_does_not_install_in_time_is_left_out():
    job = Driven(3, 6, install_seconds=4.0).running()
    job.beat_all()
    job.tell(WorkerLost(1, "crash", "killed"))
    job.report_all()
    job.tell(beat(2, "collective", waits_for=(3,)))
    told = job.wait(6.0)
    assert only(told, RecordVerdict).slot == 2


def test_a_straggler_gets_fewer_shards_at_a_boundary():
    job = Driven(4, 8).running()
    job.beat_all(m2=beat_of(2, "forward", 0.1, (5, 0, 0), (), 0.05, 0.1))
    told = job.wait(4.5)
    assert asked(told).abort is False
    plan = job.form_view()
    assert [len(mine) for mine in plan.shards] == [3, 0, 3, 2]


def test_a_deal_that_would_not_help_stays():
    job = Driven(4, 4).running()
    job.beat_all(m2=beat_of(2, "forward", 0.1, (5, 0, 0), (), 0.016, 0.02))
    assert not sent(job.wait(6.0), Prepare)


def test_the_policy_wait_deals_evenly():
    job = Driven(4, 8, stragglers="wait").running()
    job.beat_all(m2=beat_of(2, "forward", 0.1, (5, 0, 0), (), 0.5, 0.1))
    assert not sent(job.wait(6.0), Prepare)


def test_the_policy_replace_starts_another_one_and_counts_no_failure():
    job = Driven(3, 6, stragglers="replace").running()
    job.beat_all(m2=beat_of(2, "forward", 0.1, (5, 0, 0), (), 0.5, 0.1))
    told = job.wait(2.5)
    assert started(told) == [1]
    assert only(told, RecordVerdict).slot == 1
    new = job.of_slot(1)
    told = job.tell(hello_of(new, 1))
    assert asked(told).abort is False
    assert job.form_view().members == (1, new, 3)
    assert job.state.slots[1].failures == 0


def test_blocks_are_made_again_after_a_deal_around_what_was_held():
    job = Driven(4, 8).running()
    job.beat_all()
    job.tell(WorkerLost(4, "crash", "killed"))
    plan = job.form_view(m1=(0, 1), m2=(2, 3), m3=(4, 5))
    assert plan.shards == ((0, 1, 6), (2, 3, 7), (4, 5))
    job.beat_all(steps=6)
    assert asked(job.wait(5.0)).abort is False
    assert job.form_view().shards == ((0, 1, 2), (3, 4, 5), (6, 7))


def test_a_heartbeat_looks_at_no_other_worker():
    """The cost of a heartbeat does not grow with the job but by copying dictionaries."""
    job = Driven(200, 200).running()
    due = job.state.next_tick_at
    state, actions, _ = machine.step(job.state, beat(7, "forward"), job.now + 0.1)
    assert actions == ()
    assert state.next_tick_at == due
    assert {n for n, at in state.last_message_at.items() if at != job.state.last_message_at[n]} == {7}


def until_hung(job: Driven, hung: int, steps: int) -> float:
    """Seconds until the member that reads a slow sample is expelled; the others take over and go on."""
    job.beat_all(steps)
    began = job.now
    others = [member for member in job.members if member != hung]
    waiting = {f"m{member}": beat(member, "collective", 0.0, (hung,), steps) for member in others}
    told = keep_beating(job, 60.0, **waiting, hung=beat(hung, "data", 0.0, (), steps))
    verdict = only(told, RecordVerdict)
    assert (verdict.member, "makes no progress" in verdict.what) == (hung, True)
    took = job.now - began
    job.form_view((steps, 0, 0))
    return took


def test_each_hang_without_a_commit_between_has_twice_the_time():
    """A sample that takes long each time it is read moves from member to member with its shard."""
    job = Driven(4, 8, max_worker_failures=9).running()
    seconds = [until_hung(job, hung, 5) for hung in (1, 2, 3)]
    assert [round(one / 5.0) for one in seconds] == [1, 2, 4]
    job.beat_all(5)
    job.beat_all(6)
    assert job.state.hangs == 0
