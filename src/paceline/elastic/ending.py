"""How a job ends: all done, stopped on request, or beyond help.

Must not know how views are made.
"""

from __future__ import annotations

from math import inf

from paceline.elastic.deadlines import phase_of
from paceline.elastic.model import Action, Dismiss, EndJob, KillWorker, NoteVerdict, Phase, Standing
from paceline.elastic.state import IN_VIEW, State, Worker, in_view, ranks, usable_slots

BEFORE_THE_FIRST_STEP = "all workers failed twice before anybody told of a first step"


def end(
    job: State,
    out: list[Action],
    ok: bool,
    reason: str,
    failed: int | None = None,
    stopped: str | None = None,
) -> str:
    """Nothing is decided after this. Where the job was failing, what happened while it saved changes nothing
    about why it ends."""
    if job.failing is not None:
        ok, failed, stopped, reason = False, job.failing[0], None, job.failing[1]
    job.phase = Phase.ENDED
    job.waiting = frozenset()
    job.due = inf
    job.ended = EndJob(ok, reason, failed, stopped)
    out.append(job.ended)
    return reason


def end_with_verdict(job: State, worker: Worker, what: str, out: list[Action]) -> str:
    """The job ends because of this worker, or with it as the last straw."""
    out.append(
        NoteVerdict(worker.number, worker.slot, phase_of(job, worker), what, "nothing", "the job ends")
    )
    return end(job, out, ok=False, reason=what, failed=worker.number)


def all_done(job: State) -> bool:
    """Whether whoever is left of the view came to the end of the run, and need not go back."""
    if job.restore:
        return False
    done = False
    for worker in job.workers.values():
        if worker.standing is Standing.DONE:
            done = True
        elif worker.standing in IN_VIEW:
            return False  # mostly the first one
    return done


def finish(job: State, out: list[Action]) -> str:
    """All are done: they must have come to the same weights."""
    left = in_view(job)
    digests = {worker.digest for worker in left}
    if len(digests) > 1:
        odd = _odd_one(left)
        what = f"the run ended with different weights: rank {odd.slot} does not agree with the others"
        return end_with_verdict(job, odd, what, out)
    stopped = next((worker.stopped for worker in left if worker.stopped is not None), None)
    count = len(left)
    reason = f"{ranks([w.slot for w in left])} came to the end{' with the same weights' if count > 1 else ''}"
    if stopped is not None:
        reason = f"{reason}, stopped: {stopped}"
    return end(job, out, ok=True, reason=reason, stopped=stopped)


def hopeless(job: State, last: Worker, why: str, out: list[Action]) -> str | None:
    """The end, if too few slots are left or nothing ever worked; else None."""
    left = len(usable_slots(job))
    if left < job.settings.min_workers or left == 0:
        what = f"{left} workers are left of at least {max(1, job.settings.min_workers)}: {why}"
        return end_with_verdict(job, last, what, out)
    if not job.committed and job.slots and all(slot.failures >= 2 for slot in job.slots.values()):
        what = f"{BEFORE_THE_FIRST_STEP}: {why}"
        return end_with_verdict(job, last, what, out)
    return None


def dismiss_idle(job: State, reason: str, out: list[Action]) -> None:
    """Send away whoever is in no view."""
    for worker in list(job.workers.values()):
        if worker.standing is Standing.READY:
            out.append(Dismiss(worker.number, reason))
        elif worker.standing is Standing.STARTING:
            out.append(KillWorker(worker.number, reason))
        else:
            continue
        del job.workers[worker.number]
        job.heard.pop(worker.number, None)
        job.beats.pop(worker.number, None)
        job.reports.pop(worker.number, None)
        job.waiting = job.waiting - {worker.number}
        slot = job.slots.get(worker.slot)
        if slot is not None and slot.worker == worker.number:
            del job.slots[worker.slot]


def _odd_one(left: list[Worker]) -> Worker:
    """A worker whose digest the fewest others have."""
    count: dict[str, int] = {}
    for worker in left:
        count[worker.digest] = count.get(worker.digest, 0) + 1
    return min(left, key=lambda worker: (count[worker.digest], worker.slot))
