"""Who may be in the next view: workers that have met their peers by the endpoints that the view will use.

A control connection says nothing about the way between two workers: a firewall, NAT or an address of the
wrong family may be in between, and a view with such a pair in it never forms. So a worker that is ready is
asked to dial each member of another place, and each of these to dial it; training goes on meanwhile. Only
when both directions of all pairs were proved may it be in a view. One that cannot meet a peer is dismissed,
with the address and the direction, and that counts as a failure of its slot.

Workers of one place share a machine and need no proof; a job of one place never dials. Must not know how
dials are made.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from paceline.elastic.model import HOME, Action, Dismiss, SendAway, Standing, TellDial
from paceline.elastic.seats import lose
from paceline.elastic.state import State, Worker, be_due, in_view, ranks, ready


def have_met(one: Worker, other: Worker) -> bool:
    """Whether each has reached the other, or they share a machine."""
    return one.place == other.place or (other.number in one.reached and one.number in other.reached)


def admitted(job: State) -> list[Worker]:
    """Of the workers that are ready: those that have met all of the view and each other."""
    chosen: list[Worker] = []
    waiting = ready(job)
    if not waiting:
        return chosen
    members = in_view(job)
    for worker in sorted(waiting, key=lambda worker: (worker.slot, worker.number)):
        if all(have_met(worker, other) for other in (*members, *chosen)):
            chosen.append(worker)
    return chosen


def dial(job: State, now: float, out: list[Action]) -> None:
    """Ask for the meetings that were not asked for, and again for those of which nothing was heard: an
    answer can be lost with a connection, and asking twice does no harm."""
    if job.stop is not None:
        return
    for worker in ready(job):
        unmet = unmet_peers(job, worker)
        if not unmet:
            continue
        again = now - worker.dialed_at >= job.settings.dial_seconds
        asked = frozenset() if again else worker.dialed
        fresh = tuple(peer.number for peer in unmet if peer.number not in asked)
        if fresh:
            out.append(TellDial(worker.number, fresh))
            since = now if again or not worker.dialed else worker.dialed_at
            job.workers[worker.number] = replace(worker, dialed=asked.union(fresh), dialed_at=since)
        be_due(job, job.workers[worker.number].dialed_at + job.settings.dial_seconds)


def unmet_peers(job: State, worker: Worker) -> list[Worker]:
    """Whom a ready worker has to meet. Of two that are ready, the later one is asked for both."""
    return [
        other
        for other in job.workers.values()
        if other.standing is not Standing.STARTING
        and (other.standing is not Standing.READY or other.number < worker.number)
        and not have_met(worker, other)
    ]


def ask_again(job: State, number: int) -> None:
    """What was asked of this worker may be lost: it had no connection."""
    for worker in ready(job):
        if worker.number == number or number in worker.dialed:
            job.workers[worker.number] = replace(worker, dialed=worker.dialed - {number})
    if number in job.workers and job.workers[number].standing is Standing.READY:
        job.workers[number] = replace(job.workers[number], dialed=frozenset())


def refuse(job: State, worker: Worker, reason: str, now: float, out: list[Action]) -> None:
    """This worker cannot be in a view with the others: its slot has one failure more. A machine none of
    whose slots has a start left is sent away, so that its user sees why."""
    lose(job, worker, "unreachable", reason, now, out, phase="start")
    out.append(Dismiss(worker.number, reason))
    place = worker.place
    left = any(slot.usable for slot in job.slots.values() if slot.place == place)
    at_work = any(other.place == place for other in job.workers.values())
    if place != HOME and not left and not at_work:
        out.append(SendAway(place, reason))


def overdue(job: State, now: float) -> list[tuple[Worker, str]]:
    """Ready workers whose dials, or dials of whom, had no result in time, and why they are refused.

    Of the pairs that have not met, the worker that is in most of them is refused, the later one of equals,
    until no pair is left: a worker that answers no dial must not cost its peers their place. A member of
    the view is never refused for the sake of a newcomer.
    """
    limit = job.settings.start_seconds
    pairs = [
        (worker, peer)
        for worker in ready(job)
        if now - worker.since >= limit
        for peer in unmet_peers(job, worker)
    ]
    late = []
    while pairs:
        count = Counter(one.number for pair in pairs for one in pair if one.standing is Standing.READY)
        number = max(count, key=lambda member: (count[member], member))
        worker = job.workers[number]
        unmet = [other for pair in pairs if worker in pair for other in pair if other is not worker]
        names = ranks(sorted(peer.slot for peer in unmet))
        late.append((worker, f"rank {worker.slot} and {names} have not met within {limit:g} s"))
        pairs = [pair for pair in pairs if worker not in pair]
    return late
