"""The backup policy: who waits, who takes over, when all are done, and whose claims count."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.comm.context import DistributedContext
from paceline.core.errors import PeerLostError
from paceline.train.member.step_reports import ShardClaims
from paceline.train.team import Team, first_owners

VIEW = 3


def nothing() -> None:
    """Not interrupted."""


@contextmanager
def team_of(shards: int, generation: int = VIEW) -> Iterator[Team]:
    with DistributedContext(1, 0) as context:
        team = Team(context, shards)
        team.install(context, None, generation)
        yield team


def test_all_done_ends_the_wait():
    claims = ShardClaims()
    for shard in range(3):
        claims.add(VIEW, 5, shard)
    with team_of(3) as team:
        assert claims.wait_for_spare(5, team, 60.0, nothing) is None


def test_a_shard_that_no_member_did_is_taken_over_after_a_moment():
    claims = ShardClaims()
    claims.add(VIEW, 5, 0)
    claims.add(VIEW, 5, 3)
    with team_of(4) as team:
        assert claims.wait_for_spare(5, team, 0.0, nothing) == 2


def test_waiting_ends_as_soon_as_the_last_one_is_done():
    claims = ShardClaims()
    claims.add(VIEW, 1, 0)
    found: list[int | None] = []
    waiting = threading.Event()
    with team_of(2) as team:
        waiter = threading.Thread(
            target=lambda: found.append(claims.wait_for_spare(1, team, 1000.0, waiting.set))
        )
        waiter.start()
        assert waiting.wait(30)
        claims.add(VIEW, 1, 1)
        waiter.join(30)
    assert found == [None]


def test_claims_of_earlier_steps_do_not_count():
    claims = ShardClaims()
    claims.add(VIEW, 7, 1)
    claims.add(VIEW, 6, 0)
    assert claims.has(VIEW, 7, 1)
    assert not claims.has(VIEW, 6, 0)
    claims.add(VIEW, 8, 0)
    assert not claims.has(VIEW, 7, 1)


def test_claims_of_an_earlier_view_do_not_count():
    """Of a member that is gone, or of one that had to give its gradients up; also those that arrive late."""
    claims = ShardClaims()
    for shard in range(2):
        claims.add(VIEW, 7, shard)
    assert not claims.has(VIEW + 1, 7, 0)
    with team_of(2, VIEW + 1) as team:
        assert claims.wait_for_spare(7, team, 0.0, nothing) == 1
    claims.add(VIEW + 1, 7, 1)
    claims.add(VIEW, 7, 0)
    assert claims.has(VIEW + 1, 7, 1)
    assert not claims.has(VIEW + 1, 7, 0)


def test_claims_count_again_when_the_run_went_back_to_an_earlier_step():
    claims = ShardClaims()
    claims.add(VIEW, 90, 0)
    for shard in range(2):
        claims.add(VIEW + 1, 41, shard)
    with team_of(2, VIEW + 1) as team:
        assert claims.wait_for_spare(41, team, 60.0, nothing) is None


def test_claims_of_members_that_are_in_the_next_view_already_are_kept():
    claims = ShardClaims()
    claims.add(VIEW, 7, 0)
    claims.add(VIEW + 1, 7, 1)
    assert claims.has(VIEW + 1, 7, 1)


def test_of_several_holders_the_first_counts():
    ownership = first_owners([[1, 2], [0, 1], [2, 3]], 4, step=9)
    assert ownership.blocks == ((1, 2), (0,), (3,))


def test_a_shard_that_no_rank_has():
    with pytest.raises(PeerLostError, match="step 9: shard 3 was left to a rank"):
        first_owners([[0, 1], [2]], 4, step=9)
