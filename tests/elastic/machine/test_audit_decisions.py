"""What follows from hashes: who is expelled, how far all go back, and what a step says when done again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.elastic.machine.machine_driver import some
from tests.elastic.machine.made_states import change, fresh_actions, made

from paceline.control.field_types import Progress
from paceline.control.messages import MemberReport
from paceline.elastic.machine import replica_divergence
from paceline.elastic.machine.actions import Action, EndJob, KillWorker, RecordFailure, RecordVerdict
from paceline.elastic.machine.hash_votes import Dispute
from paceline.elastic.machine.state import JobPhase, JobState, WorkerStatus

BALLOT = (7, "")


def job_of(count: int = 3) -> JobState:
    job = made((0,) * count, JobPhase.PREPARING, shards=2 * count)
    job.committed, job.agreed_step = True, 4
    return job


def report(digest: str = "", progress: Progress | None = (7, 0, 0), **more: Any) -> MemberReport:
    values = {"agreed": -1, "has_private_state": False, **more}
    return MemberReport(generation=4, progress=progress, held_shards=(), digest=digest, **values)


def opened(job: JobState) -> tuple[list[int], bool, list[Action]]:
    out = fresh_actions(job)
    _, expelled, all_go_back = replica_divergence.judge_open(job)
    return [worker.number for worker in expelled], all_go_back, out


def reports(job: JobState, *said: MemberReport) -> tuple[list[int], list[Action]]:
    out = fresh_actions(job)
    _, expelled = replica_divergence.judge_reports(job, dict(enumerate(said, 1)))
    return [worker.number for worker in expelled], out


# how far all go back


def test_all_go_back_to_the_last_step_they_agreed_on():
    job = job_of()
    replica_divergence.require_restore(job, 7)
    assert (job.restore, job.restore_before, job.tainted_until) == (True, 4, 7)
    job.max_progress = (9, 0, 0)
    replica_divergence.require_restore(job, 8)
    assert job.tainted_until == 9
    job.max_progress = (5, 0, 0)
    replica_divergence.require_restore(job, 2)
    assert job.tainted_until == 9


def test_members_that_differ_may_have_agreed_later():
    job = job_of()
    replica_divergence.members_differ(job, 9, 6)
    assert (job.agreed_step, job.restore_before, job.tainted_until) == (6, 6, 9)
    replica_divergence.members_differ(job, 9, 5)
    assert job.agreed_step == 6


# votes


def test_nothing_is_judged_before_all_in_the_view_have_voted():
    job = job_of()
    job.votes = {BALLOT: {1: "a", 2: "b"}}
    assert opened(job) == ([], False, [])
    change(job, 3, status=WorkerStatus.READY)
    assert opened(job)[1]


def test_a_majority_expels_who_differs():
    job = job_of()
    job.votes, job.dispute = {BALLOT: {1: "a", 2: "b", 3: "a"}}, Dispute((3, ""), {})
    expelled, all_go_back, out = opened(job)
    assert (expelled, all_go_back) == ([2], True)
    assert (job.restore, job.restore_before, job.tainted_until) == (True, 4, 7)
    assert (job.votes, vars(job)["dispute"]) == ({}, None)
    assert [one.member for one in some(out, KillWorker)] == [2]
    assert some(out, RecordVerdict)[0].slot == 1
    assert some(out, RecordFailure)[0].kind == "dissent"


def test_one_that_differs_and_is_gone_cannot_be_expelled():
    job = job_of()
    del job.workers[2]
    job.votes = {BALLOT: {1: "a", 2: "b", 3: "a"}}
    assert opened(job)[:2] == ([], True)
    assert job.restore


def test_without_a_majority_all_go_back_and_compute_again():
    job = job_of(2)
    job.votes = {BALLOT: {1: "a", 2: "b"}}
    expelled, all_go_back, out = opened(job)
    assert (expelled, all_go_back, out) == ([], True, [])
    assert (job.restore, job.restore_before, job.votes, job.dispute_count) == (True, 4, {}, 1)
    assert job.dispute is not None
    assert job.view is not None
    assert (job.dispute.hash_key, job.dispute.cast) == (BALLOT, {1: "a", 2: "b"})
    assert job.dispute.assignment == job.view.shards


def test_a_difference_that_votes_and_then_reports_show_is_one_dispute():
    job = job_of(2)
    job.votes = {BALLOT: {1: "a", 2: "b"}}
    opened(job)
    reports(job, report("a"), report("b"))
    assert (job.dispute_count, job.restore) == (1, True)
    # All went back, and differ again: that is the second.
    reports(job, report("a"), report("b"))
    assert job.dispute_count == 2


def test_the_reason_names_the_only_holder_of_a_state_that_lost_members_did_not_have():
    for differed, reason in ((True, "only rank 0 is left"), (False, "not all have voted")):
        job = job_of(2)
        said, expelled = replica_divergence.judge_reports(
            job, {1: report("a", peers_differed=differed), 2: report(progress=None)}
        )
        assert (reason in said, expelled, job.restore) == (True, [], differed)


def test_one_that_is_gone_can_be_the_vote_that_makes_a_majority_impossible():
    job = job_of()
    del job.workers[3]
    job.votes = {BALLOT: {1: "a", 2: "b", 3: "c"}}
    assert opened(job)[:2] == ([], True)
    assert job.dispute is not None
    assert job.dispute.cast == {1: "a", 2: "b", 3: "c"}


def test_the_third_dispute_in_a_row_is_the_end():
    for count, agreed, ends in ((1, 4, False), (2, 4, True), (2, 6, False), (2, 5, True)):
        job = job_of(2)
        dispute = Dispute((5, ""), {}, trails={1: (), 2: ()})
        job.dispute_count, job.dispute, job.agreed_step = count, dispute, agreed
        job.votes = {BALLOT: {1: "a", 2: "b"}}
        _, _, out = opened(job)
        assert bool(some(out, EndJob)) is ends
        if ends:
            assert some(out, EndJob)[0].failed == 1
        if agreed == 6:
            assert job.dispute_count == 1


def test_an_agreement_moves_the_step_that_all_go_back_to():
    for kind, agreed in (("", 7), ("saved", 7), ("end", 7), ("sample", 4)):
        job = job_of(2)
        job.votes = {(7, kind): {1: "a", 2: "a"}, (8, kind): {1: "a"}, (6, kind): {1: "x"}}
        assert opened(job) == ([], False, [])
        assert job.agreed_step == agreed
        assert job.votes == {(8, kind): {1: "a"}}
    job = job_of(2)
    job.agreed_step, job.votes = 9, {BALLOT: {1: "a", 2: "a"}}
    opened(job)
    assert job.agreed_step == 9


def test_independent_members_that_agree_confirm_a_state():
    job = job_of(2)
    job.lineage, job.votes = {2: 9}, {BALLOT: {1: "a", 2: "a"}}
    opened(job)
    assert job.lineage == {}
    job = job_of(2)
    job.lineage, job.votes = {2: 1}, {BALLOT: {1: "a", 2: "a"}}
    opened(job)
    assert job.lineage == {2: 1}


# a disputed step, computed again


def again(said: dict[int, str], digest: str, **trails: str) -> tuple[JobState, list[int], bool]:
    """What members said of step 7 the first time, what all say now, and what each puts into step 7, twice."""
    job = job_of(2)
    before = {int(name[1:]): ((7, text),) for name, text in trails.items() if name[0] == "b"}
    job.trails = {int(name[1:]): ((7, text),) for name, text in trails.items() if name[0] == "a"}
    job.dispute, job.dispute_count = Dispute(BALLOT, said, trails=before), 2
    job.votes = {BALLOT: {1: digest, 2: digest}}
    expelled, all_go_back, _ = opened(job)
    return job, expelled, all_go_back


def test_who_had_said_something_else_is_expelled_and_the_others_go_on():
    job, expelled, all_go_back = again({1: "good", 2: "bad"}, "good")
    assert (expelled, all_go_back, job.restore) == ([2], False, False)
    assert (job.dispute, job.dispute_count, job.trails, job.agreed_step) == (None, 0, {}, 7)


def test_where_none_was_right_who_was_the_first_to_differ_is_expelled():
    steps = {"b1": "0/x", "b2": "1/b", "a1": "0/a", "a2": "1/b"}
    job, expelled, _ = again({1: "bad", 2: "worse"}, "good", **steps)
    assert (expelled, job.dispute) == ([1], None)
    job, expelled, _ = again({1: "bad", 2: "worse"}, "good")
    assert (expelled, job.dispute) == ([], None)


def test_an_agreement_on_another_step_leaves_the_dispute_open():
    job = job_of(2)
    job.dispute, job.dispute_count = Dispute((8, ""), {1: "a", 2: "b"}), 1
    job.votes = {BALLOT: {1: "a", 2: "a"}}
    assert opened(job)[:2] == ([], False)
    assert (job.dispute, job.dispute_count) == (Dispute((8, ""), {1: "a", 2: "b"}), 1)


# reports


def test_reports_that_are_the_same_change_nothing():
    job = job_of(2)
    job.lineage = {2: 1, 9: 1}
    assert reports(job, report("a"), report("a")) == ([], [])
    assert (job.restore, job.lineage) == (False, {2: 1, 9: 1})
    job.lineage = {2: 8, 9: 1}
    reports(job, report("a"), report("a"))
    assert job.lineage == {9: 1}


def test_reports_that_differ_expel_a_minority_or_open_a_dispute():
    job = job_of()
    expelled, _ = reports(job, report("a"), report("b"), report("a"))
    assert (expelled, job.restore, job.tainted_until) == ([2], True, 7)
    job = job_of(2)
    expelled, _ = reports(job, report("a", trail=((7, "0/a"),)), report("b"))
    assert (expelled, job.restore) == ([], True)
    assert job.dispute is not None
    assert job.dispute.hash_key == (7, "report")
    assert job.dispute.trails == {1: ((7, "0/a"),), 2: ()}


def test_only_reports_of_the_furthest_step_are_compared():
    job = job_of()
    assert reports(job, report("a"), report("b", (6, 9, 9)), report("a", (7, 1, 0)))[0] == []
    assert reports(job, report("a"), report("b", None), report(""))[0] == []
    assert not job.restore


def test_what_members_agreed_on_is_known_from_their_reports_unless_all_go_back():
    job = job_of(2)
    reports(job, report("a", agreed=6), report("a", agreed=5))
    assert job.agreed_step == 6
    job.restore = True
    reports(job, report("a", agreed=7), report("a"))
    assert job.agreed_step == 6
    job = job_of(2)
    job.agreed_step = -1
    reports(job, report("a", agreed=0), report("a"))
    assert job.agreed_step == 0


def test_the_only_one_that_is_left_and_differed_from_those_who_are_gone_hands_nothing_on():
    job = job_of(2)
    reports(job, report("a", peers_differed=True), report("", None))
    assert (job.restore, job.tainted_until) == (True, 7)
    job = job_of(2)
    reports(job, report("a"), report("", None))
    assert not job.restore
    job = job_of(2)
    reports(job, report("a", peers_differed=True), report("a", peers_differed=True))
    assert not job.restore
    job = job_of(2)
    job.restore = True
    reports(job, report("a", peers_differed=True), report("", None))
    assert job.tainted_until == -1


def test_one_whose_memory_has_changed_is_expelled_before_anything_is_compared():
    job = job_of()
    job.votes, job.dispute = {BALLOT: {1: "a", 2: "b", 3: "b"}}, Dispute(BALLOT, {})
    expelled, out = reports(job, report("a"), report("a", (8, 0, 0), memory_changed=True), report("b"))
    assert expelled == [2]
    assert (job.restore, job.tainted_until, job.votes, vars(job)["dispute"]) == (True, 8, {}, None)
    assert "step 8" in some(out, RecordVerdict)[0].what


def test_a_memory_that_has_changed_without_a_step_is_expelled_as_well():
    for first, second, tainted in (((8, 0, 0), None, 8), (None, None, 4)):
        job = job_of()
        spoiled = [report("a", progress, memory_changed=True) for progress in (first, second)]
        assert reports(job, *spoiled, report("a"))[0] == [1, 2]
        assert (job.restore, job.restore_before, job.tainted_until) == (True, 4, tainted)


def test_trails_are_kept_before_members_go_back_and_once():
    job = job_of(2)
    job.restore, job.dispute = True, Dispute(BALLOT, {1: "a", 2: "b"})
    job.trails = {1: ((5, "x"),)}
    reports(job, report("a", trail=((7, "0/a"),)), report("a", trail=((7, "1/b"),)))
    assert job.dispute is not None
    assert job.dispute.trails == {1: ((7, "0/a"),), 2: ((7, "1/b"),)}
    assert job.trails == {}
    reports(job, report("a", trail=((9, "0/z"),)), report("a"))
    assert job.dispute.trails[1] == ((7, "0/a"),)
    job.restore = False
    job.dispute = Dispute(BALLOT, {1: "a", 2: "b"})
    reports(job, report("a", trail=((9, "0/z"),)), report("a"))
    assert job.dispute.trails == {}


def test_the_assignment_of_a_dispute_is_kept_for_the_same_members():
    job = job_of(2)
    order = list(job.workers.values())
    job.dispute, job.restore = Dispute(BALLOT, {}, assignment=((0, 3), (1, 2))), True
    assert replica_divergence.assignment_of_dispute(job, order) == ((0, 3), (1, 2))
    assert replica_divergence.assignment_of_dispute(job, order[:1]) is None
    one_leaves = [order[0], replace(order[1], leave_reason="preempted")]
    assert replica_divergence.assignment_of_dispute(job, one_leaves) is None
    job.restore = False
    assert replica_divergence.assignment_of_dispute(job, order) is None
    job.restore, job.dispute = True, None
    assert replica_divergence.assignment_of_dispute(job, order) is None


def test_those_that_differ_are_expelled_in_the_order_of_their_numbers_not_of_their_votes():
    job = job_of(5)
    job.votes = {BALLOT: {5: "b", 4: "a", 2: "c", 3: "a", 1: "a"}}
    expelled, _, out = opened(job)
    assert expelled == [2, 5]
    assert [verdict.member for verdict in some(out, RecordVerdict)] == [2, 5]
