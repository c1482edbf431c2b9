"""What the hashes of a step say: all agree, a minority dissents, or no majority says who is right.

Votes are counted by lineage. A member that took its state over from another repeats what that one says: the
two are one witness, until a third that is independent of both has said the same. Must not know workers or
time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import final

from paceline.elastic.trails import Ballot

MOST_OPEN = 8
"""Steps that some have not voted on; older ones are dropped."""


@final
@dataclass(frozen=True)
class Judgement:
    """`dissenters` is empty when all agree; `tie`: no digest has more than half of the votes. `witnesses`:
    how many independent members agree; `digest`: on what."""

    ballot: Ballot
    cast: Mapping[int, str] = field(default_factory=dict)
    dissenters: tuple[int, ...] = ()
    tie: bool = False
    witnesses: int = 0
    digest: str = ""

    @property
    def step(self) -> int:
        return self.ballot[0]


def with_vote(
    votes: Mapping[Ballot, Mapping[int, str]], ballot: Ballot, member: int, digest: str
) -> dict[Ballot, Mapping[int, str]]:
    """The votes with one more; a second vote of a member counts instead of its first."""
    added = {**votes, ballot: {**votes.get(ballot, {}), member: digest}}
    for oldest in sorted(added)[:-MOST_OPEN]:
        del added[oldest]
    return added


def judge(
    votes: Mapping[Ballot, Mapping[int, str]], voters: Collection[int], lineage: Mapping[int, int]
) -> Judgement | None:
    """The first bad step that all voters voted on, else the last good one; None where none is complete. Votes
    of members that are gone since count too: they were there when it was computed."""
    good: Judgement | None = None
    if not voters:
        return None
    for ballot in sorted(votes):
        cast = votes[ballot]
        # One vote alone says nothing: the member that is left over may be the one that is wrong.
        if len(cast) < 2 or not all(voter in cast for voter in voters):
            continue
        found = judged(ballot, cast, lineage)
        if found.dissenters or found.tie:
            return found
        good = found
    return good


def judged(ballot: Ballot, cast: Mapping[int, str], lineage: Mapping[int, int]) -> Judgement:
    """What these votes say about one step."""
    witnesses: dict[str, set[int]] = {}
    for member, digest in cast.items():
        witnesses.setdefault(digest, set()).add(lineage.get(member, member))
    digest = max(witnesses, key=lambda one: len(witnesses[one]))
    most, all_votes = len(witnesses[digest]), sum(map(len, witnesses.values()))
    if len(witnesses) == 1:
        return Judgement(ballot, cast, witnesses=most, digest=digest)
    if 2 * most <= all_votes:
        return Judgement(ballot, cast, tie=True)
    odd = tuple(sorted(member for member, said in cast.items() if said != digest))
    return Judgement(ballot, cast, dissenters=odd, witnesses=most, digest=digest)
