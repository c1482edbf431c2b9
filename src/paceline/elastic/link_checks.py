"""Members that do not get on, and are on different machines, dial each other again before one is blamed.

A collective that breaks while all members live, and members that wait for each other, can have a cause
between the machines: a link that was lost after the members had met, in one direction or both, or one that
carries small packets and no large ones. Who waits for whom does not tell (all wait for all), a dial does
(admission.py): from whom, to whom, at which address. So those who named each other are asked, with all
members of their two machines; the next view is formed when all have answered, which takes milliseconds where
the links are well.

Only packets that do not arrive are a proof. A dial that is refused may have met a process that has just died,
and one without an answer a process that is stopped or whose interpreter is held. What was asked for is
forgotten when the job goes on by itself. Must not decide what becomes of the view.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from paceline.elastic.deadlines import Finding, hang_limit, phase_of, waits
from paceline.elastic.links import broken_link
from paceline.elastic.liveness import cannot_speak
from paceline.elastic.model import Action, HasDialed, Phase, TellDial
from paceline.elastic.seats import expel
from paceline.elastic.state import IN_VIEW, State, Worker, be_due, in_view

_ALL_PAIRS = 32  # members of a view in which all pairs are checked
_WAITING = "no step can be made while both are in the view"


def doubt(job: State, named: Iterable[tuple[int, int]], now: float, out: list[Action]) -> bool:
    """Ask members of the machines of each such pair to dial each other; False: all are on one machine, or the
    job stops, and one member can save what all of them have."""
    if job.stop is not None:
        return False
    view = {worker.number: worker for worker in in_view(job)}
    machines = {
        frozenset((view[one].place, view[other].place))
        for one, other in named
        if one in view and other in view and view[one].place != view[other].place
    }
    asked: set[tuple[int, int]] = set()
    for number, worker in sorted(view.items()):
        peers = tuple(
            other.number
            for _, other in sorted(view.items())
            if other.number > number and frozenset((worker.place, other.place)) in machines
        )
        if peers:
            out.append(TellDial(number, peers))
            asked |= {pair for peer in peers for pair in ((number, peer), (peer, number))}
    if not asked:
        return False
    job.doubts, job.doubted_at, job.walls = frozenset(asked), now, {}
    be_due(job, now + job.settings.check_seconds)
    return True


def doubt_breaker(job: State, reporter: Worker, now: float, out: list[Action]) -> bool:
    """A collective broke at this member while all members live. Whom it waited for says little: where
    all wait for all, it may have waited for members behind a good link only. A large job asks for those that
    it named."""
    members = [worker.number for worker in in_view(job)]
    named: Iterable[tuple[int, int]] = combinations(members, 2)
    if len(members) > _ALL_PAIRS:
        named = list(job.suspicion) or [(reporter.number, other) for other in members]
    return doubt(job, named, now, out)


def doubt_those_who_wait(job: State, now: float, out: list[Action]) -> bool:
    """The job has not gone on for half of the time after which one hangs, and members wait for others."""
    late = job.phase is Phase.RUNNING and now - job.moved_at >= hang_limit(job) / 2
    if not late or job.doubted_at >= job.moved_at or job.held:
        return False
    return doubt(job, [(one, peer) for one, peers in waits(job, now).items() for peer in peers], now, out)


def is_open(job: State, now: float) -> bool:
    """Whether an answer may still come."""
    alive = any(one in job.workers and other in job.workers for one, other in job.doubts)
    return alive and job.stop is None and now < job.doubted_at + job.settings.check_seconds


def answered(job: State, event: HasDialed) -> bool:
    """Whether this was asked here; keeps what was found."""
    pair = (event.member, event.peer)
    if pair not in job.doubts:
        return False
    job.doubts -= {pair}
    if event.lossy or not event.trouble:
        job.walls[pair] = event.trouble
    return True


def judge(job: State, now: float, out: list[Action]) -> list[Worker]:
    """Once no answer is missing: who has to go, so that no broken link is left in the view. Gone already."""
    if is_open(job, now):
        return []
    found, job.walls, job.doubts = job.walls, {}, frozenset()
    walls = {pair: text for pair, text in found.items() if text}
    met = [pair for pair in found if pair not in walls and pair[::-1] not in walls]
    went_on = job.phase is Phase.RUNNING and job.moved_at > job.doubted_at
    gone: list[Worker] = []
    while walls and not went_on and job.stop is None:
        named: dict[int, set[int]] = {}
        for one, other in walls:
            if all(_can_say(job, number, now) for number in (one, other)):
                named.setdefault(one, set()).add(other)
                named.setdefault(other, set()).add(one)
        link = broken_link(job, named, named.keys(), met)
        if link is None:
            break
        said = next(text for pair, text in sorted(walls.items()) if pair in link.directions)
        what = f"{link.says}: {said}"
        expel(job, Finding(link.end, "unreachable", phase_of(job, link.end), what, _WAITING), now, out)
        gone.append(link.end)
        job.reason = what
    return gone


def _can_say(job: State, number: int, now: float) -> bool:
    worker = job.workers.get(number)
    return worker is not None and worker.standing in IN_VIEW and not cannot_speak(job, number, now)
