"""What follows from what the world says: the beginning, machines that come and go, people, and time.

Each handler changes the copy of the state it is given, appends actions, and returns the reason. Must not know
what members say.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.core.control.messages import MOST_WORKERS
from paceline.elastic import admission, dealing, link_checks, liveness, stragglers
from paceline.elastic.deadlines import (
    next_due,
    overdue,
    return_deadline,
    return_limit,
    shifted,
    silent,
)
from paceline.elastic.ending import dismiss_idle, end, end_with_verdict
from paceline.elastic.model import (
    HOME,
    Action,
    AgentCame,
    AgentLost,
    Began,
    Dismiss,
    KillWorker,
    NoteVerdict,
    Phase,
    Probed,
    ProbeWorkers,
    ScaleAsked,
    Standing,
    StopAsked,
    Ticked,
    ViewPlan,
)
from paceline.elastic.regroup import (
    cut_short,
    forms_too_long,
    go_on_preparing,
    heed_wishes,
    mend,
    prepare,
    settle_links,
    settle_return,
    tell_stop,
    try_start,
)
from paceline.elastic.seats import expel, forget, hand_over_slot, lose, start_due, start_worker
from paceline.elastic.state import IN_VIEW, Slot, State, Worker, be_due, in_view, ranks, usable_slots


def began(job: State, event: Began, now: float, out: list[Action]) -> str:
    """Start workers, or wait for those that train on without us."""
    if job.workers or job.slots:
        return "the job has begun already"
    job.started_at = job.asked_at = job.moved_at = job.dealt_at = job.worked_at = now
    job.generation = event.generation
    job.next_member = max([event.next_member, 1, *(number + 1 for number in event.members)])
    job.preemptions = event.preemptions
    job.committed = event.committed
    job.shard_seconds = event.shard_seconds
    job.agreed = max(job.agreed, event.agreed)
    job.restore, job.restore_before, job.tainted = event.restore, event.restore_before, event.tainted
    job.dispute, job.disputes, job.trails = event.dispute, event.disputes, dict(event.trails)
    job.lineage = dict(event.lineage)
    job.votes = {(step, kind): dict(cast) for step, kind, cast in event.votes}
    job.stop, job.stop_at, job.failing = event.stop, now, event.failing
    _take_back(job, event, now)
    if not event.slots:
        for number in range(job.settings.workers):
            job.slots.setdefault(number, Slot(number))
    for slot in list(job.slots.values()):
        if slot.usable and slot.worker is None and job.stop is None:
            start_worker(job, slot, now, out)
    if not in_view(job):
        if job.stop is not None:
            return end(job, out, ok=False, reason=f"no worker is left to be stopped: {job.stop}")
        if len(usable_slots(job)) < max(1, job.settings.min_workers):
            return end(job, out, ok=False, reason="too few workers are left: their budgets are spent")
        be_due(job, now + job.settings.start_seconds)
        return try_start(job, f"{len(out)} workers are started", now, out)
    job.phase = Phase.RETURNING
    # The processes of those that do not come are probed several times before that is judged.
    be_due(job, now + liveness.probe_limit(job))
    return f"{len(in_view(job))} members are expected back in generation {job.generation}"


def _take_back(job: State, event: Began, now: float) -> None:
    for number, (place, failures, weight, given_up) in event.slots.items():
        job.slots[number] = Slot(number, place, failures=failures, weight=weight, given_up=given_up)
    starting = set(event.starting)
    for number, (slot, place) in sorted(event.members.items()):
        standing = Standing.STARTING if number in starting else Standing.MEMBER
        worker = Worker(number, slot, place, standing, now, back=number in starting)
        seat = job.slots.get(slot, Slot(slot, place, wanted=not event.slots))
        if seat.worker is not None:
            # Two of one slot: the earlier was about to leave.
            earlier = job.workers[seat.worker]
            job.workers[earlier.number] = replace(earlier, standing=Standing.LEAVING, leaves="preempted")
        if not seat.usable:
            why = "preempted" if seat.wanted else "scaled"
            worker = replace(worker, standing=Standing.LEAVING, leaves=why)
        job.workers[number] = worker
        job.heard[number] = now
        if not seat.given_up:
            job.slots[slot] = replace(seat, worker=number)
        if place != HOME:
            job.agents.setdefault(place, f"machine {place}")
    members = sorted(in_view(job), key=lambda worker: (worker.slot, worker.number))
    if event.view is not None and members:
        job.view = event.view
    elif members:
        # The deal is not known; it stays what the members know until the next view.
        job.view = ViewPlan(
            event.generation, tuple(w.number for w in members), tuple(w.slot for w in members), ()
        )


def agent_came(job: State, event: AgentCame, now: float, out: list[Action]) -> str:
    """Another machine offers workers: slots there."""
    if job.stop is not None or event.place == HOME or event.workers < 1:
        return f"{event.name} is not needed"
    job.agents[event.place] = event.name
    here = sum(slot.place == event.place for slot in job.slots.values())
    added = _new_slots(job, max(0, event.workers - here), event.place)
    for number in added:
        start_worker(job, job.slots[number], now, out)
    return f"{event.name} offers {event.workers} workers: {ranks(added) if added else 'all are known'}"


def agent_lost(job: State, event: AgentLost, now: float, out: list[Action]) -> str:
    """A machine left, and all its workers with it: a preemption."""
    name = job.agents.pop(event.place, None)
    if name is None:
        return f"machine {event.place} is gone, and was not counted on"
    why = f"{name} is gone: {event.reason}"
    for slot in list(job.slots.values()):
        if slot.place == event.place:
            job.slots[slot.number] = replace(slot, wanted=False)
    gone = [worker for worker in job.workers.values() if worker.place == event.place]
    for worker in gone:
        job.preemptions += 1
        lose(job, worker, "preempted", why, now, out)
    for slot in list(job.slots.values()):
        if slot.place == event.place:
            del job.slots[slot.number]
    return mend(job, gone, why, now, out)


def why_not_this_size(job: State, workers: int) -> str | None:
    """Why the job cannot have so many workers; None: it can be asked to."""
    least, most = max(1, job.settings.min_workers), job.settings.most_workers
    if workers < least:
        return f"{workers} workers are fewer than the {least} that are needed at least"
    if most and workers > most:
        return f"{workers} workers are more than the {most} shards of a step: some would have nothing to do"
    if workers > MOST_WORKERS:
        return f"{workers} workers are more than the {MOST_WORKERS} that one job may have"
    if job.stop is not None:
        return "the job is stopping: its size stays"
    return None


def scale_asked(job: State, event: ScaleAsked, now: float, out: list[Action]) -> str:
    """Somebody wants another number of workers."""
    if (why := why_not_this_size(job, event.workers)) is not None:
        return why
    usable = [slot for slot in job.slots.values() if slot.usable]
    if event.workers > len(usable):
        return _grow(job, event.workers - len(usable), now, out)
    # The highest at home go first, then the highest elsewhere.
    order = sorted(usable, key=lambda slot: (slot.place != HOME, -slot.number))
    return _shrink(job, order[: len(usable) - event.workers], now, out)


def _grow(job: State, more: int, now: float, out: list[Action]) -> str:
    grown: list[int] = []
    for slot in sorted(job.slots.values(), key=lambda slot: slot.number):
        if more == len(grown):
            break
        if not slot.wanted:
            # It was on its way out: it stays.
            job.slots[slot.number] = replace(slot, wanted=True, given_up=False)
            worker = job.workers.get(slot.worker) if slot.worker is not None else None
            if worker is not None and worker.leaves == "scaled":
                stays = Standing.MEMBER if worker.standing is Standing.LEAVING else worker.standing
                job.workers[worker.number] = replace(worker, leaves="", standing=stays)
        elif slot.given_up:
            # A person asks: the budget begins anew.
            job.slots[slot.number] = replace(slot, given_up=False, failures=0)
        else:
            continue
        grown.append(slot.number)
    grown += _new_slots(job, more - len(grown), HOME)
    for number in grown:
        if job.slots[number].worker is None:
            start_worker(job, job.slots[number], now, out)
    return f"more workers are wanted: {ranks(grown)} added"


def _shrink(job: State, gone: list[Slot], now: float, out: list[Action]) -> str:
    if not gone:
        return "there are as many workers as are wanted"
    reason = "fewer workers are wanted"
    for slot in gone:
        worker = job.workers.get(slot.worker) if slot.worker is not None else None
        if worker is not None and worker.standing in IN_VIEW:
            job.slots[slot.number] = replace(slot, wanted=False)
            standing = Standing.LEAVING if worker.standing is Standing.MEMBER else worker.standing
            job.workers[worker.number] = replace(worker, standing=standing, leaves="scaled")
            continue
        del job.slots[slot.number]
        if worker is None:
            continue
        starting = worker.standing is Standing.STARTING
        out.append(KillWorker(worker.number, reason) if starting else Dismiss(worker.number, reason))
        forget(job, worker)
    said = f"{reason}: {ranks([slot.number for slot in gone])} to go"
    if job.phase is Phase.STARTING:
        return try_start(job, said, now, out)
    if job.phase is Phase.PREPARING:
        return go_on_preparing(job, said, now, out)
    wish = heed_wishes(job, now, out)
    return f"{said}; {wish}" if wish else said


def _new_slots(job: State, count: int, place: int) -> list[int]:
    added: list[int] = []
    number = 0
    while len(added) < count:
        if number not in job.slots:
            job.slots[number] = Slot(number, place)
            added.append(number)
        number += 1
    return added


def stop_asked(job: State, event: StopAsked, now: float, out: list[Action]) -> str:
    """Somebody wants the job to save and end."""
    if job.stop is not None:
        return f"the job is stopping already: {job.stop}"
    job.stop = event.reason
    job.stop_at = now
    be_due(job, now + job.settings.stop_seconds)
    reason = f"the job is stopping: {event.reason}"
    dismiss_idle(job, reason, out)
    job.slots = {n: replace(slot, starts_at=None) for n, slot in job.slots.items()}
    if not in_view(job):
        return end(job, out, ok=True, reason=f"{reason}; nobody had begun", stopped=event.reason)
    if job.phase is Phase.RUNNING:
        tell_stop(job, out)
        return reason
    if job.phase is Phase.PREPARING:
        return go_on_preparing(job, reason, now, out)
    return f"{reason}, as soon as the view is whole"


def probed(job: State, event: Probed, now: float, out: list[Action]) -> str:
    """The process of a worker that does not beat was looked at."""
    worker = job.workers.get(event.member)
    if worker is None or worker.standing is Standing.STARTING:
        return f"member {event.member} was looked at, and is not expected to beat"
    job.probed[event.member] = (now, event)
    woken = liveness.heed_signs_of_life(job, now)
    if event.stopped:
        said = f"rank {worker.slot} does not beat: its process is stopped"
        return f"{said}; {woken}" if woken else said
    if not liveness.cannot_speak(job, event.member, now):
        return f"rank {worker.slot} does not beat, though it goes on: its connection is cut"
    liveness.with_phase(job, event, now)
    return f"rank {worker.slot} does not beat, but its process runs: its interpreter is held"


def ticked(job: State, event: Ticked, now: float, out: list[Action]) -> str:
    """Time has passed: who is late, what is due."""
    if event.stalled > 0:
        shifted(job, event.stalled)
    if now < job.due:
        return f"{event.stalled:.1f} s are nobody's fault" if event.stalled > 0 else "nothing is due"
    reasons = _look(job, now, out)
    job.due = next_due(job, now)
    return "; ".join(reasons) or "everybody is on time"


def _look(job: State, now: float, out: list[Action]) -> list[str]:
    if job.stop is not None and now - job.stop_at >= job.settings.stop_seconds:
        late = [worker for worker in in_view(job) if worker.standing is not Standing.DONE]
        what = f"{ranks([w.slot for w in late])} did not stop in {job.settings.stop_seconds:g} s"
        return [end_with_verdict(job, late[0], what, out)]
    view = job.view.members if job.view is not None else ()
    beats = [job.beats[number] for number in view if number in job.beats]
    job.pace = dealing.median([beat.step_seconds for beat in beats if beat.step_seconds > 0])
    shard = dealing.median([beat.shard_seconds for beat in beats if beat.shard_seconds > 0])
    if shard > 0 and not 0.8 < job.shard_seconds / shard < 1.25:
        job.shard_seconds = shard  # it is remembered on disk, so it does not follow every breath
    if job.tainted >= 0 and not job.restore and job.furthest and job.furthest[0] > job.tainted:
        job.tainted = job.restore_before = -1
    woken = liveness.heed_signs_of_life(job, now)
    reasons = [woken] if woken else []
    found = silent(job, now) or overdue(job, now)
    for finding in found:
        expel(job, finding, now, out)
    if found:
        what = "; ".join(finding.what for finding in found)
        reasons.append(mend(job, [finding.worker for finding in found], what, now, out))
    strangers = admission.overdue(job, now)
    for worker, why in strangers:
        admission.refuse(job, worker, why, now, out)
    if strangers:
        # Once for all of them: the view that follows has none of those that are still to be refused.
        what = "; ".join(why for _, why in strangers)
        reasons.append(mend(job, [worker for worker, _ in strangers], what, now, out))
    if job.doubts and not link_checks.is_open(job, now):
        reasons.append(settle_links(job, "not all dials were answered", now, out))
    if link_checks.doubt_those_who_wait(job, now, out):
        reasons.append("members that wait for each other dial each other")
    if (hurry := forms_too_long(job, now)) is not None:
        reasons.append(cut_short(job, hurry, now, out))
    if job.phase is Phase.RETURNING and now >= return_deadline(job):
        reasons.append(_give_up_waiting(job, now, out))
    quiet = liveness.to_probe(job, now)
    if quiet and job.phase is not Phase.ENDED:
        out.append(ProbeWorkers(quiet))
        reasons.append(f"{ranks([job.workers[number].slot for number in quiet])} is looked at")
    started = start_due(job, now, out)
    if started:
        reasons.append(f"{ranks(started)} is started again")
    admission.dial(job, now, out)
    if job.phase is Phase.STARTING:
        reasons.append(try_start(job, "workers are awaited", now, out))
    if job.phase is Phase.RUNNING:
        reasons += _improve(job, now, out)
    return reasons


def _improve(job: State, now: float, out: list[Action]) -> list[str]:
    """While all is well: who wants in or out, and who is slow."""
    for slow in stragglers.to_replace(job, now):
        beat = job.beats[slow.number]
        what = f"rank {slow.slot} takes {beat.shard_seconds:.3g} s per shard, far more than the others"
        out.append(
            NoteVerdict(
                slow.number, slow.slot, beat.phase, what, "all wait for the slowest", "another one is started"
            )
        )
        hand_over_slot(job, slow, "straggler", now, out)
        job.workers[slow.number] = replace(job.workers[slow.number], standing=Standing.LEAVING)
        job.dealt_at = now
    wish = heed_wishes(job, now, out)
    if wish:
        return [wish]
    if any(worker.standing is Standing.DONE for worker in in_view(job)):
        return []
    better = stragglers.better_deal(job, now)
    return [prepare(job, False, better, now, out)] if better else []


def _give_up_waiting(job: State, now: float, out: list[Action]) -> str:
    missing = [worker for worker in in_view(job) if not worker.back and now >= return_limit(job, worker, now)]
    what = "it did not come back after the supervisor's restart"
    for worker in missing:
        lose(job, worker, "silent", what, now, out, kill=what)
    if not missing:
        return settle_return(job, "all members are back", now, out)
    names = ranks([worker.slot for worker in missing])
    return mend(job, missing, f"{names} did not come back after the supervisor's restart", now, out)
