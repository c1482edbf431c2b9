"""Choose the member to expel when two members cannot reach each other: the link is at fault, but one end has
to go.

Both ends of a broken link report the same (each waits for the other, each could not reach the other), so
counting reports says nothing about them. Where they are on different hosts the verdict names the link, and
the choice depends on the placement alone: the end on the host with fewer members, then the one that is not on
the supervisor's host, then the higher rank. So the same link always costs the same side. Reports of other
hosts about one end alone count first, and then which hosts each end has reached: one that reaches no other
host, while its neighbours do, is cut off itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import final

from paceline.elastic.machine.settings import LOCAL_AGENT
from paceline.elastic.machine.state import JobState, Worker, in_view


@final
@dataclass(frozen=True)
class BrokenLink:
    """`end` is the member that has to go; `says` is for the verdict."""

    end: Worker
    other: Worker
    says: str


def broken_link(
    job: JobState,
    named: Mapping[int, Collection[int]],
    among: Collection[int],
    met: Collection[tuple[int, int]] = (),
) -> BrokenLink | None:
    """Return the link that explains why members named each other; None: no two of them did across hosts.

    named   the members that each member waits for or could not reach
    among   the members that may be expelled
    met     pairs of members of different hosts that have just reached each other
    """
    # A link is suspected only where both ends name each other: one that is named by a peer it does not name
    # is late or dead itself, and is not a matter of the link. On one host there is no link to blame.
    pairs = [
        (job.workers[one], job.workers[other])
        for one, others in named.items()
        for other in others
        if one < other
        and {one, other} <= job.workers.keys()
        and one in named.get(other, ())
        and job.workers[one].agent_id != job.workers[other].agent_id
        and (one in among or other in among)
    ]
    if not pairs:
        return None
    # How many members of other hosts name each candidate. Members of its own host that name an end wait only
    # because the end does.
    blamed = {
        number: sum(
            number in others
            for one, others in named.items()
            if one in job.workers and job.workers[one].agent_id != job.workers[number].agent_id
        )
        for number in among
    }
    # First the end that most other hosts name: the trouble is on its side. Of equals the one that reached
    # fewer members just now, because it is the one cut off; then the one whose loss costs the job least.
    ends = {worker.number: worker for pair in pairs for worker in pair if worker.number in among}
    most = max(blamed[number] for number in ends)
    reached = Counter(number for pair in met for number in pair)
    end = min(
        (ends[number] for number in ends if blamed[number] == most),
        key=lambda one: (reached[one.number], *_cost(job, one)),
    )
    other = min(
        (other for pair in pairs if end in pair for other in pair if other is not end),
        key=lambda one: one.slot,
    )
    # Another pair of the same two hosts has met: then the link carries, and the verdict must not blame it.
    carries = any(
        {job.workers[one].agent_id, job.workers[two].agent_id} == {end.agent_id, other.agent_id}
        for one, two in met
        if {one, two} <= job.workers.keys()
    )
    fault = ": the link between the hosts is at fault, not a rank"
    why = ", while others of the two hosts do" if carries else fault
    return BrokenLink(
        end,
        other,
        f"rank {end.slot} on {_host(job, end)} and rank {other.slot} on {_host(job, other)} do not "
        f"reach each other{why}",
    )


def _cost(job: JobState, worker: Worker) -> tuple[int, bool, int]:
    """Return what the job loses with the host of this worker; the cheapest is given up."""
    here = sum(one.agent_id == worker.agent_id for one in in_view(job))
    return here, worker.agent_id == LOCAL_AGENT, -worker.slot


def _host(job: JobState, worker: Worker) -> str:
    if worker.agent_id == LOCAL_AGENT:
        return "the supervisor's host"
    return job.agents.get(worker.agent_id, "another host")
