"""The job has failed for good, because of one worker's code: what the others hold is saved before it ends.

A step is a transaction, so that whoever is in the view is at a step boundary as soon as the open step is
abandoned, also the worker whose code raised. They meet once more, in a view that takes no step, save together
and end. Whoever is lost meanwhile is left out; where nobody has a state, or the time is over, the job ends as
it is. Must not know what a state is.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.elastic.deadlines import phase_of
from paceline.elastic.ending import dismiss_idle, end
from paceline.elastic.model import Action, HasRaised, NoteFailure, Phase
from paceline.elastic.regroup import go_on_preparing, mend, prepare, settle_return
from paceline.elastic.seats import lose
from paceline.elastic.state import IN_VIEW, State, Worker, be_due, in_view


def fail(job: State, worker: Worker, why: str, event: HasRaised, now: float, out: list[Action]) -> str:
    """The end, because of this worker; first those who are left save, if there is anything to save."""
    far = event.progress
    worth = job.committed or (far is not None and far[0] > 0)
    if not job.settings.saves_on_failure or not worth or job.restore:
        out.append(_note(job, worker, event))
        return end(job, out, ok=False, reason=why, failed=worker.number)
    job.failing = worker.number, why
    if job.stop is None:
        job.stop, job.stop_at = why, now
    be_due(job, job.stop_at + job.settings.stop_seconds)
    dismiss_idle(job, why, out)
    job.slots = {number: replace(slot, starts_at=None) for number, slot in job.slots.items()}
    return save_without(job, worker, event, now, out)


def save_without(job: State, worker: Worker, event: HasRaised, now: float, out: list[Action]) -> str:
    """All who are in the view and hold a state meet to save it; this worker only if it does."""
    why = f"rank {worker.slot} raised: {event.summary}; those who are left save what they have"
    if not event.holds or worker.standing not in IN_VIEW:
        if worker.number in job.workers:
            lose(job, worker, "raised", event.summary, now, out, final=True)
        else:
            # It was in no view and is dismissed already.
            out.append(_note(job, worker, event))
        if not in_view(job):
            return end(job, out, ok=False, reason=why)
        return mend(job, [worker], why, now, out)
    out.append(_note(job, worker, event))
    job.failed_at = now if job.failed_at is None else job.failed_at
    if job.phase is Phase.RETURNING:
        job.abort = True
        return settle_return(job, why, now, out)
    if job.phase is Phase.PREPARING and job.abort:
        return go_on_preparing(job, why, now, out)
    return prepare(job, True, why, now, out)


def _note(job: State, worker: Worker, event: HasRaised) -> NoteFailure:
    return NoteFailure(worker.number, worker.slot, phase_of(job, worker), "raised", event.summary, final=True)
