"""End a job: all done, stopped on request, or beyond help."""

from __future__ import annotations

from collections import Counter
from math import inf

from paceline.core.wording import counted
from paceline.elastic.machine.actions import EndJob, KillWorker, RecordVerdict, dismiss
from paceline.elastic.machine.hang_detection import phase_of
from paceline.elastic.machine.slots import forget
from paceline.elastic.machine.state import (
    JobPhase,
    JobState,
    Worker,
    WorkerStatus,
    in_view,
    rank_names,
    usable_slots,
)

BEFORE_THE_FIRST_STEP = "all workers failed twice before a first step was committed"


def end(job: JobState, ok: bool, reason: str, failed: int | None = None, stopped: str | None = None) -> str:
    """End the job: nothing is decided after this. Where the job was already failing, the first failure stays
    the reason: what happened while it saved changes nothing."""
    if job.fatal_failure is not None:
        ok, failed, stopped, reason = False, job.fatal_failure[0], None, job.fatal_failure[1]
    job.phase = JobPhase.ENDED
    job.pending = frozenset()
    job.next_tick_at = inf
    job.ended = EndJob(ok, reason, failed, stopped)
    job.actions.append(job.ended)
    return reason


def end_with_verdict(job: JobState, worker: Worker, what: str) -> str:
    """End the job because of this worker: it is at fault, or its loss is one too many."""
    job.actions.append(
        RecordVerdict(worker.number, worker.slot, phase_of(job, worker), what, "", "the job ends")
    )
    return end(job, ok=False, reason=what, failed=worker.number)


def all_done(job: JobState) -> bool:
    """Return whether all members that are left are at the end of the run, and need not go back."""
    left = in_view(job)
    return bool(left) and not job.restore and all(worker.status is WorkerStatus.DONE for worker in left)


def finish(job: JobState) -> str:
    """End the job that all members have finished, after a check that all have the same weights."""
    left = in_view(job)
    count = Counter(worker.digest for worker in left)
    if len(count) > 1:
        odd = min(left, key=lambda worker: (count[worker.digest], worker.slot))
        what = f"the run ended with different weights: rank {odd.slot} does not agree with the others"
        return end_with_verdict(job, odd, what)
    stopped = next((worker.stop_reason for worker in left if worker.stop_reason is not None), None)
    reason = f"{rank_names(left)} came to the end{' with the same weights' if len(left) > 1 else ''}"
    if stopped is not None:
        reason = f"{reason}, stopped: {stopped}"
    return end(job, ok=True, reason=reason, stopped=stopped)


def end_if_hopeless(job: JobState, last: Worker, why: str) -> str | None:
    """End the job if too few slots are left or no worker ever got through a start; return the reason, else
    None."""
    if has_too_few(job) and not waits_for_agents(job):
        return end_with_verdict(job, last, f"{too_few(job)}: {why}")
    if not job.committed and job.slots and all(slot.failures >= 2 for slot in job.slots.values()):
        what = f"{BEFORE_THE_FIRST_STEP}: {why}"
        return end_with_verdict(job, last, what)
    return None


def has_too_few(job: JobState) -> bool:
    """Return whether fewer slots are left than the job needs workers."""
    return len(usable_slots(job)) < max(1, job.settings.min_workers)


def too_few(job: JobState) -> str:
    """Say how many workers are left, and how many are required."""
    least = max(1, job.settings.min_workers)
    required = f"at least {least} {'is' if least == 1 else 'are'} required"
    return f"{counted(len(usable_slots(job)), 'worker', 'is', 'are')} left, {required}"


def waits_for_agents(job: JobState) -> bool:
    """Return whether a job with too few workers waits for agents that bring others, and note since when."""
    if not job.settings.agent_workers:
        return False
    if job.too_few_at is None:
        job.too_few_at = job.now
    deadline = job.too_few_at + job.settings.agents_wait_seconds
    job.tick_by(deadline)
    return job.now < deadline


def end_if_no_agent_came(job: JobState) -> str | None:
    """End the job where it has waited long enough for agents; return the reason, else None."""
    if job.too_few_at is None:
        return None
    if not has_too_few(job):
        job.too_few_at = None
        return None
    if job.stop_reason is not None or waits_for_agents(job):
        return None
    waited = f"no other agent has come in {job.settings.agents_wait_seconds:g} s"
    return end(job, ok=False, reason=f"{too_few(job)}: {waited}")


def dismiss_idle(job: JobState, reason: str) -> None:
    """Send away all workers that are in no view."""
    for worker in list(job.workers.values()):
        if worker.status is WorkerStatus.READY:
            job.actions.append(dismiss(worker.number, reason))
        elif worker.status is WorkerStatus.STARTING:
            job.actions.append(KillWorker(worker.number, reason))
        else:
            continue
        forget(job, worker)
        slot = job.slots.get(worker.slot)
        if slot is not None and slot.worker == worker.number:
            del job.slots[worker.slot]
