"""A worker is admitted after it and its peers have met, in both directions, while the old view trains on."""

from __future__ import annotations

from typing import Any

from tests.elastic.machine.machine_driver import (
    Driven,
    Sent,
    asked,
    beat_of,
    dial_of,
    failure_at,
    hello_of,
    leave_of,
    only,
    only_sent,
    report_of,
    sent,
    some,
    started,
)

from paceline.control.messages import Dismissed, Prepare, Stop, ViewPlan
from paceline.elastic.machine import invariants
from paceline.elastic.machine.actions import (
    EndJob,
    InstallView,
    RecordFailure,
    RejectAgent,
    RequestDial,
    StartWorker,
)
from paceline.elastic.machine.machine_events import AgentJoined, StopRequested, WorkerLost
from paceline.elastic.machine.state import JobPhase

BLOCKED = "rank 2 cannot reach rank 0 at 10.77.0.1:41233: connecting timed out"


def with_joiner(**settings: Any) -> tuple[Driven, int]:
    """Two members at home; a worker of another place has said hello."""
    job = Driven(2, 8, **settings).running()
    job.beat_all()
    job.tell(AgentJoined(1, 1, "other"))
    joiner = job.of_slot(2)
    probe = only(job.tell(hello_of(joiner, 2, 1)), RequestDial)
    assert (probe.member, probe.peers) == (joiner, (1, 2))
    return job, joiner


def test_no_member_is_asked_to_stop_before_both_directions_of_all_pairs_were_proved():
    job, joiner = with_joiner()
    for one, other in ((joiner, 1), (1, joiner), (joiner, 2)):
        assert job.tell(dial_of(one, other)) == []
        assert job.state.phase is JobPhase.RUNNING
    assert asked(job.tell(dial_of(2, joiner))).members == (1, 2, joiner)
    assert job.form_view().slots == (0, 1, 2)


def test_a_job_of_one_place_never_probes():
    job = Driven(3, 6)
    told = job.join_all()
    assert not some(told, RequestDial)
    job.install_all()
    job.beat_all()
    told = job.tell(machine_loss(job, 1))
    told += job.join_all()
    assert not some(told, RequestDial)


def machine_loss(job: Driven, slot: int) -> WorkerLost:
    return WorkerLost(job.of_slot(slot), "crash", "killed")


def test_who_cannot_be_met_is_dismissed_and_counted_while_the_view_trains_on():
    job, joiner = with_joiner()
    told = job.tell(dial_of(1, joiner, BLOCKED))
    assert only_sent(told, Dismissed) == Sent((joiner,), Dismissed(reason=BLOCKED))
    failure = only(told, RecordFailure)
    assert (failure.kind, failure.reason, failure.slot) == ("unreachable", BLOCKED, 2)
    assert job.state.phase is JobPhase.RUNNING
    assert started(told) == [2]
    assert job.state.slots[2].failures == 1


def test_a_machine_that_can_never_be_met_is_sent_away_after_its_budget():
    job, joiner = with_joiner(max_worker_failures=2)
    waits = []
    for _ in range(3):
        told = job.tell(dial_of(joiner, 1, BLOCKED))
        before = job.now
        while not some(told, StartWorker | RejectAgent):  # type: ignore[arg-type]
            told = job.wait(0.1)
        if away := some(told, RejectAgent):
            assert away == [RejectAgent(1, BLOCKED)]
            break
        waits.append(job.now - before)
        joiner = job.of_slot(2)
        job.tell(hello_of(joiner, 2, 1))
    assert job.state.slots[2].given_up
    assert waits[0] < 0.1 < waits[1]
    assert job.state.phase is JobPhase.RUNNING


def test_a_joiner_that_no_peer_answers_is_asked_about_again_and_at_last_refused():
    job, joiner = with_joiner(dial_seconds=10.0, start_seconds=35.0)
    job.beat_all()
    job.tell(beat_of(joiner, "wait", 0.0))
    told = job.wait(34.0)
    assert [probe.member for probe in some(told, RequestDial)] == [joiner] * 3
    told = job.wait(2.0)
    assert "rank 2 and ranks 0 and 1 have not met within 35 s" in only(told, RecordFailure).reason


def test_a_joiner_that_is_refused_is_told_only_the_peers_that_it_has_not_met_itself():
    job, joiner = with_joiner(start_seconds=35.0)
    job.tell(AgentJoined(2, 1, "third"))
    other = job.of_slot(3)
    job.tell(hello_of(other, 3, 2))
    for peer in (2, joiner):
        job.tell(dial_of(other, peer))
        job.tell(dial_of(peer, other))
    job.beat_all()
    for member in (joiner, other):
        job.tell(beat_of(member, "wait", 0.0))
    told = job.wait(36.0)
    assert {failure.slot: failure.reason for failure in some(told, RecordFailure)} == {
        2: "rank 2 and ranks 0 and 1 have not met within 35 s",
        3: "rank 3 and rank 0 have not met within 35 s",
    }


def test_who_lost_its_connection_is_asked_again():
    job, joiner = with_joiner()
    probe = only(job.tell(hello_of(1, 0, 0, job.state.generation, (5, 0, 0))), RequestDial)
    assert probe == RequestDial(joiner, (1,))


def test_of_two_that_are_ready_the_later_has_to_go():
    job = Driven(1, 4)
    job.tell(AgentJoined(1, 1, "other"))
    assert job.tell(hello_of(1, 0)) == []
    joiner = job.of_slot(1)
    assert only(job.tell(hello_of(joiner, 1, 1)), RequestDial).peers == (1,)
    told = job.tell(dial_of(1, joiner, "rank 0 cannot reach rank 1 at 10.77.0.2:4: connecting timed out"))
    assert only_sent(told, Dismissed).member == joiner


def test_one_that_answers_no_peer_is_refused_and_not_those_that_wait_for_it():
    job = Driven(3, 6, start_seconds=35.0)
    job.tell(AgentJoined(1, 1, "other"))
    joiner = job.of_slot(3)
    job.tell(hello_of(joiner, 3, 1))
    for member in (1, 2, 3):
        job.tell(WorkerLost(member, "crash", "killed"))
    # Whether they have met and whether the first view has to start is due at the same time.
    later = [job.of_slot(slot) for slot in range(3)]
    for slot, member in enumerate(later):
        job.tell(hello_of(member, slot))
    for member in (*later, joiner):
        job.tell(beat_of(member, "wait", 0.0))
    told = job.wait(36.0)
    assert only_sent(told, Dismissed).member == joiner
    assert only(told, InstallView).plan.members == tuple(later)


def test_the_first_view_waits_for_those_who_are_meeting():
    job = Driven(1, 4)
    job.tell(AgentJoined(1, 1, "other"))
    job.tell(hello_of(1, 0))
    joiner = job.of_slot(1)
    told = job.tell(hello_of(joiner, 1, 1))
    assert not some(told, InstallView)
    told = job.meet_all(told)
    assert only(told, InstallView).plan.members == (1, joiner)


def test_law_ten_finds_a_view_of_workers_that_have_not_met():
    job, joiner = with_joiner()
    plan = ViewPlan(
        generation=9, members=(1, 2, joiner), slots=(0, 1, 2), shards=((0, 1, 2), (3, 4, 5), (6, 7))
    )
    broken = invariants.validate_step(job.state, job.state, (InstallView(plan, "why"),), "why")
    assert [text for text in broken if "invariant 10" in text]


def installing(stop: bool = True) -> Driven:
    """Four members of which one was lost; the others are in a view that does not form."""
    job = Driven(4, 8).running()
    job.beat_all()
    job.tell(machine_loss(job, 3))
    job.report_all((7, 0, 0))
    assert job.state.phase is JobPhase.INSTALLING
    if stop:
        job.tell(StopRequested("enough"))
    return job


def test_a_stop_wins_over_a_view_that_does_not_form():
    job = installing()
    told = job.wait(4.0)
    prepare = only_sent(told, Prepare)
    assert prepare.abort
    told = []
    for number, progress in ((1, (7, 0, 0)), (2, (8, 0, 0)), (3, None)):
        told += job.tell(report_of(number, job.state.generation, progress))
    assert only(told, InstallView).plan.members == (2,)
    assert sorted(one.member for one in sent(told, Dismissed)) == [1, 3]
    assert only_sent(job.install_all(), Stop).members == (2,)
    assert job.state.phase is JobPhase.STOPPING


def test_who_does_not_report_then_is_not_waited_for_either():
    job = installing()
    job.wait(4.0)
    job.tell(report_of(1, job.state.generation, (7, 0, 0)))
    told = job.wait(4.0)
    assert only(told, InstallView).plan.members == (1,)


def test_a_collective_that_breaks_while_the_job_stops_is_not_tried_again():
    job = installing()
    told = job.tell(failure_at(1, job.state.generation, "a peer is away", (), (2,)))
    assert only_sent(told, Prepare).abort
    told = job.report_all((7, 0, 0))
    assert len(only(told, InstallView).plan.members) == 1


def test_state_that_only_one_member_has_cannot_be_saved_by_another():
    job = installing()
    job.wait(4.0)
    told = []
    for number in (1, 2, 3):
        told += job.tell(report_of(number, job.state.generation, (7, 0, 0), has_private_state=True))
    end = only(told, EndJob)
    assert (end.ok, end.stopped) == (True, "enough")


def test_a_stop_while_all_restore_has_nothing_to_save():
    job = Driven(2, 4)
    job.join_all()
    assert job.state.phase is JobPhase.INSTALLING
    job.beat_all()
    job.tell(StopRequested("enough"))
    end = only(job.wait(4.0), EndJob)
    assert (end.ok, end.stopped) == (True, "enough")


def test_who_is_asked_to_go_does_not_wait_for_a_view_that_does_not_form():
    job = installing(stop=False)
    job.tell(leave_of(2, "SIGTERM"))
    told = job.wait(4.0)
    assert only_sent(told, Prepare).abort
    told = job.report_all((7, 0, 0))
    assert 2 not in only(told, InstallView).plan.members
    assert 2 in [one.member for one in sent(told, Dismissed)]
