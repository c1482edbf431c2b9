"""What a failed collective says about the others: whose data was damaged, who could not be reached.

Errors of a group name ranks; whoever looks after the job knows members. Must not know what is done about it.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.control.messages import Broken, View
from paceline.core.errors import CommTimeoutError, CorruptDataError, PeerLostError


def broken(view: View, trouble: BaseException) -> Broken:
    """What to say about a collective of this view that failed: errors name ranks, others know members."""
    accused = (trouble.rank,) if isinstance(trouble, CorruptDataError) else ()
    unreachable: tuple[int, ...] = ()
    if isinstance(trouble, PeerLostError):
        unreachable = trouble.ranks
    elif isinstance(trouble, CommTimeoutError):
        unreachable = trouble.waiting_for
    return Broken(
        generation=view.generation,
        reason=(str(trouble).splitlines() or [type(trouble).__name__])[0],
        accused=_members_of(view, accused),
        unreachable=_members_of(view, unreachable),
    )


def _members_of(view: View, ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(view.members[rank] for rank in ranks if 0 <= rank < len(view.members))
