"""The simulation: schedules hold, equal seeds are equal runs, and a failing seed says how to see it again."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.cli import simulate
from paceline.core.errors import UsageError
from paceline.elastic.simulation import simulated_faults
from paceline.elastic.simulation.campaign import ScheduleOutcome, run, run_schedules
from paceline.elastic.simulation.run_invariants import GENESIS, RunInvariants
from paceline.elastic.simulation.virtual_time import VirtualTime


def broken(outcomes: list[ScheduleOutcome]) -> list[str]:
    return [
        f"seed {one.seed}, {one.workers} workers: {one.violations[0]}" for one in outcomes if one.violations
    ]


@pytest.mark.parametrize(("workers", "schedules"), [(1, 50), (2, 60), (3, 60), (5, 60), (8, 200), (21, 15)])
def test_schedules_of_faults_break_no_promise(workers, schedules):
    assert broken([run(seed, workers) for seed in range(schedules)]) == []


def test_many_workers():
    outcome = run(2, 200)
    assert broken([outcome]) == []


def test_every_kind_of_fault_is_drawn_and_can_be_done():
    kinds = {fault.kind for seed in range(200) for fault in run_faults(seed)}
    assert kinds == set(simulated_faults.KINDS)


def run_faults(seed: int) -> tuple[simulated_faults.ScheduledFault, ...]:
    from random import Random

    return simulated_faults.drawn(Random(seed), 8)


def test_most_jobs_survive_what_befalls_them():
    outcomes = [run(seed, 8) for seed in range(60)]
    assert sum(outcome.ok for outcome in outcomes) > 50
    assert sum(outcome.views for outcome in outcomes) > 100


def trace(seed: int) -> list[str]:
    lines: list[str] = []
    run(seed, 8, lines.append)
    return lines


def test_the_same_seed_gives_the_same_trace():
    first = trace(17)
    assert first == trace(17)
    assert len(first) > 100
    assert first != trace(18)


def test_a_run_does_not_depend_on_the_process_it_is_in():
    """Hashes of strings differ from process to process; nothing may depend on them."""
    module = "paceline.elastic.simulation.campaign"
    code = f"from {module} import run; print([run(s, 8).digest for s in range(12)])"
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert told[0].strip() == str([run(seed, 8).digest for seed in range(12)])


def test_a_campaign_counts_what_happened():
    seen: list[int] = []
    campaign = run_schedules(4, 12, 5, progress=lambda so_far: seen.append(so_far.schedules))
    assert seen == list(range(1, 13))
    assert (campaign.schedules, campaign.violations, campaign.first_seed) == (12, 0, 5)
    assert campaign.per_minute > 0
    assert sum(campaign.faults.values()) == sum(len(run(seed, 4).faults) for seed in range(5, 17))


@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_ends_a_campaign_with_what_there_is(processes):
    def press(so_far):
        if so_far.schedules == 3:
            raise KeyboardInterrupt

    campaign = run_schedules(4, 5_000, 1, processes, progress=press)
    assert campaign.interrupted
    assert campaign.schedules == 3
    assert simulate.text(campaign).startswith("interrupted")


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_numbers_that_make_no_sense_are_refused(wrong):
    workers, schedules, processes = wrong
    with pytest.raises(UsageError, match="cannot simulate"):
        run_schedules(workers, schedules, 1, processes)


def test_events_of_one_time_happen_in_the_order_they_were_asked_for():
    time = VirtualTime()
    seen: list[str] = []
    time.at(2.0, seen.append, "second")
    time.at(2.0, seen.append, "third")
    time.at(1.0, seen.append, "first")
    time.suspend(10.0)
    assert not time.run(100)
    assert seen == ["first", "second", "third"]
    assert time.now == 12.0


def test_a_wrong_sum_is_seen():
    halted = []
    invariants = RunInvariants(3, lambda: halted.append(True))
    good = invariants.summed(1, [(2, GENESIS), (0, GENESIS), (1, GENESIS)], "a")
    invariants.committed(1, 1, good)
    invariants.begins(2, 1, good)
    assert invariants.violations == []
    for parts in ([(0, good), (1, good)], [(0, good), (1, good), (1, good), (2, good)]):
        invariants.summed(2, parts, "a")
    invariants.summed(2, [(0, good), (1, GENESIS), (2, good)], "a")
    invariants.committed(3, 1, good + 1)
    invariants.begins(4, 1, None)
    invariants.begins(5, 7, good)
    assert len(invariants.violations) == len(halted) == 6


@pytest.mark.parametrize(("workers", "nodes"), [(4, 2), (6, 3), (3, 1)])
def test_runs_on_an_engine_keep_the_promises_whichever_agents_are_lost(workers: int, nodes: int):
    lost = finished = 0
    for seed in range(25):
        outcome = run(seed, workers, nodes=nodes)
        assert outcome.violations == (), f"seed {seed}: {outcome.violations}"
        lost += any(fault.kind == "agent lost" for fault in outcome.faults)
        finished += outcome.ok
    assert lost > 0
    assert finished > 15
