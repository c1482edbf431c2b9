"""A difference between members that no majority decides, and what names the odd one when the steps are
computed again.

Where a model is looked at in parts, a difference may be seen some steps after it arose. The wrong gradients
of the odd member are in the state of every member by then: what comes out when the steps are computed again
is the state of none. But each member remembers what it put into the latest steps (train/trail.py). The first
that put in something else than came out the second time is the odd one; the others followed only when its
gradients had reached them. Must not know workers, views or time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, final

Ballot: TypeAlias = tuple[int, str]
"""A step, and the kind of the hashes that are compared."""

Trail: TypeAlias = tuple[tuple[int, str], ...]
"""What a member put into its latest steps: (step, "shards/hashes")."""


@final
@dataclass(frozen=True)
class Dispute:
    """Which member cast which vote about a step, with no majority for any of them. `trails`: of each of these
    members, what it had put into the steps before; `deal`: which rank computed which shards."""

    ballot: Ballot
    cast: Mapping[int, str]
    trails: Mapping[int, Trail] = field(default_factory=dict)
    deal: tuple[tuple[int, ...], ...] = ()

    @property
    def step(self) -> int:
        return self.ballot[0]


def first_to_differ(
    before: Mapping[int, Trail], again: Collection[Trail], cast: Collection[int]
) -> tuple[int, tuple[int, ...]]:
    """The first step into which some members, but not all, had put something else than came out when it was
    computed again, and these members; no members where this is not certain. A step of which what one of them
    put in cannot be compared makes the next ones uncertain, until all are the same in one."""
    right = {(step, _shards(text)): text for trail in again for step, text in trail}
    steps = sorted({step for step, _ in right})
    told = {member: dict(before.get(member, ())) for member in cast}
    certain = True
    for step in steps:
        same = {member: _is_same(step, trail.get(step), right) for member, trail in told.items()}
        if None in same.values():
            certain = False
            continue
        odd = tuple(sorted(member for member, is_same in same.items() if not is_same))
        if not odd:
            certain = True
        elif certain and len(odd) < len(told):
            return step, odd
        else:
            break
    return -1, ()


def _is_same(step: int, text: str | None, right: Mapping[tuple[int, str], str]) -> bool | None:
    """None: it cannot be compared, because the shards were dealt otherwise the second time."""
    expected = None if text is None else right.get((step, _shards(text)))
    return None if expected is None else expected == text


def _shards(text: str) -> str:
    return text.partition("/")[0]
