"""The simulation has teeth: a machine that is broken on purpose is found out, by what it does to the run and
not by its own invariants, which are left unchecked here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.control import member_machine
from paceline.control.messages import ViewPlan
from paceline.elastic.machine import (
    admission,
    hang_detection,
    machine,
    shard_assignment,
    slots,
    view_change,
)
from paceline.elastic.machine.actions import InstallView
from paceline.elastic.machine.state import JobPhase
from paceline.elastic.simulation.campaign import run


def first_violation(schedules: int, check_invariants: bool = False, wanted: str = "", first: int = 0) -> str:
    """The first violation (that contains `wanted`) of these schedules; empty: there is none. `first` is the
    seed to begin with: where few schedules have what it takes, near one that has."""
    for seed in range(first, first + schedules):
        outcome = run(seed, 8, check_invariants=check_invariants)
        if outcome.violations and wanted in outcome.violations[0]:
            again = run(seed, 8, check_invariants=check_invariants)
            assert (again.violations, again.digest) == (outcome.violations, outcome.digest)
            return outcome.violations[0]
    return ""


def test_a_machine_that_is_well_is_not_found_out():
    assert first_violation(30) == ""


def test_workers_that_are_in_a_view_before_they_have_met(monkeypatch):
    monkeypatch.setattr(admission, "have_met", lambda one, other: True)
    assert first_violation(200, wanted="needs the blocked route")


def test_a_shard_that_is_dropped(monkeypatch):
    whole = shard_assignment.contiguous

    def drops(shards: int, speeds: list[float]) -> shard_assignment.ShardAssignment:
        deal = whole(shards, speeds)
        return (deal[0][1:], *deal[1:])

    monkeypatch.setattr(shard_assignment, "contiguous", drops)
    assert "sums shards" in first_violation(5)


def test_a_shard_that_is_computed_twice_after_a_failure(monkeypatch):
    whole = shard_assignment.around_held

    def doubles(shards: int, held: Any, speeds: list[float]) -> shard_assignment.ShardAssignment:
        deal = whole(shards, held, speeds)
        spare = next((mine[0] for mine in deal[1:] if mine), None)
        return deal if spare is None else (tuple(sorted({*deal[0], spare})), *deal[1:])

    monkeypatch.setattr(shard_assignment, "around_held", doubles)
    assert "sums shards" in first_violation(40)


def test_gradients_that_are_held_and_computed_again(monkeypatch):
    monkeypatch.setattr(
        shard_assignment,
        "around_held",
        lambda shards, held, speeds: shard_assignment.contiguous(shards, speeds),
    )
    assert "computed again" in first_violation(40)


def changed_view(monkeypatch: pytest.MonkeyPatch, change: Callable[[ViewPlan], ViewPlan]) -> None:
    monkeypatch.setattr(view_change, "InstallView", lambda plan, reason: InstallView(change(plan), reason))


def test_a_joiner_that_begins_with_nothing(monkeypatch):
    changed_view(monkeypatch, lambda plan: replace(plan, source=-1, stale_indexes=()))
    assert "begins with no state" in first_violation(40)


def test_state_that_comes_from_a_member_behind(monkeypatch):
    def swapped(plan: ViewPlan) -> ViewPlan:
        if not plan.stale_indexes:
            return plan
        others = tuple(rank for rank in range(len(plan.members)) if rank != plan.stale_indexes[0])
        return replace(plan, source=plan.stale_indexes[0], stale_indexes=others)

    changed_view(monkeypatch, swapped)
    assert first_violation(40) != ""


def test_generations_that_are_not_counted(monkeypatch):
    """No member is fenced: messages and collectives of the old view are taken for those of the new one."""
    counts = view_change.begin

    def forgets(job: Any, abort: bool, why: str) -> str:
        generation = job.generation
        reason = counts(job, abort, why)
        if job.phase is JobPhase.PREPARING:
            job.generation = generation
            asked = job.actions[-1]
            job.actions[-1] = replace(asked, message=replace(asked.message, generation=generation))
        return reason

    monkeypatch.setattr(view_change, "begin", forgets)
    assert first_violation(40) != ""


def test_a_checkpoint_that_was_found_to_be_wrong_and_is_restored(monkeypatch):
    changed_view(monkeypatch, lambda plan: replace(plan, restore_before=-1))
    assert "found to be wrong" in first_violation(400)


def test_private_state_that_is_forgotten(monkeypatch):
    monkeypatch.setattr(view_change, "missing_private_state", lambda shards, reports: ())
    assert "private state" in first_violation(200)


def test_hangs_that_are_not_seen(monkeypatch):
    monkeypatch.setattr(hang_detection, "find_overdue", lambda job: [])
    assert "no step was committed" in first_violation(400)


def test_silence_that_is_not_seen(monkeypatch):
    monkeypatch.setattr(hang_detection, "find_silent", lambda job: [])
    assert first_violation(600, wanted="has not noticed", first=600)


def test_members_that_never_give_up_a_supervisor(monkeypatch):
    monkeypatch.setattr(member_machine, "_orphaned_reason", lambda state, away, restarting: None)
    assert first_violation(200, wanted="of absence")


def test_a_worker_that_waits_for_a_lost_peer_without_a_supervisor(monkeypatch):
    """Nothing interrupts its collective: it can only do so itself."""
    monkeypatch.setattr(member_machine, "_interrupt", lambda state, reason: (state, ()))
    assert first_violation(200)


def test_those_who_wait_are_blamed(monkeypatch):
    monkeypatch.setattr(hang_detection, "waiting_for", lambda job: {})
    assert first_violation(800) != ""


def test_time_that_the_machine_was_suspended_for_is_blamed_on_workers(monkeypatch):
    monkeypatch.setattr(hang_detection, "shift_clocks", lambda job, seconds: None)
    assert "blamed without a fault" in first_violation(200)


def test_a_slot_that_no_worker_fills_again(monkeypatch):
    monkeypatch.setattr(slots, "start_due", lambda job: [])
    assert "waits for a worker" in first_violation(40)


def test_a_transition_that_is_not_in_the_table_is_seen(monkeypatch):
    monkeypatch.setattr(machine, "allowed", lambda before, event, after: before is after)
    assert "not in the table" in first_violation(1, check_invariants=True)
