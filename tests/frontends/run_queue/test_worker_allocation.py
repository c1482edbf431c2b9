"""Which run has how many workers: single decisions, and laws that hold in every history of a queue."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from paceline.frontends.run_queue.worker_allocation import (
    Candidate,
    Resize,
    Start,
    StopRun,
    decide,
    target_sizes,
)


def waiting(number: int, least: int = 1, most: int = 1, priority: int = 0) -> Candidate:
    return Candidate(id=number, least=least, most=most, priority=priority)


def running(number: int, workers: int, least: int = 1, most: int = 1, priority: int = 0) -> Candidate:
    one = waiting(number, least, most, priority)
    return replace(one, workers=workers, reserved=workers)


def kinds(actions: object) -> list[tuple[str, int, int]]:
    assert isinstance(actions, list)
    return [(type(one).__name__, one.id, getattr(one, "workers", 0)) for one in actions]


def test_a_run_alone_gets_all_that_it_can_use():
    assert kinds(decide([waiting(1, 1, 4)], 8)) == [("Start", 1, 4)]
    assert kinds(decide([waiting(1, 1, 4)], 3)) == [("Start", 1, 3)]
    assert decide([waiting(1, 4, 4)], 3) == []


def test_equals_share_evenly_and_the_first_gets_the_odd_one():
    assert kinds(decide([waiting(1, 1, 8), waiting(2, 1, 8)], 5)) == [("Start", 1, 3), ("Start", 2, 2)]
    assert kinds(decide([waiting(1, 1, 2), waiting(2, 1, 8)], 6)) == [("Start", 1, 2), ("Start", 2, 4)]


def test_the_rest_goes_to_the_highest_priority():
    assert kinds(decide([waiting(1, 1, 8), waiting(2, 1, 8, priority=1)], 5)) == [
        ("Start", 2, 4),
        ("Start", 1, 1),
    ]


def test_a_run_that_cannot_shrink_has_what_it_began_with_whatever_was_granted_since():
    fixed = replace(running(1, 4, 1, 4), is_fixed=True)
    granted_less = replace(fixed, workers=2)
    assert kinds(decide([granted_less, waiting(2, 2, 2, priority=5)], 4)) == [("StopRun", 1, 0)]
    assert kinds(decide([granted_less, waiting(2, 1, 1)], 5)) == [("Resize", 1, 4), ("Start", 2, 1)]
    granted_more = replace(fixed, workers=6)
    assert kinds(decide([granted_more, waiting(2, 2, 2)], 6)) == [("Resize", 1, 4), ("Start", 2, 2)]


def test_a_newcomer_waits_until_the_others_have_shrunk():
    before = [running(1, 4, 1, 4), waiting(2, 1, 4)]
    assert kinds(decide(before, 4)) == [("Resize", 1, 2)]
    shrinking = [replace(before[0], workers=2), before[1]]
    assert decide(shrinking, 4) == []
    assert kinds(decide([replace(shrinking[0], reserved=2), before[1]], 4)) == [("Start", 2, 2)]


def test_a_part_of_what_is_wanted_is_used_at_once():
    before = [replace(running(1, 2, 1, 4), reserved=3), waiting(2, 1, 4, priority=1)]
    assert kinds(decide(before, 4)) == [("Resize", 1, 1), ("Start", 2, 1)]


def test_a_higher_priority_preempts_what_does_not_fit_beside_it():
    before = [running(1, 2, 2, 2), running(2, 2, 1, 2), waiting(3, 3, 3, priority=5)]
    actions = decide(before, 4)
    assert kinds(actions) == [("StopRun", 1, 0), ("Resize", 2, 1)]
    assert isinstance(actions[0], StopRun)
    assert actions[0].reason == "run 3 of priority 5 gets workers"


def test_equals_do_not_preempt_what_was_added_before():
    assert decide([running(1, 3, 3, 3), waiting(2, 3, 3)], 4) == []


def test_a_small_run_passes_a_large_one_that_takes_its_workers_back():
    queue = [running(1, 3, 3, 3), waiting(2, 4, 4), waiting(3, 1, 1)]
    assert kinds(decide(queue, 4)) == [("Start", 3, 1)]
    assert kinds(decide([waiting(2, 4, 4), running(3, 1)], 4)) == [("StopRun", 3, 0)]


def test_a_run_that_is_leaving_keeps_its_workers_until_it_is_gone():
    leaving = replace(running(1, 3, 3, 3), is_leaving=True)
    assert decide([leaving, waiting(2, 2, 2)], 4) == []
    assert kinds(decide([leaving, waiting(2, 1, 4)], 4)) == [("Start", 2, 1)]


def test_a_run_of_fixed_size_is_stopped_where_it_cannot_shrink():
    fixed = replace(running(1, 4, 1, 4), is_fixed=True)
    assert decide([fixed], 8) == []
    assert kinds(decide([fixed, waiting(2, 1, 1, priority=1)], 4)) == [("StopRun", 1, 0)]
    assert decide([fixed, waiting(2, 1, 1)], 4) == []


def test_fewer_workers_than_before_are_shared_anew():
    queue = [running(1, 3, 1, 3), running(2, 2, 2, 2)]
    assert kinds(decide(queue, 3)) == [("Resize", 1, 1)]
    assert kinds(decide(queue, 2)) == [("Resize", 1, 2), ("StopRun", 2, 0)]


def test_workers_of_a_node_come_and_go_together():
    on_nodes = replace(waiting(1, 2, 8), unit=2)
    assert kinds(decide([on_nodes], 7)) == [("Start", 1, 6)]
    assert kinds(decide([on_nodes, waiting(2, 1, 8)], 7)) == [("Start", 1, 4), ("Start", 2, 3)]
    assert decide([replace(on_nodes, workers=2, reserved=2)], 3) == []  # one is free, and two are a node


def test_growth_says_why():
    (grows,) = decide([running(1, 1, 1, 4)], 3)
    assert grows == Resize(1, 3, "2 workers are free")


# laws


@dataclass
class Life:
    """A run of a simulated queue."""

    candidate: Candidate
    left: int  # rounds in which it must have workers


class SimulatedQueue:
    """Carries decisions out as real runs do: late, and in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.capacity = self.rng.randint(1, 8)
        self.lives: dict[int, Life] = {}
        self.added = 0

    def add(self) -> None:
        self.added += 1
        unit = self.rng.choice([1, 1, min(2, self.capacity)])
        least = self.rng.randint(1, self.capacity // unit)
        one = Candidate(
            id=self.added,
            priority=self.rng.choice([0, 0, 0, 1, 5]),
            least=least * unit,
            most=self.rng.randint(least, self.capacity // unit) * unit,
            unit=unit,
        )
        self.lives[one.id] = Life(one, self.rng.randint(1, 5))

    @property
    def candidates(self) -> list[Candidate]:
        return [life.candidate for life in self.lives.values()]

    def change(self, number: int, **changes: object) -> None:
        life = self.lives[number]
        life.candidate = replace(life.candidate, **changes)  # type: ignore[arg-type]

    def act(self) -> int:
        """One decision and what it starts; return how many actions there were."""
        shuffled = self.rng.sample(self.candidates, len(self.lives))
        actions = decide(shuffled, self.capacity)
        assert actions == decide(self.candidates, self.capacity), "it depends on the order of its input"
        for action in actions:
            one = self.lives[action.id].candidate
            match action:
                case Start(number, workers):
                    assert not one.workers
                    assert not one.is_leaving
                    assert one.least <= workers <= one.most
                    self.change(number, workers=workers, reserved=workers)
                case Resize(number, workers, _):
                    assert one.least <= workers <= one.most
                    assert workers != one.workers
                    self.change(number, workers=workers, reserved=max(one.reserved, workers))
                case StopRun(number, _):
                    assert one.workers
                    self.change(number, is_leaving=True)
        used = sum(max(one.workers, one.reserved) for one in self.candidates)
        assert used <= self.capacity
        return len(actions)

    def pass_time(self) -> None:
        """Some shrinks and stops are done, some runs end by themselves."""
        for number, life in list(self.lives.items()):
            one = life.candidate
            if one.workers and self.rng.random() < 0.5:
                life.left -= 1
                if life.left <= 0:
                    del self.lives[number]
                    continue
            if one.is_leaving and self.rng.random() < 0.5:
                self.change(number, workers=0, reserved=0, is_leaving=False)
            elif one.reserved > one.workers and self.rng.random() < 0.5:
                self.change(number, reserved=one.workers)

    def settle(self) -> None:
        """All that was asked for is done."""
        for number, life in self.lives.items():
            one = life.candidate
            gone = {"workers": 0, "reserved": 0, "is_leaving": False}
            self.change(number, **(gone if one.is_leaving else {"reserved": one.workers}))

    def check_settled(self) -> None:
        """Nothing is left to do, and nothing is wasted."""
        for _ in range(4):
            if not self.act():
                break
            self.settle()
        assert not self.act(), "the decision does not come to rest"
        ordered = sorted(self.candidates, key=lambda one: (-one.priority, one.id))
        free = self.capacity - sum(one.workers for one in ordered)
        assert free >= 0
        if ordered:
            assert ordered[0].workers, "the first of the order does not run"
        for one in ordered:
            if one.workers:
                assert one.workers == one.most or free < one.unit, "a run could have grown"
                assert one.workers % one.unit == 0
            else:
                assert one.least > free, "a run could have been started"
        self._check_order(ordered)

    def _check_order(self, ordered: list[Candidate]) -> None:
        for place, one in enumerate(ordered):
            before = sum(other.least for other in ordered[:place] if other.workers)
            if not one.workers:
                assert before + one.least > self.capacity, "it waits for a run that stands behind it"
            for other in ordered[place + 1 :]:
                if one.workers and one.workers < one.most and other.priority < one.priority:
                    more = other.workers - other.least if other.workers else 0
                    assert more < one.unit, "a lower priority has what a higher one could use"
                if one.priority == other.priority and one.workers and other.workers:
                    fair = other.workers <= max(one.workers + other.unit - 1, other.least)
                    assert fair or one.workers == one.most or one.unit > 1, "the shares are not even"


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_never_over_capacity_and_nothing_is_wasted(seed):
    queue = SimulatedQueue(seed)
    for _ in range(30):
        if queue.rng.random() < 0.5:
            queue.add()
        queue.act()
        queue.pass_time()
        if queue.rng.random() < 0.2:
            queue.settle()
            queue.check_settled()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_every_run_comes_to_its_end(seed):
    """Also the large ones, while small runs of their own priority keep coming for a while."""
    queue = SimulatedQueue(seed)
    for _ in range(12):
        queue.add()
    for _ in range(1000):
        queue.act()
        queue.pass_time()
        if not queue.lives:
            return
    pytest.fail(f"these never ran to their end: {queue.lives}")


def test_small_runs_that_keep_coming_do_not_starve_a_large_one():
    queue = SimulatedQueue(1)
    queue.capacity, queue.lives = 4, {}
    queue.lives[1] = Life(waiting(1, 2, 2), 10)
    queue.lives[2] = Life(waiting(2, 4, 4), 10)
    queue.added = 2
    for _ in range(200):
        queue.added += 1
        queue.lives[queue.added] = Life(waiting(queue.added, 1, 2), 5)
        queue.act()
        queue.pass_time()
        if 2 not in queue.lives:
            return
    pytest.fail("the large run never ended")


def test_targets_of_an_empty_queue():
    assert target_sizes([], 4) == {}
    assert decide([], 4) == []
