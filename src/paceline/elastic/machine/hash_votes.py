"""Evaluate the state hashes of a step: all agree, a minority dissents, or there is no majority. The last is a
dispute, and the steps are computed again to name the member at fault.

Votes are counted by lineage. A member that received its state from another repeats what that one says: the
two are one witness, until a third that is independent of both has said the same.

Where a model is hashed in parts, a difference may be seen some steps after it arose. The wrong gradients of
the member at fault are in the state of every member by then: the second computation gives a state that no
member has. But each member remembers what it contributed to the latest steps (step_hashes.py). The first
member whose contribution differs from the second computation is at fault; the others differ only after its
gradients had reached them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, final

HashKey: TypeAlias = tuple[int, str]
"""A step, and the kind of the hashes that are compared."""

Trail: TypeAlias = tuple[tuple[int, str], ...]
"""What a member put into its latest steps: (step, "shards/hashes")."""

MOST_OPEN = 8
"""Steps that some have not voted on; older ones are dropped."""


@final
@dataclass(frozen=True)
class Dispute:
    """Votes about a step, by member, with no majority for any. `trails`: what each of these members had put
    into the steps before; `assignment`: the shards of each member of the view."""

    hash_key: HashKey
    cast: Mapping[int, str]
    trails: Mapping[int, Trail] = field(default_factory=dict)
    assignment: tuple[tuple[int, ...], ...] = ()

    @property
    def step(self) -> int:
        return self.hash_key[0]


@final
@dataclass(frozen=True)
class VoteResult:
    """`dissenters` is empty when all agree; `tie`: no digest has more than half of the votes. `witnesses`:
    how many independent members agree; `digest`: on what."""

    hash_key: HashKey
    cast: Mapping[int, str] = field(default_factory=dict)
    dissenters: tuple[int, ...] = ()
    tie: bool = False
    witnesses: int = 0
    digest: str = ""

    @property
    def step(self) -> int:
        return self.hash_key[0]


def with_vote(
    votes: Mapping[HashKey, Mapping[int, str]], hash_key: HashKey, member: int, digest: str
) -> dict[HashKey, Mapping[int, str]]:
    """Return the votes with one more; a second vote of a member counts instead of its first."""
    added = {**votes, hash_key: {**votes.get(hash_key, {}), member: digest}}
    for oldest in sorted(added)[:-MOST_OPEN]:
        del added[oldest]
    return added


def judge(
    votes: Mapping[HashKey, Mapping[int, str]], voters: Collection[int], lineage: Mapping[int, int]
) -> VoteResult | None:
    """Return the first bad step that all voters voted on, else the last good one; None where no step has all
    votes. Votes of members that are gone count too: they were there when the step was computed."""
    good: VoteResult | None = None
    if not voters:
        return None
    for hash_key in sorted(votes):
        cast = votes[hash_key]
        # One vote alone says nothing: the member that is left over may be the one that is wrong.
        if len(cast) < 2 or not all(voter in cast for voter in voters):
            continue
        found = judged(hash_key, cast, lineage)
        if found.dissenters or found.tie:
            return found
        good = found
    return good


def judged(hash_key: HashKey, cast: Mapping[int, str], lineage: Mapping[int, int]) -> VoteResult:
    """Return what these votes say about one step."""
    witnesses: dict[str, set[int]] = {}
    for member, digest in cast.items():
        witnesses.setdefault(digest, set()).add(lineage.get(member, member))
    digest = max(witnesses, key=lambda one: len(witnesses[one]))
    most, all_votes = len(witnesses[digest]), sum(map(len, witnesses.values()))
    if len(witnesses) == 1:
        return VoteResult(hash_key, cast, witnesses=most, digest=digest)
    if 2 * most <= all_votes:
        return VoteResult(hash_key, cast, tie=True)
    odd = tuple(member for member, said in cast.items() if said != digest)
    return VoteResult(hash_key, cast, dissenters=odd, witnesses=most, digest=digest)


def first_to_differ(
    before: Mapping[int, Trail], again: Collection[Trail], cast: Collection[int]
) -> tuple[int, tuple[int, ...]]:
    """Return the first step to which some members, but not all, had contributed something else than the
    second computation, and these members; no members where that is not certain. A step with a contribution
    that cannot be compared makes the next ones uncertain, until all are equal in one."""
    right = {(step, _shards(text)): text for trail in again for step, text in trail}
    steps = sorted({step for step, _ in right})
    contributed = {member: dict(before.get(member, ())) for member in cast}
    certain = True
    for step in steps:
        same = {member: _is_same(step, trail.get(step), right) for member, trail in contributed.items()}
        if None in same.values():
            certain = False
            continue
        odd = tuple(sorted(member for member, is_same in same.items() if not is_same))
        if not odd:
            certain = True
        elif certain and len(odd) < len(contributed):
            return step, odd
        else:
            break
    return -1, ()


def _is_same(step: int, text: str | None, right: Mapping[tuple[int, str], str]) -> bool | None:
    """Compare two contributions. None: they cannot be compared, because the shards were assigned otherwise
    the second time."""
    expected = None if text is None else right.get((step, _shards(text)))
    return None if expected is None else expected == text


def _shards(text: str) -> str:
    return text.partition("/")[0]
