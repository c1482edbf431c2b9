"""The audit: whatever a run went through is proved, and whatever is taken from its journal is missed."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st
from tests.train.made_journals import MadeRun

from paceline.core import events
from paceline.data.permutation import Permutation
from paceline.monitor import journal_index
from paceline.monitor.audit import audit

SEEDS = range(60)
MUTATED = range(20, 36)


def made(seed: int, **changes) -> list[events.Event]:
    return MadeRun(seed, **{"skips": bool(seed % 2), "drop_last": seed % 3 == 0, **changes}).run()


def counted(journal) -> set[int]:
    """Where the lines of the commits that count stand."""
    return {commit.index for commit in journal_index.read(journal).steps.values()}


@given(
    seed=st.integers(0, 10**6),
    workers=st.integers(1, 7),
    shards=st.integers(1, 9),
    size=st.integers(1, 90),
    batch=st.integers(1, 20),
    skips=st.booleans(),
    trouble=st.sampled_from([0.0, 0.1, 0.4]),
)
@settings(max_examples=150, deadline=None)
def test_whatever_a_run_went_through_it_is_proved(seed, workers, shards, size, batch, skips, trouble):
    run = MadeRun(
        seed, workers=workers, shards=shards, size=size, batch=batch, skips=skips, trouble=trouble, epochs=2
    )
    found = audit(run.run())
    assert found.wrong == ()
    assert found.proved
    assert found.steps == run.step == 2 * -(-size // batch)
    assert found.samples + found.skipped == 2 * size or run.skips
    assert [epoch.covered for epoch in found.epochs] == [size, size]
    assert found.enumerated
    assert found.receipts.by_receipt + found.receipts.by_commit == found.steps * shards
    assert found.final_hash == run.hash(run.step)


def test_all_that_a_run_can_go_through_is_in_these_seeds():
    """So that the mutations below are about real journals."""
    seen = [audit(made(seed)) for seed in SEEDS]
    assert all(one.proved for one in seen)
    assert sum(one.receipts.by_commit > 0 for one in seen) > 10
    assert sum(one.receipts.superseded > 0 for one in seen) > 5
    assert sum(one.restarts > 0 for one in seen) > 10
    assert sum(one.skipped > 0 for one in seen) > 10
    assert sum(one.supervisors > 1 for one in seen) > 10
    assert sum(one.redone > 0 for one in seen) > 10


@pytest.mark.parametrize("seed", SEEDS)
def test_containers_number_their_processes_alike(seed):
    """The next process of a rank has the number of the one before it, and processes of two hosts may have
    one number."""
    alike = []
    for event in made(seed):
        if isinstance(event, events.ViewChanged):
            event = dataclasses.replace(event, pids=[5 + rank % 2 for rank in event.members])
        elif isinstance(event, events.StepsReceived | events.WorkerFailed | events.WorkerStarted):
            event = dataclasses.replace(event, pid=5 + event.rank % 2)
        alike.append(event)
    assert audit(alike).wrong == audit(made(seed)).wrong == ()


def without(journal, index):
    return [*journal[:index], *journal[index + 1 :]]


def with_changed(journal, at, **changes):
    return [*journal[:at], dataclasses.replace(journal[at], **changes), *journal[at + 1 :]]


def lines(journal, kind):
    return [index for index, event in enumerate(journal) if isinstance(event, kind)]


@pytest.mark.parametrize("seed", MUTATED)
def test_every_commit_that_is_taken_away_or_doubled_or_moved_is_found(seed):
    journal = made(seed)
    for index in counted(journal):
        event = journal[index]
        assert isinstance(event, events.StepCommitted)
        step = event.step
        missed = audit(without(journal, index)).wrong
        assert any(f"step {step} is missing" in line or f"after step {step}" in line for line in missed)
        twice = audit([*journal[: index + 1], event, *journal[index + 1 :]]).wrong
        assert any(f"step {step} was committed twice" in line for line in twice)
        assert audit(with_changed(journal, index, offset=event.offset + 1)).wrong
        assert audit(with_changed(journal, index, taken=event.taken - 1)).wrong
        assert audit(with_changed(journal, index, samples=event.samples - 1)).wrong
        assert audit(with_changed(journal, index, epoch=event.epoch + 2)).wrong
        assert audit(with_changed(journal, index, step=event.step + 1)).wrong
        assert audit(with_changed(journal, index, generation=event.generation + 50)).wrong


@pytest.mark.parametrize("seed", MUTATED)
def test_a_receipt_that_is_taken_away_is_missed_or_no_longer_counted(seed):
    """A lost worker's last receipts may never come: the commit of the others stands for them, and is counted
    apart. Any other receipt is missed."""
    journal = made(seed)
    before = audit(journal)
    record = journal_index.read(journal)
    for receipt in record.receipts:
        after = audit(without(journal, receipt.index))
        if after.wrong:
            assert any("missing" in line for line in after.wrong)
            continue
        moved = before.receipts.by_receipt - after.receipts.by_receipt
        assert moved == after.receipts.by_commit - before.receipts.by_commit
        edge = record.superseded_after(receipt)
        lost = {member for _, _, member in record.failures}
        survived = receipt.member not in lost and receipt.view[0] in record.ended_sessions
        if survived and edge is None and receipt.last > receipt.first:
            pytest.fail(f"{receipt} was not missed")


def test_the_next_view_says_who_had_not_got_the_last_result():
    """All stop for a joiner, one of them before the result has reached it: nothing failed, no worker is
    lost, and its receipt will never come."""
    run = MadeRun(7, trouble=0.0)
    run.start()
    run.commit()
    run.commit(run.members[:3])
    run.join()
    told = len(run.journal) - 1
    for _ in range(8):
        run.commit()
    for worker in run.members:
        run.receipt(worker)
    view = run.journal[told]
    assert isinstance(view, events.ViewChanged)
    assert view.behind == [3, 4]
    found = audit(run.journal)
    assert found.wrong == ()
    assert found.receipts.by_commit > 0
    (wrong,) = audit(with_changed(run.journal, told, behind=[4])).wrong
    assert "at step 2 in generation 1: rank 3 (pid 105) has no receipt" in wrong


@pytest.mark.parametrize("seed", MUTATED)
def test_other_shards_than_the_view_says_are_found(seed):
    journal = made(seed)
    record = journal_index.read(journal)
    for receipt in record.receipts:
        event = journal[receipt.index]
        assert isinstance(event, events.StepsReceived)
        if record.superseded_after(receipt) is not None:
            continue
        free = next(shard for shard in range(9) if shard not in event.shards)
        wrong = audit(with_changed(journal, receipt.index, shards=[*event.shards, free])).wrong
        # The worker that told a step alone and died with it: the others' receipts count.
        redone = receipt.first == receipt.last and not wrong
        assert redone or any(f"shard {free} is doubled at step" in line for line in wrong)
        if event.shards and not redone:
            wrong = audit(with_changed(journal, receipt.index, shards=event.shards[1:])).wrong
            assert any(f"shard {event.shards[0]} is missing at step" in line for line in wrong)
        assert redone or audit(with_changed(journal, receipt.index, pid=1)).wrong


@pytest.mark.parametrize("seed", MUTATED)
def test_views_that_are_missing_or_deal_otherwise_are_found(seed):
    journal = made(seed)
    record = journal_index.read(journal)
    used = {commit.view for commit in record.steps.values()}
    told = {
        (receipt.view, receipt.member)
        for receipt in record.receipts
        if record.superseded_after(receipt) is None and any(receipt.shards)
    }
    session = 0
    for index, event in enumerate(journal):
        if isinstance(event, events.SupervisorStarted) and event.attempt == 1:
            session += 1
        if not isinstance(event, events.ViewChanged) or (session, event.generation) not in used:
            continue
        view = (session, event.generation)
        if event.generation > 1:  # without the first of a session the next supervisor's is not known as one
            assert audit(without(journal, index)).wrong
        first, *rest = event.shards
        if first and rest:
            doubled = with_changed(journal, index, shards=[first, first, *rest[1:]])
            assert any("in the view" in line for line in audit(doubled).wrong)
            swapped = with_changed(journal, index, shards=[rest[0], first, *rest[1:]])
            pair = [(view, (event.members[n], event.pids[n], 0)) for n in (0, 1)]
            if first != rest[0] and all(one in told for one in pair):
                assert any("is doubled at step" in line for line in audit(swapped).wrong)


@pytest.mark.parametrize("seed", MUTATED)
def test_what_says_where_a_run_began_ended_and_skipped_is_missed(seed):
    journal = made(seed)
    for index in lines(journal, events.RunStarted):
        assert audit(without(journal, index)).wrong
    for index in lines(journal, events.RunResumed):
        event = journal[index]
        assert isinstance(event, events.RunResumed)
        before = journal_index.read(journal[:index]).last
        after = next(
            e for e in journal[index + 1 :] if isinstance(e, events.StepCommitted | events.RunResumed)
        )
        # Where the next resume follows at once, this one changed nothing.
        if event.step < before and isinstance(after, events.StepCommitted):
            assert audit(without(journal, index)).wrong
    ended = audit(journal[:-1])
    assert any("run_ended" in note for note in ended.notes)
    assert audit(with_changed(journal, len(journal) - 1, step=9999)).wrong
    record = journal_index.read(journal)
    again = {members.step + 1 for view, members in record.views.items() if view[1] > 1}
    for index, skip in record.skipped:
        if not record.superseded(skip.step + 1, index) and skip.step + 1 not in again:
            assert audit(without(journal, index)).wrong
            order = Permutation(53, 3, skip.epoch)
            stranger = order[(order.position_of(skip.index) + 8) % 53]
            assert audit(with_changed(journal, index, index=stranger)).wrong


def test_bits_that_differ_the_second_time_are_found():
    journal = next(made(seed) for seed in SEEDS if audit(made(seed)).redone)
    before = journal_index.read(journal).lost[0]
    assert audit(with_changed(journal, before.index, loss=7.0)).wrong == (
        f"step {before.event.step} was done again with other bits",
    )
    blamed = events.WorkerFailed(time=0.0, rank=0, pid=1, phase="", reason="", cause="dissent")
    changed = with_changed(journal, before.index, loss=7.0)
    found = audit([*changed[: before.index + 1], blamed, *changed[before.index + 1 :]])
    assert found.proved
    assert any("was disowned" in note for note in found.notes)
    # Told late: steps that are disowned stand behind the failure, and the resume says what became of them.
    restart = next(
        index
        for index, event in enumerate(journal)
        if index > before.index and isinstance(event, events.RunResumed | events.RunStarted)
    )
    assert audit(with_changed(changed, restart, disowned=True)).proved
    assert not audit(changed).proved
    now = journal_index.read(journal).steps[before.event.step]
    sampled = with_changed(with_changed(journal, before.index, sample="a"), now.index, sample="a")
    assert audit(sampled).proved
    assert audit(with_changed(sampled, now.index, sample="b")).wrong
    shard = lines(journal, events.ShardHashed)[-1]
    event = journal[shard]
    assert isinstance(event, events.ShardHashed)
    other = dataclasses.replace(event, rank=5, hash="other")
    (wrong,) = audit([*journal, other]).wrong
    assert wrong == (
        f"shard {event.shard} of step {event.step} has the hash {event.hash} on rank {event.rank} "
        "and other on rank 5"
    )


def test_a_run_without_a_supervisor_shows_what_it_can():
    found = audit(MadeRun(1, supervised=False).run())
    assert found.proved
    assert found.receipts.count == found.receipts.steps == 0
    assert "the run is without receipts" in found.notes[0]
    assert [epoch.covered for epoch in found.epochs] == [53] * 4


def test_an_old_journal_is_counted():
    journal = [
        dataclasses.replace(event, offset=-1, taken=-1) if isinstance(event, events.StepCommitted) else event
        for event in MadeRun(1, supervised=False).run()
    ]
    found = audit(journal)
    assert found.proved
    assert not found.enumerated
    assert found.epochs[0].covered is None
    assert any("before positions were kept" in note for note in found.notes)
    short = [event for event in journal if not (isinstance(event, events.StepCommitted) and event.step == 3)]
    assert "step 3 is missing" in audit(short).wrong
    assert "epoch 0 ended after 45 of 53 positions" in audit(short).wrong


def test_two_steps_that_lost_their_place_are_one_finding_each():
    journal = MadeRun(1, trouble=0.0).run()
    drop = {4, 5, 11}
    left = [e for e in journal if not (isinstance(e, events.StepCommitted) and e.step in drop)]
    wrong = audit(left).wrong
    assert "steps 4 to 5 are missing" in wrong[0]
    assert wrong[1].startswith("step 11 is missing")
    assert any("positions 24 to 39 are in no step" in line for line in wrong)


def test_a_step_that_a_survivor_committed_twice_is_found():
    journal = MadeRun(3, trouble=0.0, workers=2).run()
    view = next(event for event in journal if isinstance(event, events.ViewChanged))
    last = lines(journal, events.StepsReceived)[-1]
    receipt = journal[last]
    assert isinstance(receipt, events.StepsReceived)
    second = dataclasses.replace(view, generation=2, step=receipt.last)
    again = dataclasses.replace(receipt, generation=2, first=receipt.last)
    wrong = audit([*journal[:-1], second, again, journal[-1]]).wrong
    assert any("which stayed, and again in generation 2" in line for line in wrong)


def test_backup_workers_may_help():
    """With stragglers="backup" a shard may be any member's, and is still computed once."""
    journal = MadeRun(5, trouble=0.0, workers=2, epochs=1).run()
    stolen = next(e.shards[0] for e in journal if isinstance(e, events.StepsReceived) and e.rank == 1)

    def helped_by(shards_of) -> list[events.Event]:
        return [
            dataclasses.replace(event, shards=shards_of(event))
            if isinstance(event, events.StepsReceived)
            else event
            for event in journal
        ]

    helped = helped_by(
        lambda event: sorted({*event.shards, stolen} if event.rank == 0 else {*event.shards} - {stolen})
    )
    assert audit(helped).wrong
    found = audit(helped, backup=True)
    assert found.wrong == ()
    assert found.receipts.by_receipt == found.steps * 6
    both = helped_by(lambda event: sorted({*event.shards, stolen}))
    assert any(f"shard {stolen} is doubled" in line for line in audit(both, backup=True).wrong)


@given(st.randoms(use_true_random=False), st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_no_journal_breaks_it(rng: random.Random, seed):
    journal = made(seed)
    rng.shuffle(journal)
    audit(journal[: rng.randint(0, len(journal))])


def test_it_is_quick_and_imports_no_torch():
    journal = MadeRun(2, workers=16, shards=64, size=40_000, batch=16, epochs=1, trouble=0.002).run()
    found = audit(journal)
    assert found.proved
    assert found.steps == 2500
    code = "import sys, paceline.monitor.audit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def told_by_the_checkpoint(journal: list[events.Event]) -> tuple[list[events.Event], int] | None:
    """A run that went on from a checkpoint whose last step no member had told before; None: it never did."""
    steps = journal_index.read(journal).steps
    for at, event in reversed(list(enumerate(journal))):
        if isinstance(event, events.RunResumed) and event.step in steps and steps[event.step].index < at:
            commit = steps[event.step]
            recalled = dataclasses.replace(commit.event, generation=events.RECALLED)
            late = [*journal[:at], recalled, *journal[at:]]
            del late[commit.index]
            return late, event.step
    return None


def test_steps_that_only_a_checkpoint_knew_count_and_are_named():
    found = [one for seed in SEEDS if (one := told_by_the_checkpoint(made(seed)))]
    assert len(found) > 5
    for journal, step in found:
        seen = audit(journal)
        assert seen.wrong == ()
        assert f"step {step} is known from a checkpoint alone" in " ".join(seen.notes)
        without = [
            e
            for e in journal
            if not (isinstance(e, events.StepCommitted) and e.generation == events.RECALLED)
        ]
        assert any(f"step {step} is missing" in line for line in audit(without).wrong)


def test_samples_that_a_recalled_step_skipped_may_be_untold():
    journal = MadeRun(1, trouble=0.0).run()
    at = next(n for n, e in enumerate(journal) if isinstance(e, events.StepCommitted) and e.step == 3)
    step = journal[at]
    assert isinstance(step, events.StepCommitted)
    fewer = dataclasses.replace(step, samples=step.samples - 1)
    assert any(
        "0 were reported as skipped" in w for w in audit([*journal[:at], fewer, *journal[at + 1 :]]).wrong
    )
    recalled = dataclasses.replace(fewer, generation=events.RECALLED)
    assert audit([*journal[:at], recalled, *journal[at + 1 :]]).proved
