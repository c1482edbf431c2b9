"""The backup policy: who waits, who takes over, and when everybody is done."""

from __future__ import annotations

import threading

from paceline.comm.context import DistributedContext
from paceline.train.claims import Claims
from paceline.train.team import Team


def nothing() -> None:
    """Nobody interrupts."""


def test_all_done_ends_the_wait():
    claims = Claims()
    with DistributedContext(1, 0) as context:
        team = Team(context, 3)
        for shard in range(3):
            claims.add(5, shard)
        assert claims.wait_for_spare(5, team, 60.0, nothing) is None


def test_a_shard_that_nobody_did_is_taken_over_after_a_moment():
    claims = Claims()
    with DistributedContext(1, 0) as context:
        team = Team(context, 4)
        claims.add(5, 0)
        claims.add(5, 3)
        assert claims.wait_for_spare(5, team, 0.0, nothing) == 2


def test_waiting_ends_as_soon_as_the_last_one_is_done():
    claims = Claims()
    with DistributedContext(1, 0) as context:
        team = Team(context, 2)
        claims.add(1, 0)
        found: list[int | None] = []
        waiting = threading.Event()
        waiter = threading.Thread(
            target=lambda: found.append(claims.wait_for_spare(1, team, 1000.0, waiting.set))
        )
        waiter.start()
        assert waiting.wait(30)
        claims.add(1, 1)
        waiter.join(30)
        assert found == [None]


def test_claims_of_earlier_steps_do_not_count():
    claims = Claims()
    claims.add(7, 1)
    claims.add(6, 0)
    assert claims.has(7, 1)
    assert not claims.has(6, 0)
    claims.add(8, 0)
    assert not claims.has(7, 1)
