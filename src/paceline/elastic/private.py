"""State that only one member has: what compression still owes, by shard. Whether it is all there.

Every shard's debt belongs to a moment, a number of committed steps. A view can go on from the moment of its
furthest member if each shard's debt at that moment is with some member of the view; members give each other
what they need then. Else it is lost, and all go back to a checkpoint, which has the whole of it. Must not
know what the debt is.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.elastic.model import Reported


def missing(shards: int, reports: Sequence[Reported]) -> tuple[int, ...]:
    """The shards of whose debt these members have none that fits the furthest of them; empty where the run
    has no such state, or where no member has any state."""
    known = [report.progress for report in reports if report.progress is not None]
    if not known or not any(report.alone for report in reports):
        return ()
    moment = max(known)[0]
    there = {
        shard
        for report in reports
        for step, owned in report.owed
        if step == moment and report.progress is not None
        for shard in owned
    }
    return tuple(shard for shard in range(shards) if shard not in there)


def words(lost: Sequence[int]) -> str:
    if len(lost) == 1:
        return f"what compression owes shard {lost[0]}"
    names = ", ".join(map(str, lost[:6])) + (" and others" if len(lost) > 6 else "")
    return f"what compression owes shards {names}"
