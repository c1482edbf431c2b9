"""What the hashes of a step say, who was the first to differ, and what state is missing."""

from __future__ import annotations

from dataclasses import replace

from paceline.control.field_types import Progress
from paceline.control.messages import MemberReport
from paceline.elastic.machine import budgets, hash_votes, view_change
from paceline.elastic.machine.hash_votes import judge, judged
from paceline.elastic.machine.settings import MachineSettings
from paceline.elastic.machine.state import Slot

BALLOT = (7, "")


def test_all_agree():
    found = judged(BALLOT, {1: "a", 2: "a", 3: "a"}, {})
    assert (found.dissenters, found.tie, found.witnesses, found.digest) == ((), False, 3, "a")
    assert (found.step, found.hash_key) == (7, BALLOT)


def test_a_majority_is_more_than_half():
    found = judged(BALLOT, {1: "a", 2: "b", 3: "a"}, {})
    assert (found.dissenters, found.tie, found.witnesses, found.digest) == ((2,), False, 2, "a")
    assert judged(BALLOT, {1: "a", 2: "b"}, {}).tie
    assert judged(BALLOT, {1: "a", 2: "b", 3: "a", 4: "b"}, {}).tie
    assert judged(BALLOT, {1: "a", 2: "a", 3: "b", 4: "c"}, {}).tie
    found = judged(BALLOT, {1: "b", 2: "c", 3: "a", 4: "a", 5: "a"}, {})
    assert (found.dissenters, found.tie) == ((1, 2), False)


def test_who_took_its_state_from_another_is_one_vote_with_it():
    assert judged(BALLOT, {1: "a", 2: "a", 3: "b"}, {2: 1}).tie
    assert judged(BALLOT, {1: "a", 2: "a"}, {2: 1}).witnesses == 1
    assert judged(BALLOT, {1: "a", 2: "a", 3: "b", 4: "a"}, {2: 1}).dissenters == (3,)


def test_a_second_vote_counts_instead_of_the_first():
    votes = hash_votes.with_vote({}, BALLOT, 1, "a")
    votes = hash_votes.with_vote(votes, BALLOT, 2, "b")
    assert hash_votes.with_vote(votes, BALLOT, 1, "c") == {BALLOT: {1: "c", 2: "b"}}
    assert votes == {BALLOT: {1: "a", 2: "b"}}


def test_only_the_latest_steps_are_kept():
    votes: dict[tuple[int, str], object] = {}
    for step in range(12):
        votes = hash_votes.with_vote(votes, (step, ""), 1, "a")  # type: ignore[arg-type,assignment]
    assert sorted(votes) == [(step, "") for step in range(4, 12)]


def test_only_what_all_voters_voted_on_is_judged():
    votes = {(5, ""): {1: "a", 2: "a"}, (6, ""): {1: "a"}}
    found = judge(votes, [1, 2], {})
    assert found is not None
    assert found.step == 5
    assert judge(votes, [1, 2, 3], {}) is None
    assert judge(votes, [], {}) is None
    assert judge({(6, ""): {1: "a"}}, [1], {}) is None  # one alone says nothing


def test_the_first_bad_step_comes_before_the_last_good_one():
    good, bad = {1: "a", 2: "a", 3: "a"}, {1: "a", 2: "b", 3: "a"}
    votes = {(9, ""): bad, (7, ""): good, (8, ""): good, (10, ""): {1: "x", 2: "y", 3: "y"}}
    found = judge(votes, [1, 2, 3], {})
    assert found is not None
    assert (found.step, found.dissenters) == (9, (2,))
    del votes[9, ""], votes[10, ""]
    found = judge(votes, [1, 2, 3], {})
    assert found is not None
    assert (found.step, found.dissenters, found.tie) == (8, (), False)
    votes[6, ""] = {1: "a", 2: "b"}
    found = judge(votes, [1, 2], {})
    assert found is not None
    assert (found.step, found.tie) == (6, True)


def test_votes_of_members_that_are_gone_count():
    found = judge({BALLOT: {1: "a", 2: "b", 3: "a"}}, [1, 2], {})
    assert found is not None
    assert found.dissenters == (2,)


# who was the first to differ


def trail(**steps: str) -> hash_votes.Trail:
    """s5="0/x": in step 5 shard 0 with hash x."""
    return tuple((int(step[1:]), text) for step, text in steps.items())


AGAIN = [trail(s5="0/a", s6="0/b"), trail(s5="1/c", s6="1/d")]


def test_the_first_that_put_something_else_into_a_step():
    before = {1: trail(s5="0/a", s6="0/x"), 2: trail(s5="1/z", s6="1/y")}
    assert hash_votes.first_to_differ(before, AGAIN, [1, 2]) == (5, (2,))
    before = {1: trail(s5="0/a", s6="0/x"), 2: trail(s5="1/c", s6="1/d")}
    assert hash_votes.first_to_differ(before, AGAIN, [1, 2]) == (6, (1,))


def test_steps_are_compared_in_their_order_and_not_in_that_of_a_set():
    again = [trail(s8="0/b", s1="0/a"), trail(s8="1/d", s1="1/c")]
    before = {1: trail(s1="0/a", s8="0/x"), 2: trail(s1="1/z", s8="1/y")}
    assert hash_votes.first_to_differ(before, again, [1, 2]) == (1, (2,))


def test_those_who_differ_are_named_in_order():
    again = [trail(s5="0/a"), trail(s5="1/c"), trail(s5="2/e")]
    before = {1: trail(s5="0/x"), 2: trail(s5="1/c"), 3: trail(s5="2/y")}
    assert hash_votes.first_to_differ(before, again, [3, 2, 1]) == (5, (1, 3))


def test_where_all_differ_at_once_none_is_named():
    before = {1: trail(s5="0/x", s6="0/b"), 2: trail(s5="1/z", s6="1/y")}
    assert hash_votes.first_to_differ(before, AGAIN, [1, 2]) == (-1, ())


def test_a_step_that_cannot_be_compared_makes_the_next_ones_uncertain():
    before = {1: trail(s5="0/a", s6="0/x"), 2: trail(s6="1/d")}
    assert hash_votes.first_to_differ(before, AGAIN, [1, 2]) == (-1, ())
    again = [trail(s5="0/a", s6="0/b", s7="0/e"), trail(s5="1/c", s6="1/d", s7="1/f")]
    before = {1: trail(s5="0/a", s6="0/b", s7="0/e"), 2: trail(s6="1/d", s7="1/x")}
    assert hash_votes.first_to_differ(before, again, [1, 2]) == (7, (2,))


def test_other_shards_than_the_second_time_cannot_be_compared():
    before = {1: trail(s5="0,1/a"), 2: trail(s5="1/z")}
    assert hash_votes.first_to_differ(before, AGAIN, [1, 2]) == (-1, ())
    assert hash_votes.first_to_differ({}, AGAIN, [1, 2]) == (-1, ())


def test_the_step_of_a_dispute():
    assert hash_votes.Dispute((4, "x"), {}).step == 4


# state that only one member has


def report(
    progress: Progress | None, *owed: tuple[int, tuple[int, ...]], private: bool = True
) -> MemberReport:
    return MemberReport(
        generation=1, progress=progress, held_shards=(), has_private_state=private, private_shards=owed
    )


def test_private_state_fits_the_furthest_member():
    both = [report((5, 0, 0), (5, (0, 1))), report((5, 0, 0), (5, (2,)))]
    assert view_change.missing_private_state(3, both) == ()
    assert view_change.missing_private_state(4, both) == (3,)
    assert view_change.missing_private_state(3, both[:1]) == (2,)
    behind = [report((5, 0, 0), (5, (0, 1))), report((4, 1, 0), (4, (2,)))]
    assert view_change.missing_private_state(3, behind) == (2,)
    behind = [report((5, 0, 0), (5, (0, 1))), report((4, 1, 0), (4, (2,)), (5, (2,)))]
    assert view_change.missing_private_state(3, behind) == ()


def test_where_there_is_no_private_state_none_is_missing():
    assert view_change.missing_private_state(2, [report((5, 0, 0), private=False)]) == ()
    assert view_change.missing_private_state(2, [report(None, (5, (0,)))]) == ()
    assert view_change.missing_private_state(2, []) == ()
    one_has_it = [report((5, 0, 0), private=False), report((5, 0, 0), (5, (0, 1)))]
    assert view_change.missing_private_state(2, one_has_it) == ()
    assert view_change.missing_private_state(3, one_has_it) == (2,)


def test_private_state_of_one_without_state_does_not_count():
    assert view_change.missing_private_state(2, [report((5, 0, 0), (5, (0,))), report(None, (5, (1,)))]) == (
        1,
    )


def test_what_is_missing_in_words():
    assert view_change.name_residuals([3]) == "the compression residual of shard 3 is lost"
    assert view_change.name_residuals(range(6)).endswith("residuals of shards 0, 1, 2, 3, 4, 5 are lost")
    assert view_change.name_residuals(range(7)).endswith("shards 0, 1, 2, 3, 4, 5 and others are lost")


# budgets

SETTINGS = MachineSettings(workers=2, shards=2, backoff=0.5, backoff_most=4.0, jitter=0.0, max_preemptions=2)


def test_the_first_replacement_starts_at_once_and_each_next_one_waits_twice_as_long():
    waits = [budgets.wait_before_start(SETTINGS, 0, failures, failures) for failures in range(8)]
    assert waits == [0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert budgets.wait_before_start(SETTINGS, 0, 5000, 1) == 4.0


def test_a_share_of_the_wait_is_random_and_the_same_again():
    settings = replace(SETTINGS, jitter=0.25)
    waits = {budgets.wait_before_start(settings, slot, 3, total) for slot in range(5) for total in range(5)}
    assert len(waits) == 25
    assert all(0.75 <= wait <= 1.0 for wait in waits)
    assert max(waits) - min(waits) > 0.15
    assert budgets.wait_before_start(settings, 1, 3, 2) in waits
    assert budgets.wait_before_start(replace(settings, seed=9), 1, 3, 2) not in waits


def test_a_failure_is_counted():
    slot = Slot(1, worker=7, failures=1, total_failures=4, weight=0.5)
    after = budgets.after_failure(SETTINGS, slot, "crash", 59.0, 100.0)
    assert (after.worker, after.failures, after.total_failures) == (None, 2, 5)
    assert (after.weight, after.given_up, after.start_at) == (0.5, False, 100.5)


def test_good_work_is_rewarded():
    slot = Slot(1, worker=7, failures=2, weight=0.25)
    after = budgets.after_failure(SETTINGS, slot, "crash", 60.0, 100.0)
    assert (after.failures, after.weight, after.start_at) == (1, 1.0, 100.0)
    assert budgets.after_failure(SETTINGS, slot, "memory", 60.0, 100.0).weight == 0.5
    assert budgets.after_failure(SETTINGS, slot, "memory", 0.0, 100.0).weight == 0.125


def test_a_spent_budget_gives_the_slot_up():
    after = budgets.after_failure(SETTINGS, Slot(1, worker=7, failures=2), "crash", 0.0, 100.0)
    assert (after.failures, after.given_up) == (3, False)
    after = budgets.after_failure(SETTINGS, Slot(1, worker=7, failures=3), "crash", 0.0, 100.0)
    assert (after.failures, after.given_up, after.start_at, after.worker) == (4, True, None, None)


def test_a_preemption_has_its_own_budget():
    slot = Slot(1, worker=7, failures=2)
    after = budgets.after_preemption(SETTINGS, slot, 2, 100.0)
    assert (after.worker, after.start_at, after.given_up, after.failures) == (None, 100.0, False, 2)
    after = budgets.after_preemption(SETTINGS, slot, 3, 100.0)
    assert (after.worker, after.start_at, after.given_up) == (None, None, True)
    after = budgets.after_preemption(SETTINGS, replace(slot, agent_id=1), 1, 100.0)
    assert (after.start_at, after.given_up) == (100.5, False)


def test_an_absence_and_a_replacement_are_no_failures():
    slot = Slot(1, worker=7, failures=2, replacements=1)
    after = budgets.after_absence(SETTINGS, slot, 100.0)
    assert (after.worker, after.start_at, after.failures) == (None, 100.0, 2)
    assert budgets.after_absence(SETTINGS, replace(slot, agent_id=1), 100.0).start_at == 100.5
    after = budgets.after_replacement(slot, 100.0)
    assert (after.worker, after.start_at, after.failures, after.replacements) == (None, 100.0, 2, 2)
