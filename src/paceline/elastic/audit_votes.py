"""What the hashes of an audited step say: all agree, a minority dissents, or nobody can tell who is right.

Must not know workers or time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import final

MOST_OPEN = 8
"""Audited steps that some have not voted on; older ones are dropped."""


@final
@dataclass(frozen=True)
class Judgement:
    """`dissenters` is empty when all agree; `tie`: no digest has more than half of the votes."""

    step: int
    dissenters: tuple[int, ...] = ()
    tie: bool = False


def with_vote(
    votes: Mapping[int, Mapping[int, str]], step: int, member: int, digest: str
) -> dict[int, Mapping[int, str]]:
    """The votes with one more; a second vote of a member counts instead of its first."""
    added = {**votes, step: {**votes.get(step, {}), member: digest}}
    for oldest in sorted(added)[:-MOST_OPEN]:
        del added[oldest]
    return added


def judge(votes: Mapping[int, Mapping[int, str]], voters: Collection[int]) -> Judgement | None:
    """The first bad step that all voters voted on, else the last good one; None where none is complete. Votes
    of members that are gone since count too: they were there when it was computed."""
    good: Judgement | None = None
    if not voters:
        return None
    for step in sorted(votes):
        cast = votes[step]
        # One vote alone says nothing: whoever is left over may be the one that is wrong.
        if len(cast) < 2 or not all(voter in cast for voter in voters):
            continue
        found = _judged(step, cast)
        if found.dissenters or found.tie:
            return found
        good = found
    return good


def _judged(step: int, cast: Mapping[int, str]) -> Judgement:
    digest, most = Counter(cast.values()).most_common(1)[0]
    if most == len(cast):
        return Judgement(step)
    if 2 * most <= len(cast):
        return Judgement(step, tie=True)
    return Judgement(
        step, dissenters=tuple(sorted(member for member, said in cast.items() if said != digest))
    )
