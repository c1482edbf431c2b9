"""Looking only at what has changed finds what looking at everything finds.

States come from simulated jobs; each is broken in one way, as a mistake in a handler would, and both checks
are asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from random import Random

import pytest

from paceline.elastic import machine
from paceline.elastic.laws import validate, validate_change
from paceline.elastic.model import Phase, Standing
from paceline.elastic.simulation import world
from paceline.elastic.state import State, copied

Pair = tuple[State, State]


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """Every tenth step of the machine in some jobs with faults: the state before and after it."""
    found: list[Pair] = []
    count = 0

    def look(before: State, after: State) -> list[str]:
        nonlocal count
        count += 1
        if count % 10 == 0:
            found.append((before, after))
        return validate_change(before, after)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "validate_change", look)
        for seed in range(1, 17):
            assert not world.run(seed, 6).violations
    assert len(found) > 100
    return found


def _worker(state: State, rng: Random) -> int:
    return rng.choice(sorted(state.workers))


def _slot(state: State, rng: Random) -> int:
    return rng.choice(sorted(state.slots))


def forget_a_worker(state: State, rng: Random) -> None:
    del state.workers[_worker(state, rng)]


def seat_two(state: State, rng: Random) -> None:
    one, other = _worker(state, rng), _worker(state, rng)
    state.workers[one] = replace(state.workers[one], slot=state.workers[other].slot)


def number_it_oneself(state: State, rng: Random) -> None:
    worker = state.workers[_worker(state, rng)]
    state.workers[state.next_member + 3] = replace(worker, number=state.next_member + 3, slot=77)


def not_listen(state: State, rng: Random) -> None:
    if state.heard:
        del state.heard[rng.choice(sorted(state.heard))]


def change_standing(state: State, rng: Random) -> None:
    number = _worker(state, rng)
    state.workers[number] = replace(state.workers[number], standing=rng.choice(list(Standing)))


def let_leave(state: State, rng: Random) -> None:
    number = _worker(state, rng)
    state.workers[number] = replace(state.workers[number], leaves="scaled")


def count_on_the_absent(state: State, rng: Random) -> None:
    number = _worker(state, rng)
    state.workers[number] = replace(state.workers[number], back=False)


def forget_a_slot(state: State, rng: Random) -> None:
    number = _slot(state, rng)
    state.slots[number] = replace(state.slots[number], worker=None, starts_at=None)


def give_up_a_slot(state: State, rng: Random) -> None:
    number = _slot(state, rng)
    state.slots[number] = replace(state.slots[number], given_up=True)


def go_on_for_ever(state: State, rng: Random) -> None:
    number = _slot(state, rng)
    state.slots[number] = replace(state.slots[number], failures=1000)


def seat_a_stranger(state: State, rng: Random) -> None:
    number = _slot(state, rng)
    state.slots[number] = replace(state.slots[number], worker=999)


def wait_for_a_stranger(state: State, rng: Random) -> None:
    state.waiting = state.waiting | {999}


def wait_for_nobody(state: State, rng: Random) -> None:
    state.waiting = frozenset()


def forget_a_report(state: State, rng: Random) -> None:
    if state.reports:
        del state.reports[rng.choice(sorted(state.reports))]


def never_look_again(state: State, rng: Random) -> None:
    state.due = inf


def lose_the_view(state: State, rng: Random) -> None:
    state.view = None


def deal_a_shard_twice(state: State, rng: Random) -> None:
    if state.view is not None and state.view.shards:
        state.view = replace(state.view, shards=(*state.view.shards[:-1], state.view.shards[0]))


def name_another_view(state: State, rng: Random) -> None:
    if state.view is not None:
        state.view = replace(state.view, members=(*state.view.members[:-1], 998))


def skip_a_phase(state: State, rng: Random) -> None:
    state.phase = rng.choice(list(Phase))


def come_to_a_later_generation(state: State, rng: Random) -> None:
    state.generation += 1


MISTAKES = (
    forget_a_worker,
    seat_two,
    number_it_oneself,
    not_listen,
    change_standing,
    let_leave,
    count_on_the_absent,
    forget_a_slot,
    give_up_a_slot,
    go_on_for_ever,
    seat_a_stranger,
    wait_for_a_stranger,
    wait_for_nobody,
    forget_a_report,
    never_look_again,
    lose_the_view,
    deal_a_shard_twice,
    name_another_view,
    skip_a_phase,
    come_to_a_later_generation,
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_found_by_what_it_changed(
    mistake: Callable[[State, Random], None], pairs: list[Pair]
) -> None:
    rng = Random(3)
    found = 0
    for before, after in pairs:
        broken = copied(after)
        if not broken.workers or not broken.slots:
            continue
        mistake(broken, rng)
        expected = set(validate(broken))
        assert set(validate_change(before, broken)) == expected
        assert set(validate_change(after, broken)) == expected
        found += bool(expected)
    assert found > 10
