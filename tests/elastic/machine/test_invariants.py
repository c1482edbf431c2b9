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
from tests.elastic.machine.made_states import change, fresh_actions, made

from paceline.control.messages import Stop
from paceline.elastic.machine import invariants, job_end
from paceline.elastic.machine.actions import KillWorker, ProbeWorkers, RequestDial, Send, StartWorker
from paceline.elastic.machine.invariants import validate, validate_change
from paceline.elastic.machine.state import JobPhase, JobState, WorkerStatus
from paceline.elastic.simulation import campaign

Pair = tuple[JobState, JobState]


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """Every tenth step of the machine in some jobs with faults: the state before and after it."""
    found: list[Pair] = []
    count = 0

    def look(before: JobState, after: JobState) -> list[str]:
        nonlocal count
        count += 1
        if count % 10 == 0:
            found.append((before, after))
        return validate_change(before, after)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(invariants, "validate_change", look)
        for seed in range(1, 17):
            assert not campaign.run(seed, 6).violations
    assert len(found) > 100
    return found


def _worker(state: JobState, rng: Random) -> int:
    return rng.choice(sorted(state.workers))


def _slot(state: JobState, rng: Random) -> int:
    return rng.choice(sorted(state.slots))


def forget_a_worker(state: JobState, rng: Random) -> None:
    del state.workers[_worker(state, rng)]


def seat_two(state: JobState, rng: Random) -> None:
    one, other = _worker(state, rng), _worker(state, rng)
    state.workers[one] = replace(state.workers[one], slot=state.workers[other].slot)


def number_it_oneself(state: JobState, rng: Random) -> None:
    worker = state.workers[_worker(state, rng)]
    state.workers[state.next_member + 3] = replace(worker, number=state.next_member + 3, slot=77)


def not_listen(state: JobState, rng: Random) -> None:
    if state.last_message_at:
        del state.last_message_at[rng.choice(sorted(state.last_message_at))]


def change_standing(state: JobState, rng: Random) -> None:
    number = _worker(state, rng)
    state.workers[number] = replace(state.workers[number], status=rng.choice(list(WorkerStatus)))


def let_leave(state: JobState, rng: Random) -> None:
    number = _worker(state, rng)
    state.workers[number] = replace(state.workers[number], leave_reason="scaled")


def count_on_the_absent(state: JobState, rng: Random) -> None:
    number = _worker(state, rng)
    state.workers[number] = replace(state.workers[number], reconnected=False)


def forget_a_slot(state: JobState, rng: Random) -> None:
    number = _slot(state, rng)
    state.slots[number] = replace(state.slots[number], worker=None, start_at=None)


def give_up_a_slot(state: JobState, rng: Random) -> None:
    number = _slot(state, rng)
    state.slots[number] = replace(state.slots[number], given_up=True)


def go_on_for_ever(state: JobState, rng: Random) -> None:
    number = _slot(state, rng)
    state.slots[number] = replace(state.slots[number], failures=1000)


def seat_a_stranger(state: JobState, rng: Random) -> None:
    number = _slot(state, rng)
    state.slots[number] = replace(state.slots[number], worker=999)


def wait_for_a_stranger(state: JobState, rng: Random) -> None:
    state.pending = state.pending | {999}


def wait_for_no_member(state: JobState, rng: Random) -> None:
    state.pending = frozenset()


def forget_a_report(state: JobState, rng: Random) -> None:
    if state.reports:
        del state.reports[rng.choice(sorted(state.reports))]


def never_look_again(state: JobState, rng: Random) -> None:
    state.next_tick_at = inf


def lose_the_view(state: JobState, rng: Random) -> None:
    state.view = None


def deal_a_shard_twice(state: JobState, rng: Random) -> None:
    if state.view is not None and state.view.shards:
        state.view = replace(state.view, shards=(*state.view.shards[:-1], state.view.shards[0]))


def name_another_view(state: JobState, rng: Random) -> None:
    if state.view is not None:
        state.view = replace(state.view, members=(*state.view.members[:-1], 998))


def skip_a_phase(state: JobState, rng: Random) -> None:
    state.phase = rng.choice(list(JobPhase))


def come_to_a_later_generation(state: JobState, rng: Random) -> None:
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
    wait_for_no_member,
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
    mistake: Callable[[JobState, Random], None], pairs: list[Pair]
) -> None:
    rng = Random(3)
    found = 0
    for before, after in pairs:
        broken = after.copy()
        if not broken.workers or not broken.slots:
            continue
        mistake(broken, rng)
        expected = set(validate(broken))
        assert set(validate_change(before, broken)) == expected
        assert set(validate_change(after, broken)) == expected
        found += bool(expected)
    assert found > 10


def test_the_end_is_the_last_action_of_its_step():
    before = made()
    state = before.copy()
    fresh_actions(state)
    job_end.end(state, ok=True, reason="enough")
    ended = tuple(state.actions)
    assert invariants.validate_step(before, state, ended, "enough") == []
    assert invariants.validate_step(before, state, (KillWorker(1, "enough"), *ended), "enough") == []
    (broken,) = invariants.validate_step(before, state, (*ended, KillWorker(1, "enough")), "enough")
    assert broken.startswith("invariant 8")


def test_no_worker_is_started_while_the_job_stops():
    job = made()
    assert invariants.validate_step(job, job, (StartWorker(4, 3),), "another") == []
    job.stop_reason = "enough"
    (broken,) = invariants.validate_step(job, job, (StartWorker(4, 3),), "another")
    assert broken.startswith("invariant 8")


def test_a_message_or_a_probe_is_for_some_member():
    job = made()
    for message in (Send((), Stop(reason="enough")), ProbeWorkers(())):
        (broken,) = invariants.validate_step(job, job, (message,), "enough")
        assert broken.startswith("invariant 9")
    assert invariants.validate_step(job, job, (ProbeWorkers((1,)),), "enough") == []


def test_a_member_that_has_not_reconnected_is_not_dialed():
    job = made((0, 1))
    assert invariants.validate_step(job, job, (RequestDial(2, (1,)),), "they meet") == []
    change(job, 1, reconnected=False)
    for dial in (RequestDial(2, (1,)), RequestDial(1, (2,))):
        (broken,) = invariants.validate_step(job, job, (dial,), "they meet")
        assert broken.startswith("invariant 10")
