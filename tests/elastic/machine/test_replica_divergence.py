"""Members hold different states: who is named, who is right, and whose state may be handed on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.elastic.machine.machine_driver import (
    Driven,
    asked,
    hello_of,
    installed_by,
    only,
    report_of,
    some,
    vote_of,
)

from paceline.elastic.machine import machine
from paceline.elastic.machine.actions import EndJob, InstallView, RecordVerdict
from paceline.elastic.machine.hash_votes import Trail, first_to_differ
from paceline.elastic.machine.machine_events import WorkerLost
from paceline.elastic.supervisor.supervisor_recovery import SnapshotFile, SupervisorSnapshot

PROGRESS = (12, 1, 0)


def generation_of(job: Driven) -> int:
    assert job.state.view is not None
    return job.state.view.generation


def differ(job: Driven, votes: dict[int, str], step: int = 12, agreed: int = 8) -> list:
    """Members see in one exchange that they differ."""
    generation = generation_of(job)
    return [
        action
        for member, digest in votes.items()
        for action in job.tell(vote_of(member, step, f"sample:{digest}", generation, agreed))
    ]


def report(job: Driven, digests: dict[int, str], agreed: int = 8, step: int = 12) -> list:
    """All who are asked report with the digest of their state; others have none."""
    told = []
    for number in sorted(job.state.pending):
        digest = digests.get(number)
        progress = None if digest is None else (step, 1, 0)
        digest = "" if digest is None else f"report:{digest}"
        told += job.tell(
            report_of(number, job.state.generation, progress, (), False, digest, -1 if not digest else agreed)
        )
    return told


def test_the_member_that_differs_from_a_majority_is_named_by_any_rank():
    for odd in (1, 2, 3):
        job = Driven(3, 6).running()
        job.beat_all(steps=12)
        told = differ(job, {member: "bad" if member == odd else "good" for member in (1, 2, 3)})
        told += report(job, {member: "bad" if member == odd else "good" for member in (1, 2, 3)})
        assert only(told, RecordVerdict).slot == odd - 1
        plan = only(told, InstallView).plan
        assert (plan.restore, plan.restore_before, odd in plan.members) == (True, 8, False)


def test_members_that_saw_a_difference_go_back_although_none_is_left_to_compare_with():
    """Who voted last may be the one that is wrong: its state is handed to none."""
    job = Driven(2, 4).running()
    job.beat_all(steps=12)
    differ(job, {1: "bad"})
    job.tell(WorkerLost(2, "crash", "killed"))
    told = report(job, {1: "bad"})
    plan = only(told, InstallView).plan
    assert (plan.restore, plan.restore_before) == (True, 8)


def test_members_that_saw_a_difference_before_they_had_agreed_on_any_step_go_back_to_the_beginning():
    job = Driven(3, 6).running()
    job.beat_all(steps=1)
    assert asked(differ(job, {3: "good"}, step=1, agreed=0)).abort
    plan = only(report(job, dict.fromkeys((1, 2, 3), "same"), agreed=0, step=1), InstallView).plan
    assert (plan.restore, plan.restore_before) == (True, 0)


def test_a_member_that_is_told_to_stop_before_it_has_voted_is_judged_by_its_report():
    job = Driven(3, 6).running()
    job.beat_all(steps=12)
    told = differ(job, {3: "good"})
    assert asked(told).abort
    told = report(job, {1: "bad", 2: "good", 3: "good"})
    assert only(told, RecordVerdict).slot == 0
    assert only(told, InstallView).plan.restore


def test_a_member_that_is_stopped_in_the_comparison_votes_all_the_same():
    """What reports do not hold (buffers) differs: with the vote of the second the odd one can be found."""
    job = Driven(2, 4).running()
    job.beat_all(steps=12)
    differ(job, {1: "good"})
    job.tell(vote_of(2, 12, "sample:bad", generation_of(job)))
    told = report(job, {1: "same", 2: "same"})
    assert only(told, InstallView).plan.disputed == 12
    job.install_all()
    generation = generation_of(job)
    job.tell(vote_of(1, 12, "sample:good", generation))
    assert only(job.tell(vote_of(2, 12, "sample:good", generation)), RecordVerdict).slot == 1


def test_a_state_is_not_handed_on_when_another_member_holds_another_one():
    """A worker is killed for some other reason, and the reports show that the others differ."""
    job = Driven(4, 8).running()
    job.beat_all(steps=12)
    job.tell(WorkerLost(4, "crash", "killed"))
    told = report(job, {1: "bad", 2: "good", 3: "good"})
    assert only(told, RecordVerdict).slot == 0
    plan = only(told, InstallView).plan
    assert (plan.members[:2], plan.restore, plan.restore_before) == ((2, 3), True, 8)


def test_the_same_reports_change_nothing():
    job = Driven(3, 6).running()
    job.beat_all(steps=12)
    job.tell(WorkerLost(3, "crash", "killed"))
    plan = only(report(job, {1: "good", 2: "good"}), InstallView).plan
    assert (plan.restore, plan.members[:2]) == (False, (1, 2))


def test_without_a_majority_all_compute_it_again_and_what_comes_out_names_the_one_that_was_wrong():
    job = Driven(2, 4).running()
    job.beat_all(steps=12)
    told = differ(job, {1: "bad", 2: "good"})
    assert not some(told, RecordVerdict)
    told = report(job, {1: "bad", 2: "good"})
    assert not some(told, RecordVerdict)
    plan = only(told, InstallView).plan
    assert (plan.members, plan.restore, plan.restore_before, plan.disputed) == ((1, 2), True, 8, 12)
    job.install_all()
    job.beat_all(steps=9)
    job.tell(vote_of(1, 12, "sample:good", plan.generation))
    told = job.tell(vote_of(2, 12, "sample:good", plan.generation))
    verdict = only(told, RecordVerdict)
    assert verdict.slot == 0
    assert "computed again" in verdict.what
    plan = only(report(job, {2: "good"}), InstallView).plan
    assert (plan.restore, plan.disputed, 2 in plan.members) == (False, -1, True)


def test_a_step_that_no_member_had_right_names_none():
    job = Driven(2, 4).running()
    job.beat_all(steps=12)
    differ(job, {1: "bad", 2: "worse"})
    report(job, {1: "bad", 2: "worse"})
    job.install_all()
    generation = generation_of(job)
    told = [action for m in (1, 2) for action in job.tell(vote_of(m, 12, "sample:good", generation))]
    assert not some(told, RecordVerdict)
    assert job.state.dispute is None


def test_members_that_differ_again_and_again_end_the_job():
    job = Driven(2, 4).running()
    for _ in range(2):
        job.beat_all(steps=12)
        differ(job, {1: "one", 2: "other"})
        report(job, {1: "one", 2: "other"})
        job.install_all()
    job.beat_all(steps=12)
    differ(job, {1: "one", 2: "other"})
    end = only(report(job, {1: "one", 2: "other"}), EndJob)
    assert not end.ok
    assert "ranks 0 and 1 differ" in end.reason


def test_disputes_of_steps_that_are_long_agreed_on_do_not_add_up():
    job = Driven(2, 4).running()
    for step in (12, 32, 52, 72):
        job.beat_all(steps=step)
        differ(job, {1: "one", 2: "other"}, step, step - 4)
        told = report(job, {1: "one", 2: "other"}, step - 4, step)
        assert only(told, InstallView).plan.restore_before == step - 4
        job.install_all()


def test_a_state_that_was_handed_on_is_one_vote_with_its_source():
    """Rank 0 alone had the last result and hands it to both others: what they say is what it says."""
    job = Driven(3, 6).running()
    job.beat_all(steps=12)
    job.tell(WorkerLost(2, "crash", "killed"))
    report(job, {1: "copied", 3: "copied"})
    job.install_all()
    job.state.lineage.clear()
    job.join_all()
    report(job, {1: "copied"})  # member 3 has not got the last result
    assert job.state.lineage == {3: 1, job.of_slot(1): 1}
    job.install_all()
    job.state.lineage.pop(3)  # as if it had been independent
    job.beat_all(steps=13)
    generation = generation_of(job)
    votes = {member: "other" if member == 3 else "copied" for member in job.members}
    told = [action for m, digest in votes.items() for action in job.tell(vote_of(m, 15, digest, generation))]
    assert not some(told, RecordVerdict)  # two against one, and yet no majority
    assert job.state.dispute is not None


def test_a_state_that_an_independent_member_confirms_makes_a_new_voter():
    job = Driven(3, 6).running()
    job.beat_all(steps=12)
    job.tell(WorkerLost(3, "crash", "killed"))
    report(job, {1: "good", 2: "good"})
    job.install_all()
    job.join_all()
    report(job, {1: "good", 2: "good"})
    job.install_all()
    assert job.state.lineage == {}
    newest = job.of_slot(2)
    generation = generation_of(job)
    votes = {1: "bad", 2: "good", newest: "good"}
    told = [action for m, digest in votes.items() for action in job.tell(vote_of(m, 15, digest, generation))]
    assert only(told, RecordVerdict).slot == 0


def test_a_dissent_right_after_a_resume_keeps_the_checkpoint_that_the_job_resumed_from():
    """The members hold what a checkpoint of step 10 holds, and no step was compared since."""
    job = Driven(3, 6)
    job.join_all()
    for member in (1, 2, 3):
        job.tell(installed_by(member, job.state.generation, (10, 0, 0)))
    job.beat_all(steps=12)
    told = [
        action
        for member, digest in {1: "good", 2: "bad", 3: "good"}.items()
        for action in job.tell(vote_of(member, 12, digest, generation_of(job)))
    ]
    assert only(told, RecordVerdict).slot == 1
    plan = only(report(job, {1: "good", 3: "good"}, agreed=-1), InstallView).plan
    assert (plan.restore, plan.restore_before) == (True, 10)


def reported_trails(job: Driven, digests: dict[int, str], trails: dict[int, Trail]) -> list:
    """As `report`, with what each member put into the latest steps."""
    told = []
    for number in sorted(job.state.pending):
        digest = f"report:{digests[number]}"
        event = report_of(number, job.state.generation, PROGRESS, (), False, digest, 8, trail=trails[number])
        told += job.tell(event)
    return told


def polluted() -> tuple[dict[int, Trail], dict[int, Trail]]:
    """Member 2 is the odd one: its step 11 is wrong, and so is step 12 of both. And what is right."""
    before: dict[int, Trail] = {
        1: ((9, "a/1/1"), (10, "a/2/2"), (11, "a/3/3"), (12, "a/4/wrong")),
        2: ((9, "b/1/5"), (10, "b/2/6"), (11, "b/3/wrong"), (12, "b/4/wrong")),
    }
    again: dict[int, Trail] = {
        1: ((9, "a/1/1"), (10, "a/2/2"), (11, "a/3/3"), (12, "a/4/4")),
        2: ((9, "b/1/5"), (10, "b/2/6"), (11, "b/3/7"), (12, "b/4/8")),
    }
    return before, again


def test_where_no_member_was_right_the_first_that_put_something_else_into_a_step_is_named():
    before, again = polluted()
    job = Driven(2, 4).running()
    job.beat_all(steps=12)
    assert job.state.view is not None
    deal = job.state.view.shards
    job.state.heartbeats[1] = dataclasses.replace(
        job.state.heartbeats[1], shard_seconds=9.0
    )  # it is slow by now
    differ(job, {1: "bad", 2: "worse"})
    plan = only(reported_trails(job, {1: "bad", 2: "worse"}, before), InstallView).plan
    assert (plan.restore, plan.disputed, plan.shards) == (True, 12, deal)
    job.install_all()
    told = [
        action
        for member in (1, 2)
        for action in job.tell(vote_of(member, 12, "sample:good", plan.generation, -1, again[member]))
    ]
    verdict = only(told, RecordVerdict)
    assert verdict.slot == 1
    assert "step 11" in verdict.what


@pytest.mark.parametrize("moment", ["before the reports", "while the step is computed again"])
def test_a_dispute_outlives_the_supervisor(moment, tmp_path):
    before, again = polluted()
    job = Driven(2, 4).running()
    job.beat_all(steps=12)
    differ(job, {1: "bad", 2: "worse"})
    if moment == "before the reports":
        job = after_a_restart(job, tmp_path)
    reported_trails(job, {1: "bad", 2: "worse"}, before)
    job.install_all()
    generation = generation_of(job)
    told = job.tell(vote_of(1, 12, "sample:good", generation, -1, again[1]))
    if moment != "before the reports":
        job = after_a_restart(job, tmp_path)
    told = job.tell(vote_of(2, 12, "sample:good", generation, -1, again[2]))
    assert only(told, RecordVerdict).slot == 1


def after_a_restart(job: Driven, folder: Path) -> Driven:
    """Another supervisor, which knows what was in the file; the members come back."""
    SnapshotFile(folder).save(SupervisorSnapshot(began=machine.snapshot(job.state)))
    known = SnapshotFile(folder).load()
    assert known is not None
    generation = generation_of(job)
    made = Driven(2, 4, began=known.began)
    for number, (slot, _) in known.began.members.items():
        made.tell(hello_of(number, slot, generation=generation, progress=PROGRESS))
    return made


def test_what_cannot_be_compared_names_none():
    before, again = polluted()
    assert first_to_differ(before, again.values(), (1, 2)) == (11, (2,))
    assert first_to_differ(before, again.values(), (1, 2, 3)) == (-1, ())  # one of them is gone, untold
    dealt = {1: tuple((step, f"c/{text[2:]}") for step, text in again[1]), 2: again[2]}
    assert first_to_differ(before, dealt.values(), (1, 2)) == (-1, ())
    late = {1: before[1][3:], 2: before[2][3:]}
    assert first_to_differ(late, again.values(), (1, 2)) == (-1, ())
    both = {1: ((9, "a/1/x"),), 2: ((9, "b/1/x"),)}
    assert first_to_differ(both, again.values(), (1, 2)) == (-1, ())


def test_who_is_left_alone_and_had_something_else_than_those_who_are_gone_hands_nothing_on():
    for doubted in (True, False):
        job = Driven(2, 4).running()
        job.beat_all(steps=12)
        job.tell(WorkerLost(2, "crash", "killed"))
        (number,) = job.state.pending
        event = report_of(
            number, job.state.generation, PROGRESS, (), False, "report:x", 8, peers_differed=doubted
        )
        told = job.tell(event)
        plan = only(told, InstallView).plan
        assert (plan.restore, plan.restore_before) == ((True, 8) if doubted else (False, -1))
        assert not some(told, RecordVerdict)


def test_a_member_whose_memory_has_changed_is_named_by_its_own_report():
    job = Driven(3, 6).running()
    job.beat_all(steps=12)
    job.tell(WorkerLost(3, "crash", "killed"))
    told = []
    for number in sorted(job.state.pending):
        spoiled, digest = number == 1, "report:bad" if number == 1 else "report:good"
        event = report_of(
            number, job.state.generation, PROGRESS, (), False, digest, 8, memory_changed=spoiled
        )
        told += job.tell(event)
    assert only(told, RecordVerdict).slot == 0
    plan = only(told, InstallView).plan
    assert (plan.restore, plan.restore_before, 1 in plan.members) == (True, 8, False)
