"""From one view to the next: ask, gather reports, deal, install; and what a loss means in each phase.

    prepare -> (all reported) -> install -> (all installed) -> run
    mend: after losses, whichever of these has to be done again

Must not know why somebody was lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

from paceline.elastic import admission, audits, dealing, link_checks, private, stragglers
from paceline.elastic.deadlines import forming_since, hang_limit
from paceline.elastic.ending import all_done, end, finish, hopeless
from paceline.elastic.model import (
    Action,
    Dismiss,
    NoteRepair,
    Phase,
    Reported,
    Standing,
    TellPrepare,
    TellStop,
    TellView,
    ViewPlan,
)
from paceline.elastic.seats import depart, forget
from paceline.elastic.state import IN_VIEW, State, Worker, be_due, in_view, nobody_in_view, ranks, ready

_LEAVES = 1e-9
"""A speed: who leaves and still is in a view computes what it holds, and nothing that another can."""


def mend(job: State, lost: list[Worker], why: str, now: float, out: list[Action]) -> str:
    """Workers were lost (and are forgotten already): the next move, by phase."""
    if job.phase is Phase.ENDED or not lost:
        return why
    over = None if job.stop is not None else hopeless(job, lost[-1], why, out)
    if over is not None:
        return over
    if all_done(job):
        return finish(job, out)
    broken = any(worker.standing in IN_VIEW for worker in lost)
    if broken and job.phase not in (Phase.STARTING, Phase.RETURNING):
        judged, expelled, _ = audits.judge_open(job, now, out)
        if job.ended is not None:
            return judged
        if expelled:
            return mend(job, [*lost, *expelled], f"{why}; {judged}", now, out)
    match job.phase:
        case Phase.STARTING:
            return try_start(job, why, now, out)
        case Phase.RETURNING:
            job.abort = job.abort or broken
            return settle_return(job, why, now, out)
        case Phase.PREPARING if job.abort or not broken:
            # Those who reported stay stopped: there is nothing to ask again.
            return go_on_preparing(job, why, now, out)
        case _ if broken:
            return prepare(job, True, why, now, out)
    return why


def prepare(job: State, abort: bool, why: str, now: float, out: list[Action]) -> str:
    """Ask everybody who is in the view, or ready to be, to stop and report."""
    if all_done(job):
        return finish(job, out)
    if nobody_in_view(job):
        return start_over(job, why, now, out)
    asked = []
    newcomers = {worker.number for worker in admission.admitted(job)}
    for worker in job.workers.values():
        fresh = worker.standing in (Standing.STARTING, Standing.READY)
        if fresh and worker.number not in newcomers:
            continue
        asked.append(worker.number)
        if worker.standing is Standing.DONE:
            # It has nothing more to do, but others may need its state.
            job.workers[worker.number] = _undone(worker)
    job.generation += 1
    job.phase = Phase.PREPARING
    job.abort = abort
    job.reason = why
    job.asked_at = now
    job.waiting = frozenset(asked)
    job.reports = {}
    job.gather_at = inf
    be_due(job, now + hang_limit(job))
    out.append(TellPrepare(tuple(sorted(asked)), job.generation, abort, why))
    how = "stop at once" if abort else "stop after the next step"
    return f"{why}: {len(asked)} workers are to {how} for generation {job.generation}"


def _undone(worker: Worker) -> Worker:
    return replace(worker, standing=Standing.LEAVING if worker.leaves else Standing.MEMBER)


def go_on_preparing(job: State, why: str, now: float, out: list[Action]) -> str:
    """Somebody reported, is done, or is gone: perhaps nobody is missing now."""
    if nobody_in_view(job):
        return start_over(job, why, now, out)
    if not job.waiting and link_checks.is_open(job, now):
        return f"{why}; members of different machines dial each other"
    if not job.waiting:
        gone = link_checks.judge(job, now, out)
        return mend(job, gone, why, now, out) if gone else install(job, why, now, out)
    if not job.abort and all(job.workers[n].standing is Standing.DONE for n in job.waiting):
        return prepare(job, True, f"{why}; some are at the end and some have stopped before it", now, out)
    return f"{why}; {len(job.waiting)} have not reported"


def settle_links(job: State, why: str, now: float, out: list[Action]) -> str:
    """A dial between members was answered, or was not in time: perhaps a link is known to be broken now, or
    the next view need not wait for it."""
    if job.phase is Phase.PREPARING:
        return go_on_preparing(job, why, now, out)
    return mend(job, link_checks.judge(job, now, out), why, now, out)


def install(job: State, why: str, now: float, out: list[Action]) -> str:
    """All reported: decide the next view, from members that hold the same."""
    restores = job.restore
    judged, expelled = audits.judge_reports(job, job.reports, now, out)
    if job.ended is not None:
        return judged
    if expelled:
        over = None if job.stop is not None else hopeless(job, expelled[-1], judged, out)
        if over is not None:
            return over
        return go_on_preparing(job, f"{why}; {judged}", now, out)
    told = job.reports
    reporters = [job.workers[number] for number in told]
    if job.narrow:
        return _install_alone(job, reporters, why, now, out)
    stay = [worker for worker in reporters if not worker.leaves]
    knows = any(told[worker.number].progress is not None for worker in stay)
    if not stay or (not knows and any(report.progress is not None for report in told.values())):
        # Those who leave have the only state there is: they hand it over first.
        stay = reporters
    reason = judged if job.restore and (job.dispute or not restores) else job.reason
    if private.missing(job.settings.shards, [told[worker.number] for worker in stay]):
        # As above, for state that is spread over the members: who leaves is dealt no shards this time, and
        # can go when the others have what its shards owe.
        stay = reporters
        lost = private.missing(job.settings.shards, list(told.values()))
        if lost and any(report.progress is not None for report in told.values()):
            job.restore = True
            reason = f"{reason}; {private.words(lost)} is lost, so all go back to a checkpoint"
            stay = [worker for worker in reporters if not worker.leaves] or reporters
    staying = {worker.number for worker in stay}
    for worker in reporters:
        if worker.number not in staying:
            depart(job, worker, now, out)
    return send_view(job, stay, told, reason, now, out)


def send_view(
    job: State, stay: list[Worker], told: Mapping[int, Reported], why: str, now: float, out: list[Action]
) -> str:
    """Deal the shards, say who hands its state to whom, and tell everybody."""
    order = sorted(stay, key=lambda worker: (worker.slot, worker.number))
    progress = [told[worker.number].progress if worker.number in told else None for worker in order]
    known = [far for far in progress if far is not None]
    furthest = max(known, default=None)
    restore = job.restore or furthest is None
    if job.failing is not None and restore:
        return end(job, out, ok=False, reason=f"{why}: no member has a state that could be saved")
    if restore and job.tainted >= 0:
        job.tainted = max([job.tainted, *(far[0] for far in known)])
    speeds = stragglers.speeds(job, order, now)
    if not all(worker.leaves for worker in order):
        speeds = [_LEAVES if worker.leaves else speed for worker, speed in zip(order, speeds, strict=True)]
    held = [
        told[worker.number].held if job.abort and not restore and far == furthest else ()
        for worker, far in zip(order, progress, strict=True)
    ]
    job.tidy = not any(held)
    source = -1 if restore else progress.index(furthest)
    behind = () if restore else tuple(rank for rank, far in enumerate(progress) if far != furthest)
    plan = ViewPlan(
        generation=job.generation,
        members=tuple(worker.number for worker in order),
        slots=tuple(worker.slot for worker in order),
        shards=(
            audits.deal_of_dispute(job, order)
            or (
                dealing.contiguous(job.settings.shards, speeds)
                if job.tidy
                else dealing.around_held(job.settings.shards, held, speeds)
            )
        ),
        source=source if behind else -1,
        behind=behind,
        restore=restore,
        restore_before=job.restore_before if restore else -1,
        disputed=-1 if job.dispute is None else job.dispute.step,
        ends=job.failing[1] if job.failing is not None else "",
    )
    _remember_lineage(job, plan, told)
    for worker in order:
        if worker.standing is Standing.READY:
            job.workers[worker.number] = replace(
                worker, standing=Standing.MEMBER, since=now, worked=job.worked
            )
        elif worker.standing is Standing.DONE:
            job.workers[worker.number] = _undone(worker)
    job.phase = Phase.INSTALLING
    job.view, job.base = plan, None
    job.waiting = frozenset(plan.members)
    job.reports = {}
    job.asked_at = job.dealt_at = now
    job.votes = {} if restore else job.votes
    be_due(job, now + hang_limit(job))
    out.append(TellView(plan, why))
    start = "from the newest good checkpoint" if restore else "from where the furthest is"
    return f"{why}: generation {job.generation} is {ranks(list(plan.slots))}, {start}"


def _remember_lineage(job: State, plan: ViewPlan, told: Mapping[int, Reported]) -> None:
    """Who takes its state over from a member whose state no independent one has confirmed says nothing that
    this member has not said: until it is confirmed, they are one vote."""
    if plan.restore:
        job.lineage = {}
    if plan.source < 0:
        return
    source = plan.members[plan.source]
    root, given = job.lineage.get(source, source), told[source]
    same = [
        number
        for number, report in told.items()
        if report.digest and report.digest == given.digest and report.progress is not None
    ]
    if len({job.lineage.get(number, number) for number in same}) < 2:
        for rank in plan.behind:
            job.lineage[plan.members[rank]] = root


def run(job: State, now: float, out: list[Action]) -> str:
    """Everybody is in the view."""
    job.phase = Phase.RUNNING
    job.moved_at = job.worked_at = now
    job.furthest = None
    job.restore = job.abort = False
    if job.tainted < 0:
        job.restore_before = -1
    if job.failed_at is not None:
        out.append(NoteRepair(job.generation, now - job.failed_at, tuple(sorted(set(job.lost)))))
    job.failed_at = None
    job.lost = ()
    said = f"all members are in generation {job.generation}"
    if job.stop is not None:
        tell_stop(job, out)
        return f"{said}, and are asked to stop: {job.stop}"
    admission.dial(job, now, out)
    wish = heed_wishes(job, now, out)
    return f"{said}; {wish}" if wish else said


def tell_stop(job: State, out: list[Action]) -> None:
    """Ask the members to save and end. Those of a view that ends do so without: a step might raise again."""
    job.phase = Phase.STOPPING
    if job.failing is not None:
        return
    out.append(TellStop(tuple(sorted(worker.number for worker in in_view(job))), job.stop or ""))


def heed_wishes(job: State, now: float, out: list[Action]) -> str | None:
    """While it runs: take in who is ready and let out who leaves, at a step boundary; None: no such wish."""
    if job.phase is not Phase.RUNNING:
        return None
    members = in_view(job)
    if any(worker.standing is Standing.DONE for worker in members):
        return None
    joiners = admission.admitted(job)
    leaving = [worker for worker in members if worker.standing is Standing.LEAVING]
    if leaving and len(leaving) == len(members) and not joiners:
        if _none_to_come(job):
            job.stop = "all workers were asked to go"
            job.stop_at = now
            tell_stop(job, out)
            return job.stop
        return f"{ranks([w.slot for w in leaving])} can leave when somebody has taken over"
    # A slow member stays until another has come, unless it has handed its shards over already.
    urgent = [worker for worker in leaving if worker.leaves != "straggler" or not _dealt(job, worker)]
    if urgent or (leaving and joiners):
        return prepare(job, False, f"{ranks([w.slot for w in leaving])} leaves", now, out)
    if joiners:
        if now < _gathered(job, now):
            be_due(job, job.gather_at)
            return f"{ranks([w.slot for w in joiners])} waits for others that were started too"
        return prepare(job, False, f"{ranks([w.slot for w in joiners])} joins", now, out)
    return None


def _dealt(job: State, worker: Worker) -> bool:
    """Whether it computes shards in this view."""
    view = job.view
    if view is None or not view.shards:
        return True  # after a supervisor's restart the deal may not be known
    return any(
        number == worker.number and mine for number, mine in zip(view.members, view.shards, strict=True)
    )


def _gathered(job: State, now: float) -> float:
    """Until when joiners wait: a moment, where others were started lately and have not come."""
    if job.gather_at == inf:
        come = {worker.number for worker in admission.admitted(job)}
        lately = any(
            worker.standing in (Standing.STARTING, Standing.READY)
            and worker.number not in come
            and now - worker.since < 4 * job.settings.gather_seconds
            for worker in job.workers.values()
        )
        job.gather_at = now + job.settings.gather_seconds if lately else now
    return job.gather_at


def _none_to_come(job: State) -> bool:
    fresh = (Standing.STARTING, Standing.READY)
    starting = any(worker.standing in fresh for worker in job.workers.values())
    return not starting and not any(slot.usable and slot.starts_at is not None for slot in job.slots.values())


def start_over(job: State, why: str, now: float, out: list[Action]) -> str:
    """Nobody is left of the view: wait for workers, then restore."""
    if job.stop is not None:
        return end(job, out, ok=False, reason=f"all workers were lost while the job was stopping: {why}")
    job.phase = Phase.STARTING
    job.view = None
    job.waiting = frozenset()
    job.reports = {}
    job.furthest = None
    job.abort = False
    job.gather_at = inf
    job.started_at = now
    be_due(job, now + job.settings.start_seconds)
    return try_start(job, f"{why}; nobody is left, so workers begin again from a checkpoint", now, out)


def try_start(job: State, why: str, now: float, out: list[Action]) -> str:
    """Send the first view when all came, or when waiting longer helps nobody."""
    here = admission.admitted(job)
    meeting = len(ready(job)) - len(here)
    enough = len(here) >= max(1, job.settings.min_workers)
    soon = now + job.settings.silence_least
    missing = sum(worker.standing is Standing.STARTING for worker in job.workers.values()) + sum(
        slot.starts_at is not None and slot.starts_at <= soon and slot.usable for slot in job.slots.values()
    )
    missing += meeting
    if enough and (missing == 0 or now - job.started_at >= job.settings.start_seconds):
        job.generation += 1
        return send_view(job, here, {}, why, now, out)
    return f"{why}; {len(here)} workers are ready, {missing} are to come"


def forms_too_long(job: State, now: float) -> str | None:
    """Why a view that has not formed is not waited for: the job is to stop, or a member to leave, and whoever
    asked for it kills what has not ended by then. None: there is no hurry."""
    if job.phase is not Phase.INSTALLING or now - forming_since(job) < job.settings.cut_short_seconds:
        return None
    late = f"generation {job.generation} has not formed in {job.settings.cut_short_seconds:g} s"
    if job.stop is not None:
        return f"{late}, and the job is stopping"
    view = job.view
    source = view.members[view.source] if view is not None and view.source >= 0 else None
    leaving = [worker for worker in in_view(job) if worker.leaves == "preempted"]
    if not leaving or any(worker.number == source for worker in leaving):
        return None  # who has the only state hands it over first
    if len(leaving) == len(in_view(job)):
        return None
    return f"{late}, and {ranks([worker.slot for worker in leaving])} leaves"


def cut_short(job: State, why: str, now: float, out: list[Action]) -> str:
    """Form another view instead: without those who leave; while the job stops, of one member, which needs
    nobody to save what all of them have."""
    if job.stop is None:
        return prepare(job, True, why, now, out)
    if job.view is not None and job.view.restore:
        # Nobody has anything that is not in the checkpoint.
        return end(job, out, ok=True, reason=f"{why}; nobody has gone on", stopped=job.stop)
    job.narrow = True
    return prepare(job, True, f"{why}: one member saves alone", now, out)


def _install_alone(job: State, reporters: list[Worker], why: str, now: float, out: list[Action]) -> str:
    told = job.reports
    known = [worker for worker in reporters if told[worker.number].progress is not None]
    best = max(known, key=lambda worker: (told[worker.number].progress, -worker.slot), default=None)
    if best is None or private.missing(job.settings.shards, [told[best.number]]) or job.restore:
        reason = f"{why}; what the members have is in no state that one of them could save"
        return end(job, out, ok=True, reason=reason, stopped=job.stop)
    for worker in reporters:
        if worker is not best:
            out.append(Dismiss(worker.number, f"the job is stopping: rank {best.slot} saves for all"))
            forget(job, worker)
            job.slots.pop(worker.slot, None)
    return send_view(job, [best], told, job.reason, now, out)


def settle_return(job: State, why: str, now: float, out: list[Action]) -> str:
    """After the supervisor's restart: go on in the old view if all are in it, else regroup."""
    members = in_view(job)
    missing = [worker for worker in members if not worker.back]
    if missing:
        return f"{why}; {len(missing)} members have not come back"
    if all_done(job):
        return finish(job, out)
    if not members:
        return start_over(job, why, now, out)
    here = {worker.number for worker in members}
    view = job.view
    whole = view is not None and view.generation == job.generation and here == set(view.members)
    if job.abort or job.restore or not whole:
        return prepare(job, True, f"{why}; the view is not whole after the supervisor's restart", now, out)
    return f"{why}; {run(job, now, out)}"
