"""Links between hosts and meetings of newcomers: who is asked to dial whom, who has to go, who is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import Any

import pytest
from tests.elastic.machine.machine_driver import dial_of, only, report_of, sent, some
from tests.elastic.machine.made_states import NOW, after, beat, change, fresh_actions, held, made

from paceline.control.messages import DialResult, Prepare
from paceline.elastic.machine import admission, link_probes
from paceline.elastic.machine.actions import KillWorker, RecordVerdict, RequestDial
from paceline.elastic.machine.link_faults import broken_link
from paceline.elastic.machine.machine_events import Tick
from paceline.elastic.machine.state import JobPhase, JobState, Slot, Worker, WorkerStatus


def running(*agents: int, **settings: Any) -> JobState:
    """The job has not gone on since the links were last probed."""
    job = made(agents, shards=2 * len(agents), **settings)
    job.committed, job.next_tick_at = True, NOW + 50.0
    job.dials_sent_at = job.progressed_at
    return job


# which end of a broken link has to go


def gone(
    job: JobState,
    named: Mapping[int, Collection[int]],
    among: Collection[int] = (1, 2, 3, 4, 5),
    met: Collection[tuple[int, int]] = (),
) -> tuple[int, int] | None:
    link = broken_link(job, named, [one for one in among if one in job.workers], met)
    return None if link is None else (link.end.number, link.other.number)


def test_only_two_that_name_each_other_across_hosts_are_a_link():
    job = running(0, 0, 1)
    assert gone(job, {1: {3}, 3: {1}}) == (3, 1)
    assert gone(job, {1: {3}}) is None
    assert gone(job, {3: {1}}) is None
    assert gone(job, {1: {2}, 2: {1}}) is None
    assert gone(job, {1: {9}, 9: {1}}) is None
    assert gone(job, {0: {3}, 3: {0}}) is None
    assert gone(job, {}) is None
    assert gone(job, {1: {3}, 3: {1}}, among=(2,)) is None


def test_the_end_on_the_host_with_fewer_members_goes_then_the_one_away_then_the_higher_rank():
    both = {1: {2}, 2: {1}}
    assert gone(running(0, 1, 1), both) == (1, 2)
    assert gone(running(0, 1, 0), both) == (2, 1)
    assert gone(running(0, 1), both) == (2, 1)
    assert gone(running(1, 0), both) == (1, 2)
    assert gone(running(1, 2), both) == (2, 1)


def test_only_those_in_the_view_count_for_a_host():
    job = running(0, 1, 0)
    change(job, 3, status=WorkerStatus.READY)
    assert gone(job, {1: {2}, 2: {1}}) == (2, 1)


def test_only_who_may_go_goes():
    both = {1: {2}, 2: {1}}
    assert gone(running(0, 1), both, among=(1,)) == (1, 2)
    assert gone(running(0, 1), both, among=(2,)) == (2, 1)


def test_who_is_named_by_more_hosts_goes_first():
    job = running(0, 0, 1, 2)
    assert gone(job, {1: {3}, 3: {1}, 4: {1}}) == (1, 3)
    # Members of its own host that name an end wait only because it does.
    job = running(0, 0, 1, 1)
    assert gone(job, {1: {3}, 3: {1}, 2: {1}}) == (3, 1)
    # One that is gone says nothing.
    assert gone(running(0, 0, 1), {1: {3}, 3: {1}, 9: {1}}) == (3, 1)


def test_who_has_reached_others_stays():
    job = running(0, 0, 1)
    both = {1: {3}, 3: {1}}
    assert gone(job, both, met=[(2, 3)]) == (1, 3)
    assert gone(job, both, met=[(2, 3), (1, 9)]) == (3, 1)


def test_the_other_end_is_the_lowest_that_it_does_not_reach():
    job = running(0, 0, 1)
    assert gone(job, {1: {3}, 2: {3}, 3: {1, 2}}) == (3, 1)
    assert gone(job, {2: {3}, 3: {2}}) == (3, 2)


def test_what_is_said_of_a_link():
    job = running(0, 0, 1)
    both = {1: {3}, 3: {1}}
    link = broken_link(job, both, (1, 3))
    assert link is not None
    assert (link.end.number, link.other.number) == (3, 1)
    assert "rank 2 on host1 and rank 0 on the supervisor's" in link.says
    assert "at fault, not a rank" in link.says
    link = broken_link(job, both, (3,), [(2, 3)])
    assert link is not None
    assert "at fault, not a rank" not in link.says
    link = broken_link(job, both, (1, 3), [(1, 2), (9, 3)])
    assert link is not None
    assert "at fault, not a rank" in link.says


# probes of links


def probed(job: JobState, *named: tuple[int, int]) -> set[tuple[int, tuple[int, ...]]]:
    out = fresh_actions(job)
    asked = link_probes.probe_links(job, named)
    assert asked is bool(out)
    return {(one.member, one.peers) for one in some(out, RequestDial)}


def test_all_members_of_the_two_hosts_dial_each_other():
    job = running(0, 0, 1, 1, 2)
    assert probed(job, (1, 3)) == {(1, (3, 4)), (2, (3, 4))}
    assert job.pending_dials == {
        pair for one in (1, 2) for other in (3, 4) for pair in ((one, other), (other, one))
    }
    assert (job.dials_sent_at, job.dial_results, job.next_tick_at) == (NOW, {}, NOW + 9.0)
    assert probed(running(0, 1, 2), (2, 3)) == {(2, (3,))}


def test_no_link_is_probed_on_one_host_or_of_one_that_is_gone_or_while_the_job_stops():
    job = running(0, 0, 1)
    for named in ((1, 2), (1, 9), (9, 1)):
        assert probed(job, named) == set()
    assert job.pending_dials == frozenset()
    change(job, 3, status=WorkerStatus.READY)
    assert probed(job, (1, 3)) == set()
    job = running(0, 1)
    job.stop_reason = "enough"
    assert probed(job, (1, 2)) == set()


def test_around_a_failed_collective_all_links_are_probed_and_in_a_large_job_those_that_were_named():
    def around(job: JobState) -> int:
        link_probes.probe_around(job, job.workers[1])
        return len(job.pending_dials)

    assert around(running(0, 1, 2)) == 6
    small = running(*(0,) * 16, *(1,) * 15, 2)
    assert around(small) == 2 * (16 * 15 + 16 + 15)
    large = running(*(0,) * 16, *(1,) * 16, 2)
    large.suspicions = {(33, 1): 1}
    assert around(large) == 2 * 16
    large.suspicions = {}
    large.pending_dials = frozenset()
    assert around(large) == 2 * (16 * 16 + 16)


def waiting(seconds: float) -> JobState:
    job = running(0, 1, hang_least=8.0)
    job.dials_sent_at = -inf
    job.progressed_at = NOW - seconds
    beat(job, 1, "collective", seconds, (2,))
    beat(job, 2, "collective", seconds, (1,))
    return job


def test_members_that_wait_for_each_other_dial_when_half_of_their_time_is_over():
    assert link_probes.probe_waiting_members(waiting(4.0))
    assert not link_probes.probe_waiting_members(waiting(3.9))
    for phase in (JobPhase.STOPPING, JobPhase.PREPARING, JobPhase.INSTALLING):
        job = waiting(4.0)
        job.phase = phase
        assert not link_probes.probe_waiting_members(job)


def test_members_that_wait_are_asked_once_and_not_while_they_are_stopped_together():
    job = waiting(4.0)
    job.dials_sent_at = NOW - 4.0
    assert not link_probes.probe_waiting_members(job)
    job.dials_sent_at = NOW - 4.1
    assert link_probes.probe_waiting_members(job)
    job = waiting(4.0)
    job.stopped_together = frozenset({1, 2})
    assert not link_probes.probe_waiting_members(job)


def test_how_long_an_answer_may_come():
    job = running(0, 1)
    job.pending_dials, job.dials_sent_at = frozenset({(1, 2)}), NOW - 8.9
    assert link_probes.is_open(job)
    job.dials_sent_at = NOW - 9.0
    assert not link_probes.is_open(job)
    job.dials_sent_at = NOW
    job.stop_reason = "enough"
    assert not link_probes.is_open(job)
    job.stop_reason = None
    for pair in ((1, 9), (9, 1)):
        job.pending_dials = frozenset({pair})
        assert not link_probes.is_open(job)
    job.pending_dials = frozenset()
    assert not link_probes.is_open(job)


def test_an_answer_is_kept_where_it_says_something():
    job = running(0, 1)
    job.pending_dials = frozenset({(1, 2), (2, 1)})
    assert not link_probes.is_answer(job, 1, DialResult(peer=1))
    assert link_probes.is_answer(job, 1, DialResult(peer=2, trouble="refused"))
    assert (job.pending_dials, job.dial_results) == (frozenset({(2, 1)}), {})
    assert not link_probes.is_answer(job, 1, DialResult(peer=2))
    assert link_probes.is_answer(job, 2, DialResult(peer=1))
    assert job.dial_results == {(2, 1): ""}
    job.pending_dials = frozenset({(1, 2)})
    assert link_probes.is_answer(job, 1, DialResult(peer=2, trouble="lost", lossy=True))
    assert job.dial_results == {(2, 1): "", (1, 2): "lost"}


def judged(job: JobState, **found: str) -> list[int]:
    """m1_2="lost": what member 1 found when it dialed member 2."""
    for name, text in found.items():
        one, other = name[1:].split("_")
        job.dial_results[int(one), int(other)] = text
    out = fresh_actions(job)
    expelled = [worker.number for worker in link_probes.judge(job)]
    assert [kill.member for kill in some(out, KillWorker)] == expelled
    return expelled


def test_packets_that_do_not_arrive_are_a_proof():
    job = running(0, 0, 1)
    assert judged(job, m1_3="lost", m3_1="", m2_3="", m3_2="") == [1]
    assert (job.dial_results, job.pending_dials) == ({}, frozenset())
    assert "lost" in job.reason
    assert judged(running(0, 0, 1), m1_3="", m3_1="") == []
    assert judged(running(0, 0, 1), m3_1="lost", m2_3="lost") == [3]
    assert judged(running(0, 1, 2), m1_2="lost", m1_3="lost") == [1]


def test_as_many_go_as_have_broken_links():
    job = running(0, 0, 0, 1, 2)
    assert judged(job, m1_4="lost", m2_4="lost", m3_4="lost", m1_5="lost", m2_5="lost", m3_5="lost") == [5, 4]


def test_nothing_is_judged_while_answers_may_come_or_when_the_job_went_on_or_stops():
    job = running(0, 0, 1)
    job.pending_dials, job.dials_sent_at = frozenset({(1, 3)}), NOW
    assert judged(job, m3_1="lost") == []
    assert job.dial_results != {}
    job = running(0, 0, 1)
    job.dials_sent_at = job.progressed_at - 1.0
    assert judged(job, m3_1="lost") == []
    assert job.dial_results == {}
    job.dials_sent_at = job.progressed_at
    assert judged(job, m3_1="lost") == [3]
    job = running(0, 0, 1)
    job.phase, job.dials_sent_at = JobPhase.PREPARING, job.progressed_at - 1.0
    assert judged(job, m3_1="lost") == [3]
    job = running(0, 0, 1)
    job.stop_reason = "enough"
    assert judged(job, m3_1="lost") == []


def test_one_that_cannot_answer_is_no_end_of_a_broken_link():
    job = running(0, 0, 1)
    held(job, 3)
    assert judged(job, m1_3="lost") == []
    job = running(0, 0, 1)
    change(job, 3, status=WorkerStatus.READY)
    assert judged(job, m1_3="lost") == []
    assert judged(running(0, 0, 1), m1_9="lost") == []


def test_dials_that_are_not_answered_in_time_are_waited_for_no_longer():
    job = running(0, 1)
    job.phase, job.generation, job.abort = JobPhase.PREPARING, 4, True
    job.pending = frozenset({1, 2})
    job.pending_dials, job.dials_sent_at = frozenset({(1, 2)}), NOW
    for member in (1, 2):
        job, actions = after(job, report_of(member, 4, (5, 0, 0)))
    assert job.phase is JobPhase.PREPARING
    late, actions = after(job, dial_of(1, 2))
    assert late.phase is JobPhase.INSTALLING
    job.last_message_at = dict.fromkeys((1, 2), NOW + 9.0)
    job.progressed_at, job.next_tick_at = NOW + 9.0, NOW
    late, actions = after(job, Tick(), NOW + 9.0)
    assert late.phase is JobPhase.INSTALLING
    assert some(actions, RecordVerdict) == []


# meetings


def newcomer(
    job: JobState, member: int, agent_id: int, since: float = NOW, reached: Collection[int] = ()
) -> None:
    status = WorkerStatus.READY
    job.workers[member] = Worker(
        member, member - 1, agent_id, status, since, reached=frozenset(reached), dialed_at=0.0
    )
    job.slots[member - 1] = Slot(member - 1, agent_id, worker=member)
    job.last_message_at[member], job.next_member = NOW, member + 1


def admitted(job: JobState) -> list[int]:
    return [worker.number for worker in admission.admitted(job)]


def test_a_newcomer_has_met_all_in_both_directions():
    job = running(0, 0)
    newcomer(job, 3, 1, reached=(1, 2))
    assert admitted(job) == []
    change(job, 1, reached=frozenset({3}))
    assert admitted(job) == []
    change(job, 2, reached=frozenset({3}))
    assert admitted(job) == [3]
    change(job, 3, reached=frozenset({1}))
    assert admitted(job) == []
    newcomer(job, 4, 0)
    assert admitted(job) == [4]


def test_of_newcomers_that_have_not_met_the_lower_rank_is_admitted():
    job = running(0)
    for member in (4, 3):
        newcomer(job, member, member, reached=(1,))
    change(job, 1, reached=frozenset({3, 4}))
    assert admitted(job) == [3]
    change(job, 3, reached=frozenset({1, 4}))
    change(job, 4, reached=frozenset({1, 3}))
    assert admitted(job) == [3, 4]


def dialed(job: JobState, now: float = NOW) -> list[tuple[int, tuple[int, ...]]]:
    out = fresh_actions(job, now)
    admission.dial(job)
    return [(one.member, one.peers) for one in some(out, RequestDial)]


def test_a_newcomer_dials_whom_it_has_not_met_once():
    job = running(0, 0, dial_seconds=10.0)
    newcomer(job, 3, 1)
    job.workers[9] = Worker(9, 8, 0, WorkerStatus.STARTING, NOW)
    assert dialed(job) == [(3, (1, 2))]
    assert (job.workers[3].dialing, job.workers[3].dialed_at) == (frozenset({1, 2}), NOW)
    assert job.next_tick_at == NOW + 10.0
    assert dialed(job, NOW + 1.0) == []
    job.workers[9] = Worker(9, 8, 0, WorkerStatus.MEMBER, NOW)
    assert dialed(job, NOW + 2.0) == [(3, (9,))]
    assert (job.workers[3].dialing, job.workers[3].dialed_at) == (frozenset({1, 2, 9}), NOW)
    assert dialed(job, NOW + 9.9) == []
    job.next_tick_at = NOW + 500.0
    assert dialed(job, NOW + 10.0) == [(3, (1, 2, 9))]
    assert job.workers[3].dialed_at == NOW + 10.0
    assert job.next_tick_at == NOW + 20.0


def test_of_two_newcomers_the_later_one_dials():
    job = running(0)
    newcomer(job, 3, 0)
    newcomer(job, 4, 1)
    assert dialed(job) == [(4, (1, 3))]
    job.stop_reason = "enough"
    change(job, 4, dialing=frozenset(), dialed_at=0.0)
    assert dialed(job) == []


def test_a_newcomer_that_has_met_all_dials_no_peer():
    job = running(0)
    newcomer(job, 3, 1, reached=(1,))
    change(job, 1, reached=frozenset({3}))
    assert dialed(job) == []
    assert job.next_tick_at == NOW + 50.0


def test_what_was_asked_of_one_without_a_connection_is_asked_again():
    job = running(0, 0)
    newcomer(job, 3, 1)
    newcomer(job, 4, 2)
    change(job, 3, dialing=frozenset({1, 2}))
    change(job, 4, dialing=frozenset({1, 3}))
    admission.ask_again(job, 3)
    assert job.workers[3].dialing == frozenset()
    assert job.workers[4].dialing == frozenset({1})
    admission.ask_again(job, 1)
    assert job.workers[4].dialing == frozenset()
    admission.ask_again(job, 99)
    assert job.workers[1].dialing == frozenset()


def refused(job: JobState) -> list[int]:
    return [worker.number for worker, _ in admission.overdue(job)]


def test_who_does_not_meet_its_peers_in_time_is_refused():
    job = running(0, start_seconds=30.0)
    newcomer(job, 2, 1, since=NOW - 29.9)
    assert refused(job) == []
    change(job, 2, since=NOW - 30.0)
    assert refused(job) == [2]
    change(job, 2, agent_id=0)
    assert refused(job) == []


def test_the_one_that_is_in_most_pairs_is_refused_and_its_peers_are_not():
    job = running(0, start_seconds=30.0)
    change(job, 1, reached=frozenset({2, 4}))
    for member in (2, 3, 4):
        newcomer(job, member, member, since=NOW - 30.0, reached={1, 2, 4} - {member})
    assert refused(job) == [3]
    change(job, 2, reached=frozenset({1}))
    assert refused(job) == [3, 4]
    job = running(0, start_seconds=30.0)
    for member in (2, 3):
        newcomer(job, member, member, since=NOW - 30.0)
    assert refused(job) == [3, 2]


def test_those_that_are_refused_are_refused_together():
    job = running(0, start_seconds=30.0)
    for member in (2, 3):
        newcomer(job, member, member, since=NOW - 30.0)
    job.next_tick_at = NOW
    job, actions = after(job, Tick())
    assert sorted(job.workers)[:1] == [1]
    assert not {2, 3} & set(job.workers)
    assert sent(actions, Prepare) == []


def test_of_two_newcomers_that_do_not_reach_each_other_the_higher_rank_is_refused():
    job = running(0)
    newcomer(job, 3, 1)
    newcomer(job, 4, 2)
    change(job, 3, slot=3)
    change(job, 4, slot=2)
    job.slots = {0: job.slots[0], 2: Slot(2, 2, worker=4), 3: Slot(3, 1, worker=3)}
    job, _ = after(job, dial_of(4, 3, "refused"))
    assert (3 in job.workers, 4 in job.workers) == (False, True)


@pytest.mark.parametrize("trouble", ["", "refused"])
def test_a_dial_of_a_link_probe_is_not_a_meeting(trouble):
    job = running(0, 1)
    job.pending_dials, job.dials_sent_at = frozenset({(1, 2), (2, 1)}), NOW
    job, actions = after(job, dial_of(1, 2, trouble))
    assert (job.workers[1].reached, actions) == (frozenset(), [])
    assert only([job], JobState).pending_dials == frozenset({(2, 1)})
