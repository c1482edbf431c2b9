"""Admit workers to the next view once they have met their peers, by the endpoints that the view will use.

A control connection says nothing about the path between two workers: a firewall, NAT or an address of the
wrong family may be in between, and a view with such a pair never forms. So a worker that is ready is asked to
dial each member on another host, and each of these to dial it; training continues meanwhile. Only when both
directions of all pairs are proven may it be in a view. A worker that cannot meet a peer is dismissed, with
the address and the direction, and that counts as a failure of its slot.

Workers of one host need no proof; a job on one host never dials.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from paceline.elastic.machine.actions import RejectAgent, RequestDial, dismiss
from paceline.elastic.machine.settings import LOCAL_AGENT
from paceline.elastic.machine.slots import lose
from paceline.elastic.machine.state import JobState, Worker, WorkerStatus, in_view, rank_names, ready


def have_met(one: Worker, other: Worker) -> bool:
    """Return whether each worker has reached the other, or both are on one host."""
    return one.agent_id == other.agent_id or (other.number in one.reached and one.number in other.reached)


def admitted(job: JobState) -> list[Worker]:
    """Return the ready workers that have met all members of the view and each other."""
    chosen: list[Worker] = []
    members = in_view(job)
    for worker in sorted(ready(job), key=lambda worker: (worker.slot, worker.number)):
        if all(have_met(worker, other) for other in (*members, *chosen)):
            chosen.append(worker)
    return chosen


def dial(job: JobState) -> None:
    """Request the dials that were not requested yet, and again those without a result: an answer can be lost
    with a connection, and a second request does no harm."""
    if job.stop_reason is not None:
        return
    for worker in ready(job):
        unmet = unmet_peers(job, worker)
        if not unmet:
            continue
        again = job.now - worker.dialed_at >= job.settings.dial_seconds
        asked = frozenset() if again else worker.dialing
        # After a restart of the supervisor the endpoint of a member is known once that member is back.
        fresh = tuple(peer.number for peer in unmet if peer.reconnected and peer.number not in asked)
        if fresh:
            job.actions.append(RequestDial(worker.number, fresh))
            since = job.now if again or not worker.dialing else worker.dialed_at
            job.workers[worker.number] = replace(worker, dialing=asked.union(fresh), dialed_at=since)
        job.tick_by(job.workers[worker.number].dialed_at + job.settings.dial_seconds)


def unmet_peers(job: JobState, worker: Worker) -> list[Worker]:
    """Return the peers that a ready worker has to meet. Of two that are ready, the later one dials for
    both."""
    return [
        other
        for other in job.workers.values()
        if other.status is not WorkerStatus.STARTING
        and (other.status is not WorkerStatus.READY or other.number < worker.number)
        and not have_met(worker, other)
    ]


def ask_again(job: JobState, number: int) -> None:
    """Forget which dials this worker was asked for: the requests may be lost with its connection."""
    for worker in ready(job):
        job.workers[worker.number] = replace(worker, dialing=worker.dialing - {number})
    if number in job.workers:
        job.workers[number] = replace(job.workers[number], dialing=frozenset())


def refuse(job: JobState, worker: Worker, reason: str) -> None:
    """Refuse a worker that cannot be in a view with the others: its slot has one failure more. A host none of
    whose slots has a start left is rejected, so that its user sees why."""
    lose(job, worker, "unreachable", reason, phase="start")
    job.actions.append(dismiss(worker.number, reason))
    agent_id = worker.agent_id
    left = any(slot.usable for slot in job.slots.values() if slot.agent_id == agent_id)
    has_workers = any(other.agent_id == agent_id for other in job.workers.values())
    if agent_id != LOCAL_AGENT and not left and not has_workers:
        job.actions.append(RejectAgent(agent_id, reason))


def overdue(job: JobState) -> list[tuple[Worker, str]]:
    """Return ready workers whose dials, or dials to which, had no result in time, and why they are refused.

    Of the pairs that have not met, the worker that is in most of them is refused, the later one of equals,
    until no pair is left: a worker that answers no dial must not cost its peers their place. A member of the
    view is never refused for the sake of a newcomer.
    """
    limit = job.settings.start_seconds
    pairs = [
        (worker, peer)
        for worker in ready(job)
        if job.now - worker.since >= limit
        for peer in unmet_peers(job, worker)
    ]
    late = []
    while pairs:
        count = Counter(one.number for pair in pairs for one in pair if one.status is WorkerStatus.READY)
        number = max(count, key=lambda member: (count[member], member))
        worker = job.workers[number]
        unmet = [other for pair in pairs if worker in pair for other in pair if other is not worker]
        names = rank_names(unmet)
        late.append((worker, f"rank {worker.slot} and {names} have not met within {limit:g} s"))
        pairs = [pair for pair in pairs if worker not in pair]
    return late
