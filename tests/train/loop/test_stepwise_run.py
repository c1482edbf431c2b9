"""Steps one by one: the same bits for any number of processes, and after any of them died at any point."""

from __future__ import annotations

import pytest
from tests.train.disturbed_steps import Fault
from tests.train.loop.stepwise_crew import outcome, points, train


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return outcome(train(1))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_processes(ranks: int, undisturbed: str) -> None:
    assert outcome(train(ranks)) == undisturbed


@pytest.mark.parametrize("kind", ["killed", "cut"])
def test_a_fault_at_every_point_of_a_step(kind: str, undisturbed: str) -> None:
    faults = list(points(kind, 3, ("step", 1, 1)))
    assert len(faults) > 10
    for fault in faults:
        crew = train(3, fault)
        assert outcome(crew) == undisturbed, fault
        assert sum(not one.alive for one in crew) == (kind == "killed"), fault


@pytest.mark.parametrize("kind", ["killed", "cut"])
def test_a_second_fault_at_every_point_of_a_repair(kind: str, undisturbed: str) -> None:
    first = Fault("killed", 2, ("step", 1, 1), 3)
    section = ("repair", 2, 0)
    for one in train(3, first):
        for point in range(1, one.counter.points.get(section, 0) + 1):
            second = Fault(kind, one.number, section, point)  # type: ignore[arg-type]
            crew = train(3, first, second)
            assert outcome(crew) == undisturbed, second
            assert sum(not one.alive for one in crew) == 1 + (kind == "killed"), second


def test_a_step_that_is_decided_elsewhere_is_taken_over(undisturbed: str) -> None:
    """Rank 1 is cut off when it has the sum: rank 0 has applied the step, rank 1 has not."""
    last = max(fault.point for fault in points("cut", 2, ("step", 1, 1)) if fault.member == 1)
    crew = train(2, Fault("cut", 1, ("step", 1, 1), last))
    assert outcome(crew) == undisturbed
    # No sample of it was computed again, on either rank: 3 steps of 4 micro-batches.
    assert [one.computed for one in crew] == [12, 12]


def test_what_a_survivor_holds_is_not_computed_again() -> None:
    """Rank 2 dies before the exchange of step 1: rank 0 had computed shards 0 and 1 and keeps them."""
    crew = train(3, Fault("killed", 2, ("step", 1, 1), 1))
    # Shards by rank: 2, 1, 1, then 2, 2; a shard has 2 micro-batches.
    assert crew[0].computed == 3 * 2 * 2
