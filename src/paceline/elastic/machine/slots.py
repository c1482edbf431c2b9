"""Bookkeeping of slots: start workers in them, record failures and departures.

The next view is decided in view_change.py.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.elastic.machine import budgets
from paceline.elastic.machine.actions import (
    FailureKind,
    KillWorker,
    RecordFailure,
    RecordVerdict,
    StartWorker,
    dismiss,
)
from paceline.elastic.machine.hang_detection import FaultFinding, phase_of
from paceline.elastic.machine.state import IN_VIEW, JobState, Slot, Worker, WorkerStatus


def start_worker(job: JobState, slot: Slot) -> None:
    """Ask for a worker for this slot."""
    number = job.next_member
    job.next_member += 1
    job.workers[number] = Worker(number, slot.number, slot.agent_id, WorkerStatus.STARTING, job.now)
    job.slots[slot.number] = replace(slot, worker=number, start_at=None)
    job.tick_by(job.now + job.settings.start_seconds)
    job.actions.append(StartWorker(number, slot.number, slot.agent_id))


def start_due(job: JobState) -> list[int]:
    """Start the workers that are due; return their slots."""
    if job.stop_reason is not None:
        return []
    started = []
    for slot in list(job.slots.values()):
        if slot.start_at is None or not slot.usable:
            continue
        if slot.start_at <= job.now:
            start_worker(job, slot)
            started.append(slot.number)
        else:
            job.tick_by(slot.start_at)
    return started


def lose(
    job: JobState,
    worker: Worker,
    kind: FailureKind,
    reason: str,
    *,
    kill: str = "",
    phase: str = "",
    final: bool = False,
) -> None:
    """Record the failure of a worker, and schedule the next start of its slot or give the slot up. `kill`
    names the action taken against a worker that may still live; `phase` is where it failed, if that is
    certain."""
    where = phase or phase_of(job, worker)
    job.actions.append(RecordFailure(worker.number, worker.slot, where, kind, reason, bool(phase), final))
    if kill:
        job.actions.append(KillWorker(worker.number, kill))
    if worker.status in IN_VIEW:
        job.lost_slots = (*job.lost_slots, worker.slot)
        job.failed_at = job.now if job.failed_at is None else job.failed_at
        # Survivors often tell of a broken collective before the death that broke it is known.
        job.failed_collectives, job.suspicions = 0, {}
    forget(job, worker)
    _vacate(job, worker, kind)
    start_due(job)


def expel(job: JobState, found: FaultFinding) -> None:
    """Record a verdict about a worker, and kill it."""
    done = "it was killed and left out; the others continue with its shards"
    worker = found.worker
    job.actions.append(
        RecordVerdict(
            worker.number, worker.slot, found.phase, found.what, found.waiting, done, kind=found.kind
        )
    )
    job.hangs += found.kind == "hung"
    lose(job, worker, found.kind, found.what, kill=found.what)


def depart(job: JobState, worker: Worker) -> None:
    """Dismiss a worker that has to leave and is in no view, or not in the next one."""
    words = {
        "preempted": "it was asked to go and left at a step boundary",
        "straggler": "it was slow; another one takes its place",
    }
    reason = words.get(worker.leave_reason, "fewer workers are wanted")
    if worker.leave_reason in words:
        kind: FailureKind = "preempted" if worker.leave_reason == "preempted" else "straggler"
        job.actions.append(RecordFailure(worker.number, worker.slot, phase_of(job, worker), kind, reason))
    job.actions.append(dismiss(worker.number, reason))
    forget(job, worker)
    _vacate(job, worker, "preempted")
    start_due(job)


def reassign_slot(job: JobState, worker: Worker, why: str) -> None:
    """Give the slot of a leaving worker to its successor; the worker stays until the next view."""
    job.workers[worker.number] = replace(worker, leave_reason=why)
    _vacate(job, worker, "straggler" if why == "straggler" else "preempted")
    start_due(job)


def forget(job: JobState, worker: Worker) -> None:
    """Remove a worker from all records except its slot's."""
    del job.workers[worker.number]
    job.last_message_at.pop(worker.number, None)
    job.heartbeats.pop(worker.number, None)
    job.probes.pop(worker.number, None)
    job.stopped_together = job.stopped_together - {worker.number}
    job.pending_dials = frozenset(pair for pair in job.pending_dials if worker.number not in pair)
    job.reports.pop(worker.number, None)
    job.pending = job.pending - {worker.number}


def _vacate(job: JobState, worker: Worker, kind: FailureKind) -> None:
    slot = job.slots.get(worker.slot)
    if slot is None or slot.worker != worker.number:
        return
    if not slot.wanted:
        del job.slots[slot.number]
    elif kind == "preempted":
        job.preemptions += 1
        job.slots[slot.number] = budgets.after_preemption(job.settings, slot, job.preemptions, job.now)
    elif kind == "straggler":
        job.slots[slot.number] = budgets.after_replacement(slot, job.now)
    elif kind in ("unattended", "restart"):
        job.slots[slot.number] = budgets.after_absence(job.settings, slot, job.now)
    else:
        # Only committed steps are good work: a worker that keeps views from forming does none.
        worked = job.productive_seconds - worker.productive_before if worker.status in IN_VIEW else 0.0
        job.slots[slot.number] = budgets.after_failure(job.settings, slot, kind, worked, job.now)
