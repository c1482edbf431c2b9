"""Probe the links between hosts before a member is blamed: members on different hosts dial each other again.

A collective that fails while all members live, and members that wait for each other, can have a cause between
the hosts: a link that was lost after the members had met, in one direction or both, or one that carries small
packets and no large ones. The waits do not tell (all members wait for all), a dial does (admission.py): from
which member, to which, at which address. So the members that named each other are asked to dial, with all
members of their two hosts; the next view is formed when all have answered, which takes milliseconds on
healthy links.

Only packets that do not arrive are proof. A refused dial may have met a process that has just died, and a
dial without an answer a process that is stopped or whose interpreter is held. The probe is dropped when the
job continues by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations

from paceline.control.messages import DialResult
from paceline.elastic.machine.actions import RequestDial
from paceline.elastic.machine.hang_detection import FaultFinding, hang_limit, phase_of, waiting_for
from paceline.elastic.machine.link_faults import broken_link
from paceline.elastic.machine.liveness import interpreter_is_held
from paceline.elastic.machine.slots import expel
from paceline.elastic.machine.state import IN_VIEW, JobPhase, JobState, Worker, in_view

_ALL_PAIRS = 32  # members of a view in which all pairs are checked
_WAITING = "no step can be made while both are in the view"
_NOT_DONE = "the others could not finish a step with it"
FAILURES_BEFORE_BLAME = 3
"""Collectives that may fail in a row with no member lost; then the member that was named most is expelled."""


def probe_links(job: JobState, named: Iterable[tuple[int, int]]) -> bool:
    """Ask members of the hosts of each such pair to dial each other. False: all are on one host, or the job
    stops and one member can save for all."""
    if job.stop_reason is not None:
        return False
    view = {worker.number: worker for worker in in_view(job)}
    hosts = {
        frozenset((view[one].agent_id, view[other].agent_id))
        for one, other in named
        if one in view and other in view and view[one].agent_id != view[other].agent_id
    }
    asked: set[tuple[int, int]] = set()
    for number, worker in sorted(view.items()):
        peers = tuple(
            other.number
            for _, other in sorted(view.items())
            if other.number > number and frozenset((worker.agent_id, other.agent_id)) in hosts
        )
        if peers:
            job.actions.append(RequestDial(number, peers))
            asked |= {pair for peer in peers for pair in ((number, peer), (peer, number))}
    if not asked:
        return False
    job.pending_dials, job.dials_sent_at, job.dial_results = frozenset(asked), job.now, {}
    job.tick_by(job.now + job.settings.check_seconds)
    return True


def probe_around(job: JobState, reporter: Worker) -> bool:
    """Probe after a collective failed at this member while all members live. The members that it waited for
    say little: where all wait for all, these may be members behind a healthy link. A large job probes only
    the members that it named."""
    members = [worker.number for worker in in_view(job)]
    named: Iterable[tuple[int, int]] = combinations(members, 2)
    if len(members) > _ALL_PAIRS:
        named = list(job.suspicions) or [(reporter.number, other) for other in members]
    return probe_links(job, named)


def probe_waiting_members(job: JobState) -> bool:
    """Probe the links of members that wait for others, once the job has stood still for half of the hang
    limit."""
    late = job.phase is JobPhase.RUNNING and job.now - job.progressed_at >= hang_limit(job) / 2
    if not late or job.dials_sent_at >= job.progressed_at or job.stopped_together:
        return False
    return probe_links(job, [(one, peer) for one, peers in waiting_for(job).items() for peer in peers])


def is_open(job: JobState) -> bool:
    """Return whether an answer may still come."""
    alive = any(one in job.workers and other in job.workers for one, other in job.pending_dials)
    return alive and job.stop_reason is None and job.now < job.dials_sent_at + job.settings.check_seconds


def is_answer(job: JobState, member: int, result: DialResult) -> bool:
    """Record the result of a dial that a link probe asked for. False: the dial belongs to an admission."""
    pair = (member, result.peer)
    if pair not in job.pending_dials:
        return False
    job.pending_dials -= {pair}
    if result.lossy or not result.trouble:
        job.dial_results[pair] = result.trouble
    return True


def judge(job: JobState) -> list[Worker]:
    """Expel members until no broken link is left in the view, once all answers are there; return those
    expelled."""
    if is_open(job):
        return []
    found, job.dial_results, job.pending_dials = job.dial_results, {}, frozenset()
    blocked = {pair: text for pair, text in found.items() if text}
    met = [pair for pair in found if pair not in blocked and pair[::-1] not in blocked]
    progressed = job.phase is JobPhase.RUNNING and job.progressed_at > job.dials_sent_at
    gone: list[Worker] = []
    while blocked and not progressed and job.stop_reason is None:
        named: dict[int, set[int]] = {}
        for one, other in blocked:
            if all(_can_answer(job, number) for number in (one, other)):
                named.setdefault(one, set()).add(other)
                named.setdefault(other, set()).add(one)
        link = broken_link(job, named, named.keys(), met)
        if link is None:
            break
        ends = {link.end.number, link.other.number}
        problem = next(text for pair, text in sorted(blocked.items()) if ends == set(pair))
        what = f"{link.says}: {problem}"
        expel(job, FaultFinding(link.end, "unreachable", phase_of(job, link.end), what, _WAITING))
        gone.append(link.end)
        job.reason = what
    return gone


def _can_answer(job: JobState, number: int) -> bool:
    worker = job.workers.get(number)
    return worker is not None and worker.status in IN_VIEW and not interpreter_is_held(job, number)


def most_suspect(job: JobState, reporter: Worker) -> FaultFinding:
    """Return the member to expel after collectives failed too often in a row: the one that was named most."""
    counts: Counter[int] = Counter()
    named: dict[int, set[int]] = {}
    for (accuser, accused), count in job.suspicions.items():
        suspect = job.workers.get(accused)
        if suspect is not None and suspect.status in IN_VIEW:
            counts[accused] += count
            named.setdefault(accuser, set()).add(accused)
    failed = f"collectives failed {FAILURES_BEFORE_BLAME} times in a row with no member lost"
    most = max(counts.values(), default=0)
    worst = max((n for n in counts if counts[n] == most), key=lambda n: job.workers[n].slot, default=None)
    link = broken_link(job, named, counts.keys())
    if link is not None and 2 * counts[link.end.number] > most:
        # Unless one of them was named far more often: then the trouble is its own, not the link's.
        what = f"{failed}, and {link.says}"
        return FaultFinding(link.end, "silent", phase_of(job, link.end), what, _NOT_DONE)
    culprit = reporter if worst is None else job.workers[worst]
    what = f"{failed}, and rank {culprit.slot} is the one that was most often not reached"
    return FaultFinding(culprit, "silent", phase_of(job, culprit), what, _NOT_DONE)
