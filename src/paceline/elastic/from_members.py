"""What follows from what members say: hello, heartbeats, reports, broken collectives, errors, the end.

Each handler changes the copy of the state it is given, appends actions, and returns the reason. A message of
another generation, or of somebody unknown, changes nothing. Must not know the clock's events.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from paceline.core.control.messages import Progress
from paceline.elastic import admission, audit_votes, audits, link_checks
from paceline.elastic.deadlines import Finding, phase_of
from paceline.elastic.ending import all_done, finish
from paceline.elastic.failing import fail, save_without
from paceline.elastic.links import broken_link
from paceline.elastic.liveness import probe_limit
from paceline.elastic.model import (
    Action,
    Beaten,
    Dismiss,
    HasBroken,
    HasDialed,
    Hashed,
    HasInstalled,
    HasRaised,
    IsDone,
    Joined,
    Lost,
    NoteVerdict,
    Phase,
    Reported,
    Standing,
    TellPrepare,
    TellStop,
    WantsToLeave,
)
from paceline.elastic.regroup import (
    cut_short,
    go_on_preparing,
    heed_wishes,
    mend,
    prepare,
    run,
    settle_links,
    settle_return,
    try_start,
)
from paceline.elastic.seats import depart, expel, hand_over_slot, lose
from paceline.elastic.state import IN_VIEW, State, Worker, be_due

_NOT_DONE = "the others could not finish a step with it"
BREAKS_BEFORE_BLAME = 3
"""So often in a row collectives may break with nobody gone; then whoever was named most has to go."""


def joined(job: State, event: Joined, now: float, out: list[Action]) -> str:
    """A hello, from a new worker or from a member whose connection was away."""
    worker = job.workers.get(event.member)
    if worker is None:
        out.append(Dismiss(event.member, "nobody expects this worker"))
        return f"member {event.member} says hello and is not expected: it may end"
    if job.stop is not None and worker.standing is Standing.STARTING:
        out.append(Dismiss(event.member, f"the job is stopping: {job.stop}"))
        del job.workers[event.member]
        job.slots.pop(worker.slot, None)
        return f"rank {worker.slot} came when the job was stopping: it may end"
    if worker.standing is not Standing.STARTING:
        return _came_back(job, worker, event, now, out)
    job.workers[event.member] = replace(worker, standing=Standing.READY, since=now)
    job.heard[event.member] = now
    be_due(job, now + probe_limit(job))
    said = f"rank {worker.slot} is ready"
    admission.dial(job, now, out)
    if job.phase is Phase.STARTING:
        return try_start(job, said, now, out)
    wish = heed_wishes(job, now, out)
    return f"{said}; {wish}" if wish else said


def _came_back(job: State, worker: Worker, event: Joined, now: float, out: list[Action]) -> str:
    job.heard[worker.number] = now
    said = f"rank {worker.slot} is connected again"
    if job.phase is not Phase.RETURNING:
        admission.ask_again(job, worker.number)
        admission.dial(job, now, out)
        worker = job.workers[worker.number]
    if job.phase is Phase.PREPARING:
        if worker.number in job.waiting:
            out.append(TellPrepare((worker.number,), job.generation, job.abort, job.reason))
            return f"{said} and is asked again"
        return said
    if worker.standing not in IN_VIEW:
        return said
    if job.phase is Phase.RETURNING:
        job.workers[worker.number] = replace(worker, back=True)
        be_due(job, now + probe_limit(job))
        if job.view is None or event.generation != job.view.generation:
            job.abort = True
        # Never lower than what any member has seen: a generation means one view, for ever.
        job.generation = max(job.generation, event.generation)
        return settle_return(job, said, now, out)
    if event.generation == 0 and worker.number not in job.waiting:
        return f"{said}, an old hello"
    if event.generation == job.generation:
        if job.phase is Phase.INSTALLING:
            return has_installed(job, HasInstalled(worker.number, event.generation, event.progress), now, out)
        if job.phase is Phase.STOPPING and job.failing is None:
            out.append(TellStop((worker.number,), job.stop or ""))
        return said
    # It is in another view than everybody else: what it was told is lost.
    return prepare(job, True, f"{said} and is in generation {event.generation}", now, out)


def has_dialed(job: State, event: HasDialed, now: float, out: list[Action]) -> str:
    """A worker has reached a peer, or has not."""
    worker, peer = job.workers.get(event.member), job.workers.get(event.peer)
    if worker is None or peer is None:
        return f"members {event.member} and {event.peer} met, and one of them is gone"
    said = f"rank {worker.slot} reached rank {peer.slot}"
    if link_checks.answered(job, event):
        return settle_links(job, event.trouble or said, now, out)
    if not event.trouble:
        job.workers[worker.number] = replace(worker, reached=worker.reached | {peer.number})
        if job.phase is Phase.STARTING:
            return try_start(job, said, now, out)
        wish = heed_wishes(job, now, out)
        return f"{said}; {wish}" if wish else said
    if peer.number in worker.reached:
        return f"{said} before, and not this time: {event.trouble}"
    newcomers = [one for one in (worker, peer) if one.standing is Standing.READY]
    if not newcomers:
        return f"{event.trouble}, and both are in the view"
    late = max(newcomers, key=lambda one: (one.slot, one.number))
    admission.refuse(job, late, event.trouble, now, out)
    return mend(job, [late], event.trouble, now, out)


def beaten(job: State, event: Beaten, now: float, out: list[Action]) -> str:
    """The most frequent event: looks at nobody else."""
    number = event.member
    worker = job.workers.get(number)
    if worker is None or worker.standing is Standing.STARTING or not worker.back:
        return f"a heartbeat of member {number}, who is not expected"
    job.heard[number] = now
    job.beats[number] = event
    if event.step_seconds > 0 and not job.committed:
        job.committed = True
    if worker.standing in IN_VIEW and _has_moved(job, event.progress, now):
        return "a member goes on"
    return "a member lives"


def _has_moved(job: State, progress: Progress | None, now: float) -> bool:
    """Whether a member is further than anybody was known to be."""
    if progress is None or (job.furthest is not None and progress <= job.furthest):
        return False
    if job.base is not None and progress[0] > job.base[0]:
        # Also where this is the first report of the view: its members were lost before they had beaten twice.
        job.committed = True
        job.hangs = 0
    if job.furthest is not None and progress[0] > job.furthest[0]:
        job.worked += now - job.worked_at
        job.worked_at = now
        job.breaks = job.hangs = 0
        job.suspicion = {}
    job.furthest = progress
    job.moved_at = now
    return True


def reported(job: State, event: Reported, now: float, out: list[Action]) -> str:
    """A member stopped and says what it has."""
    if job.phase is not Phase.PREPARING or event.generation != job.generation:
        return f"a report for generation {event.generation} is not wanted"
    if event.member not in job.waiting:
        return f"a report of member {event.member}, who was not asked or has reported"
    job.heard[event.member] = now
    job.reports[event.member] = event
    _has_moved(job, event.progress, now)
    job.waiting = job.waiting - {event.member}
    return go_on_preparing(job, f"rank {job.workers[event.member].slot} reported", now, out)


def has_installed(job: State, event: HasInstalled, now: float, out: list[Action]) -> str:
    """A member is in the new view."""
    if job.phase is not Phase.INSTALLING or event.generation != job.generation:
        return f"generation {event.generation} is not being installed"
    if event.member not in job.waiting:
        return f"member {event.member} is in the view already, or was never to be"
    job.heard[event.member] = job.moved_at = now
    if event.progress is not None:
        job.base = event.progress if job.base is None else min(job.base, event.progress)
        if job.view is not None and job.view.restore:
            # All hold what one checkpoint holds, and it is of a step that all agreed on: a dissent later on
            # goes back to it and not before it, also where this job has compared no step yet.
            job.agreed = job.base[0]
    job.waiting = job.waiting - {event.member}
    if job.waiting:
        return f"{len(job.waiting)} members are not in generation {job.generation} yet"
    return run(job, now, out)


def has_broken(job: State, event: HasBroken, now: float, out: list[Action]) -> str:
    """A collective failed at a member: somebody is gone, somebody's data is damaged, or a line is cut."""
    worker = job.workers.get(event.member)
    view = job.view
    if worker is None or worker.standing not in IN_VIEW or view is None:
        return f"member {event.member} is in no view that could break"
    if event.generation != view.generation:
        return f"generation {event.generation}, which broke, is over"
    job.heard[event.member] = now
    why = f"a collective failed at rank {worker.slot}: {event.reason}"
    if job.phase is Phase.RETURNING:
        job.abort = True
        return why
    corrupt = _who_is_corrupt(job, worker, event)
    if corrupt:
        for bad in corrupt:
            what = f"data of rank {bad.slot} does not match its checksum"
            done = "it was killed and left out; the step is computed again"
            out.append(NoteVerdict(bad.number, bad.slot, "collective", what, event.reason, done, sure=True))
            lose(job, bad, "corrupt", what, now, out, kill=what, phase="collective")
        return mend(job, corrupt, why, now, out)
    for named in event.unreachable or _waited_for(job, event.member):
        job.suspicion[event.member, named] = job.suspicion.get((event.member, named), 0) + 1
    if job.phase is Phase.PREPARING and job.abort:
        return f"{why}; its members are being asked already"
    if job.phase is Phase.INSTALLING and job.stop is not None:
        return cut_short(job, why, now, out)
    job.breaks += 1
    if job.breaks >= BREAKS_BEFORE_BLAME:
        found = _most_suspect(job, worker)
        job.breaks = 0
        job.suspicion = {}
        expel(job, found, now, out)
        return mend(job, [found.worker], found.what, now, out)
    job.failed_at = now if job.failed_at is None else job.failed_at
    link_checks.doubt_breaker(job, worker, now, out)
    return prepare(job, True, why, now, out)


def _who_is_corrupt(job: State, accuser: Worker, event: HasBroken) -> list[Worker]:
    accused = [
        job.workers[number]
        for number in sorted(set(event.accused))
        if number in job.workers and job.workers[number].standing in IN_VIEW
    ]
    peers = [worker for worker in accused if worker is not accuser]
    others = sum(worker.standing in IN_VIEW for worker in job.workers.values()) - 1
    if len(peers) > 1 and len(peers) == others:
        # To whom everybody's data looks damaged, is the one that damages it.
        return [accuser]
    return accused


def _waited_for(job: State, number: int) -> tuple[int, ...]:
    beat = job.beats.get(number)
    return beat.waits_for if beat is not None else ()


def _most_suspect(job: State, reporter: Worker) -> Finding:
    counts: Counter[int] = Counter()
    named: dict[int, set[int]] = {}
    for (accuser, accused), count in job.suspicion.items():
        suspect = job.workers.get(accused)
        if suspect is not None and suspect.standing in IN_VIEW:
            counts[accused] += count
            named.setdefault(accuser, set()).add(accused)
    broke = f"collectives broke {BREAKS_BEFORE_BLAME} times in a row with nobody gone"
    most = max(counts.values(), default=0)
    worst = max((n for n in counts if counts[n] == most), key=lambda n: job.workers[n].slot, default=None)
    link = broken_link(job, named, counts.keys())
    if link is not None and 2 * counts[link.end.number] > most:
        # Unless one of them was named far more often: then it is that one's own trouble.
        return Finding(link.end, "silent", phase_of(job, link.end), f"{broke}, and {link.says}", _NOT_DONE)
    culprit = reporter if worst is None else job.workers[worst]
    what = f"{broke}, and rank {culprit.slot} is the one that was most often not reached"
    return Finding(culprit, "silent", phase_of(job, culprit), what, _NOT_DONE)


def lost(job: State, event: Lost, now: float, out: list[Action]) -> str:
    """A worker's process or connection is gone."""
    worker = job.workers.get(event.member)
    if worker is None:
        return f"member {event.member} is gone, and was not counted on any more"
    why = f"rank {worker.slot} is lost: {event.reason}"
    lose(job, worker, event.kind, event.reason, now, out)
    return mend(job, [worker], why, now, out)


def has_raised(job: State, event: HasRaised, now: float, out: list[Action]) -> str:
    """A worker's code raised: once is forgiven, the same step twice is not. Before the job ends for it, those
    who hold a good state save it."""
    worker = job.workers.get(event.member)
    if worker is None:
        if event.holds:
            out.append(Dismiss(event.member, "it raised, and is not counted on"))
        return f"member {event.member} raised, and was not counted on any more"
    if job.failing is not None:
        return save_without(job, worker, event, now, out)
    why = f"rank {worker.slot} raised in step {event.step}: {event.summary}"
    final = ""
    if event.fault == "user" or job.stop is not None:
        # While the job is stopping there is nobody left to try again with.
        final = why
    elif event.step in job.raised:
        final = f"{why}; it is not the first time for this step, so trying again would not help"
    if final:
        return fail(job, worker, final, event, now, out)
    job.raised = job.raised | {event.step}
    lose(job, worker, "raised", event.summary, now, out)
    if event.holds:
        out.append(Dismiss(worker.number, "its code raised; another worker takes its place"))
    return mend(job, [worker], why, now, out)


def hashed(job: State, event: Hashed, now: float, out: list[Action]) -> str:
    """A vote on a step: an audited one, one after which members differed, or one that was disputed."""
    worker = job.workers.get(event.member)
    if worker is None or worker.standing not in IN_VIEW:
        return f"a hash of member {event.member}, who is in no view"
    differs = event.agreed >= 0
    ballot = (event.step, event.kind)
    # A vote on what another member has seen to differ, from one that was stopped before it saw it, counts.
    late = job.restore and not differs and ballot not in job.votes
    if late or (event.generation and job.view and event.generation != job.view.generation):
        return "a hash from a time that everybody goes back from"
    if event.trail and job.dispute is not None and not job.restore:
        job.trails[event.member] = event.trail
    decides = differs or (job.dispute is not None and job.dispute.ballot == ballot)
    if not decides and event.step <= job.agreed and event.generation and job.view and job.view.restore:
        # Everybody went back before it: what was agreed on then says nothing about this time.
        job.agreed = event.step - 1
    if not decides and event.step <= job.agreed:
        return f"step {event.step} is agreed on already"
    job.votes = audit_votes.with_vote(job.votes, ballot, event.member, event.digest)
    if differs:
        audits.doubted(job, event)
    if job.phase in (Phase.PREPARING, Phase.RETURNING):
        return f"the hash of step {event.step} is kept until the view is whole"
    judged, expelled, all_go_back = audits.judge_open(job, now, out)
    if job.ended is not None:
        return judged
    if (all_go_back or differs) and not expelled:
        # Who dissented is gone already or not known yet, but what it did is in the weights of all.
        why = judged if all_go_back else f"the members differ after step {event.step}"
        return prepare(job, True, why, now, out)
    return mend(job, expelled, judged, now, out)


def wants_to_leave(job: State, event: WantsToLeave, now: float, out: list[Action]) -> str:
    """A worker was asked to go."""
    worker = job.workers.get(event.member)
    if worker is None or worker.leaves:
        return f"member {event.member} is not there any more, or leaves already"
    if worker.standing in (Standing.STARTING, Standing.READY):
        depart(job, replace(worker, leaves="preempted"), now, out)
        return mend(job, [worker], f"rank {worker.slot} leaves: {event.reason}", now, out)
    if job.stop is not None:
        return f"rank {worker.slot} leaves, as all do: the job is stopping"
    hand_over_slot(job, worker, "preempted", now, out)
    if worker.standing is Standing.MEMBER:
        leaving = replace(job.workers[worker.number], standing=Standing.LEAVING)
        job.workers[worker.number] = leaving
    wish = heed_wishes(job, now, out)
    return f"rank {worker.slot} was asked to go: {event.reason}; {wish or 'it leaves with the next view'}"


def is_done(job: State, event: IsDone, now: float, out: list[Action]) -> str:
    """A member came to the end."""
    worker = job.workers.get(event.member)
    if worker is None or worker.standing not in IN_VIEW:
        return f"member {event.member} is done, and in no view"
    if event.generation and job.view is not None and event.generation != job.view.generation:
        return f"the end of generation {event.generation} is not this view's"
    if worker.number not in job.waiting and job.phase is Phase.PREPARING:
        return f"rank {worker.slot} reported after it was done"
    job.heard[worker.number] = now
    job.workers[worker.number] = replace(
        worker, standing=Standing.DONE, digest=event.digest, stopped=event.stopped, back=True
    )
    said = f"rank {worker.slot} is done"
    if job.phase is Phase.RETURNING:
        return settle_return(job, said, now, out)
    if all_done(job):
        return finish(job, out)
    if job.phase is Phase.PREPARING:
        return go_on_preparing(job, said, now, out)
    return said
