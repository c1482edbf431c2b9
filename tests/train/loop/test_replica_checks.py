"""Comparisons of ranks: what is reported, what is raised, and what a rank that trains alone looks at."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from paceline.core.errors import GroupInterruptedError, PeerLostError, ReplicasDifferError
from paceline.data.batch_plan import DataPosition
from paceline.train.loop.replica_checks import ReplicaChecks
from paceline.train.loop.run_hooks import FixedGroup
from paceline.train.state.run_state import RunState

SAMPLE, TEXT = 255, "0000000000ff"


class Reported:
    """ReplicaHooks that note what they are told."""

    watches_weights = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def replicas_agree(self, state: RunState, digest: str) -> None:
        self.calls.append(("agree", digest))

    def comparison_interrupted(self, state: RunState, digest: str) -> None:
        self.calls.append(("interrupted", digest))

    def replicas_differ(self, state: RunState, digest: str) -> NoReturn:
        self.calls.append(("differ", digest))
        raise GroupInterruptedError("the supervisor decides")


class Rank:
    """A rank after step 7, with a sample of the weights; `gathered`: what an all-gather returns."""

    def __init__(
        self, gathered: Sequence[str] = ("a", "a"), *, fixed: bool = False, at_hand: bool = True
    ) -> None:
        self.gathered = list(gathered)
        self.calls: list[Any] = []
        self.changed = False
        team = SimpleNamespace(world_size=len(gathered), context=SimpleNamespace(all_gather=self.all_gather))
        self.hooks = Reported()
        parts = SimpleNamespace(
            team=team,
            replica_hooks=FixedGroup(cast(Any, team)) if fixed else self.hooks,
            transaction=SimpleNamespace(
                abandon=lambda: self.calls.append("abandon"), counted=(0, 1), contribution_hash="c"
            ),
            phases=SimpleNamespace(leave=lambda *given: self.calls.append(("phases.leave", *given))),
        )
        self.state = SimpleNamespace(
            position=DataPosition(step=7),
            agreed_step=3,
            sample=SimpleNamespace(at_hand=at_hand, of=lambda step: SAMPLE),
            watch=SimpleNamespace(
                agreed=lambda *given: self.calls.append(("watch.agreed", *given)),
                has_changed=lambda step, sample: self.changed,
                leave=lambda step, *, alone: self.calls.append(("watch.leave", step, alone)),
                left=lambda step: SAMPLE,
            ),
            hashes=SimpleNamespace(add=lambda *given: self.calls.append(("hashes.add", *given))),
        )
        self.checks = ReplicaChecks(cast(Any, parts), cast(Any, self.state))

    def all_gather(self, value: str) -> list[str]:
        if not self.gathered:
            raise PeerLostError("rank 1 is gone")
        return self.gathered


def test_equal_digests_make_this_the_last_step_that_all_agree_on():
    rank = Rank()
    rank.checks.compare("saved", "a")
    assert rank.hooks.calls == [("agree", "saved:a")]
    assert rank.state.agreed_step == 7


def test_different_digests_are_reported_and_the_open_step_is_abandoned():
    rank = Rank(["a", "b"])
    with pytest.raises(GroupInterruptedError, match="the supervisor decides"):
        rank.checks.compare("saved", "a")
    assert rank.hooks.calls == [("differ", "saved:a")]
    assert rank.calls == ["abandon"]
    assert rank.state.agreed_step == 3


def test_different_digests_end_a_run_whose_group_never_changes():
    rank = Rank(["a", "b", "a"], fixed=True)
    with pytest.raises(ReplicasDifferError, match="after step 7 rank 1 has other weights"):
        rank.checks.compare("end", "a")
    assert rank.calls == ["abandon"]


def test_a_comparison_that_is_interrupted_is_a_vote():
    rank = Rank()
    rank.gathered = []
    with pytest.raises(PeerLostError):
        rank.checks.compare("end", "a")
    assert rank.hooks.calls == [("interrupted", "end:a")]
    assert rank.state.agreed_step == 3


def test_a_sample_that_all_hold_is_noted_with_the_contribution_to_the_step():
    rank = Rank()
    assert rank.checks.sample() == SAMPLE
    assert rank.checks.sample_agreed(SAMPLE) == TEXT
    assert rank.calls == [("hashes.add", 8, (0, 1), TEXT, "c"), ("watch.agreed", 7, SAMPLE)]
    assert rank.hooks.calls == [("agree", f"sample:{TEXT}")]


def test_a_rank_alone_agrees_with_itself_and_learns_nothing_from_it():
    rank = Rank(["a"])
    rank.checks.sample_agreed(SAMPLE)
    assert [call[0] for call in rank.calls] == ["hashes.add"]


def test_a_sample_that_differs_is_noted_and_reported():
    rank = Rank()
    with pytest.raises(GroupInterruptedError):
        rank.checks.sample_differs(SAMPLE)
    assert rank.calls == [("hashes.add", 8, (0, 1), TEXT, "c"), "abandon"]
    assert rank.hooks.calls == [("differ", f"sample:{TEXT}")]


def test_a_rank_alone_does_not_wait_for_a_device():
    assert Rank(["a"], at_hand=False).checks.sample() is None
    assert Rank(at_hand=False).checks.sample() == SAMPLE


@pytest.mark.parametrize("look", [lambda checks: checks.sample(), lambda checks: checks.compare("end", "a")])
def test_a_rank_alone_whose_memory_changed_leaves_its_group(look):
    rank = Rank(["a"])
    look(rank.checks)
    rank.changed = True
    with pytest.raises(GroupInterruptedError, match="changed in its memory after step 7"):
        look(rank.checks)
    assert rank.calls == ["abandon"]
    unwatched = Rank(["a"], fixed=True)
    unwatched.changed = True
    look(unwatched.checks)


@pytest.mark.parametrize(("gathered", "alone"), [(["a"], True), (["a", "a"], False)])
def test_what_an_update_leaves_is_known_to_ranks_that_outlive_this_one(gathered, alone):
    rank = Rank(gathered)
    rank.checks.updated()
    assert rank.calls == [("watch.leave", 7, alone), ("phases.leave", 7, SAMPLE)]
