"""Two members that do not reach each other: the link is at fault, and one of the two has to go all the same.

Both ends of a broken link say the same of each other (each waits for the other, each could not reach the
other), so counting who was named says nothing about them. Where they are on different machines the verdict
names the link, and the choice depends on nothing but who is where: the end on the machine with fewer members,
then the one that is not the supervisor's own, then the higher rank. So the same link always costs the same
side. What other machines say about one end alone counts first, and then whom else each end has reached: one
that reaches no other machine, while its neighbours do, is cut off itself. Must not change anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import final

from paceline.elastic.model import HOME
from paceline.elastic.state import State, Worker, in_view


@final
@dataclass(frozen=True)
class Link:
    """`end` is the one that has to go; `says` is for the verdict."""

    end: Worker
    other: Worker
    says: str

    @property
    def directions(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Member to member, both ways."""
        return (self.end.number, self.other.number), (self.other.number, self.end.number)


def broken_link(
    job: State,
    named: Mapping[int, Collection[int]],
    among: Collection[int],
    met: Collection[tuple[int, int]] = (),
) -> Link | None:
    """The link that explains why members named each other; None: no two of them did across machines.

    named   whom each member waits for or could not reach
    among   those who may be sent away
    met     pairs of members of different machines that have just reached each other
    """
    pairs = [
        (job.workers[one], job.workers[other])
        for one, others in named.items()
        for other in others
        if one < other
        and {one, other} <= job.workers.keys()
        and one in named.get(other, ())
        and job.workers[one].place != job.workers[other].place
        and (one in among or other in among)
    ]
    if not pairs:
        return None
    # Members of its own machine that name an end wait only because it does.
    blamed = {
        number: sum(
            number in others
            for one, others in named.items()
            if one in job.workers and job.workers[one].place != job.workers[number].place
        )
        for number in among
    }
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
    between = {
        frozenset((job.workers[one].place, job.workers[two].place))
        for one, two in met
        if {one, two} <= job.workers.keys()
    }
    carries = frozenset((end.place, other.place)) in between
    why = ", while others of the two machines do"
    if not carries:
        why = ": the link between the machines is at fault, not a rank"
    return Link(
        end,
        other,
        f"rank {end.slot} on {_machine(job, end)} and rank {other.slot} on {_machine(job, other)} do not "
        f"reach each other{why}",
    )


def _cost(job: State, worker: Worker) -> tuple[int, bool, int]:
    """What the job loses with the machine of this worker; the least is given up."""
    here = sum(one.place == worker.place for one in in_view(job))
    return here, worker.place == HOME, -worker.slot


def _machine(job: State, worker: Worker) -> str:
    if worker.place == HOME:
        return "the supervisor's machine"
    return job.agents.get(worker.place, "another machine")
