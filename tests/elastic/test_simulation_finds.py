"""The simulation has teeth: a machine that is broken on purpose is found out, by what it does to the run and
not by its own laws, which are left unchecked here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.elastic import admission, deadlines, dealing, from_outside, machine, private, regroup, seats
from paceline.elastic.model import Phase, TellView, ViewPlan
from paceline.elastic.simulation.world import run


def first_violation(schedules: int, check_laws: bool = False) -> str:
    """What is found in so many schedules; empty: nothing."""
    for seed in range(schedules):
        outcome = run(seed, 8, check_laws=check_laws)
        if outcome.violations:
            again = run(seed, 8, check_laws=check_laws)
            assert (again.violations, again.digest) == (outcome.violations, outcome.digest)
            return outcome.violations[0]
    return ""


def test_a_machine_that_is_well_is_not_found_out():
    assert first_violation(30) == ""


def test_workers_that_are_in_a_view_before_they_have_met(monkeypatch):
    monkeypatch.setattr(admission, "have_met", lambda one, other: True)
    assert "across a wall" in first_violation(200)


def test_a_shard_that_is_dropped(monkeypatch):
    whole = dealing.contiguous

    def drops(shards: int, speeds: list[float]) -> dealing.Deal:
        deal = whole(shards, speeds)
        return (deal[0][1:], *deal[1:])

    monkeypatch.setattr(dealing, "contiguous", drops)
    assert "sums shards" in first_violation(5)


def test_a_shard_that_is_computed_twice_after_a_failure(monkeypatch):
    whole = dealing.around_held

    def doubles(shards: int, held: Any, speeds: list[float]) -> dealing.Deal:
        deal = whole(shards, held, speeds)
        spare = next((mine[0] for mine in deal[1:] if mine), None)
        return deal if spare is None else (tuple(sorted({*deal[0], spare})), *deal[1:])

    monkeypatch.setattr(dealing, "around_held", doubles)
    assert "sums shards" in first_violation(40)


def test_gradients_that_are_held_and_computed_again(monkeypatch):
    monkeypatch.setattr(
        dealing, "around_held", lambda shards, held, speeds: dealing.contiguous(shards, speeds)
    )
    assert "computed again" in first_violation(40)


def changed_view(monkeypatch: pytest.MonkeyPatch, change: Callable[[ViewPlan], ViewPlan]) -> None:
    monkeypatch.setattr(regroup, "TellView", lambda plan, reason: TellView(change(plan), reason))


def test_a_joiner_that_begins_with_nothing(monkeypatch):
    changed_view(monkeypatch, lambda plan: replace(plan, source=-1, behind=()))
    assert "begins with no state" in first_violation(40)


def test_state_that_comes_from_somebody_behind(monkeypatch):
    def swapped(plan: ViewPlan) -> ViewPlan:
        if not plan.behind:
            return plan
        others = tuple(rank for rank in range(len(plan.members)) if rank != plan.behind[0])
        return replace(plan, source=plan.behind[0], behind=others)

    changed_view(monkeypatch, swapped)
    assert first_violation(40) != ""


def test_generations_that_are_not_counted(monkeypatch):
    """Nobody is fenced: messages and collectives of the old view are taken for those of the new one."""
    counts = regroup.prepare

    def forgets(job: Any, abort: bool, why: str, now: float, out: list[Any]) -> str:
        generation = job.generation
        reason = counts(job, abort, why, now, out)
        if job.phase is Phase.PREPARING:
            job.generation = generation
            out[-1] = replace(out[-1], generation=generation)
        return reason

    monkeypatch.setattr(regroup, "prepare", forgets)
    assert first_violation(40) != ""


def test_a_checkpoint_that_was_found_to_be_wrong_and_is_restored(monkeypatch):
    changed_view(monkeypatch, lambda plan: replace(plan, restore_before=-1))
    assert "found to be wrong" in first_violation(400)


def test_private_state_that_is_forgotten(monkeypatch):
    monkeypatch.setattr(private, "missing", lambda shards, reports: ())
    assert "private state" in first_violation(200)


def test_hangs_that_are_not_seen(monkeypatch):
    monkeypatch.setattr(from_outside, "overdue", lambda job, now: [])
    assert "no step was committed" in first_violation(400)


def test_silence_that_is_not_seen(monkeypatch):
    monkeypatch.setattr(from_outside, "silent", lambda job, now: [])
    assert "nobody has noticed" in first_violation(600)


def test_those_who_wait_are_blamed(monkeypatch):
    monkeypatch.setattr(deadlines, "waits", lambda job, now: {})
    assert first_violation(800) != ""


def test_time_that_the_machine_was_suspended_for_is_blamed_on_workers(monkeypatch):
    monkeypatch.setattr(from_outside, "shifted", lambda job, seconds: None)
    assert "blamed without a fault" in first_violation(200)


def test_a_slot_that_nobody_fills_again(monkeypatch):
    monkeypatch.setattr(seats, "start_due", lambda job, now, out: [])
    monkeypatch.setattr(from_outside, "start_due", lambda job, now, out: [])
    assert "waits for a worker" in first_violation(40)


def test_a_transition_that_is_not_in_the_table_is_seen(monkeypatch):
    monkeypatch.setattr(machine, "allowed", lambda before, event, after: before is after)
    assert "not in the table" in first_violation(1, check_laws=True)
