"""Workers come into slots and go out of them: starting, failing, leaving.

Only the books are kept here; what becomes of the view is decided in regroup.py.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.elastic import budgets
from paceline.elastic.deadlines import Finding, phase_of
from paceline.elastic.model import (
    Action,
    Dismiss,
    FailureKind,
    KillWorker,
    NoteFailure,
    NoteVerdict,
    Standing,
    StartWorker,
)
from paceline.elastic.state import IN_VIEW, Slot, State, Worker, be_due


def start_worker(job: State, slot: Slot, now: float, out: list[Action]) -> None:
    """Ask for a worker for this slot."""
    number = job.next_member
    job.next_member += 1
    job.workers[number] = Worker(number, slot.number, slot.place, Standing.STARTING, now)
    job.slots[slot.number] = replace(slot, worker=number, starts_at=None)
    be_due(job, now + job.settings.start_seconds)
    out.append(StartWorker(number, slot.number, slot.place))


def start_due(job: State, now: float, out: list[Action]) -> list[int]:
    """Start what is to be started by now; the slots."""
    if job.stop is not None:
        return []
    started = []
    for slot in list(job.slots.values()):
        if slot.starts_at is None or not slot.usable:
            continue
        if slot.starts_at <= now:
            start_worker(job, slot, now, out)
            started.append(slot.number)
        else:
            be_due(job, slot.starts_at)
    return started


def lose(
    job: State,
    worker: Worker,
    kind: FailureKind,
    reason: str,
    now: float,
    out: list[Action],
    *,
    kill: str = "",
    phase: str = "",
    final: bool = False,
) -> None:
    """A worker has failed: note it, and give its slot the next start or none any more. `kill` is what was
    done, for a worker that may still live; `phase` is where it failed, if that is known for sure."""
    where = phase or phase_of(job, worker)
    out.append(NoteFailure(worker.number, worker.slot, where, kind, reason, bool(phase), final))
    if kill:
        out.append(KillWorker(worker.number, kill))
    if worker.standing in IN_VIEW:
        job.lost = (*job.lost, worker.slot)
        job.failed_at = now if job.failed_at is None else job.failed_at
        # Survivors often tell of a broken collective before the death that broke it is known.
        job.breaks, job.suspicion = 0, {}
    forget(job, worker)
    _vacate(job, worker, kind, now)
    start_due(job, now, out)


def expel(job: State, found: Finding, now: float, out: list[Action]) -> None:
    """A verdict about a worker, and the end of it."""
    done = "it was killed and left out; the others go on with its shards"
    out.append(
        NoteVerdict(found.worker.number, found.worker.slot, found.phase, found.what, found.waiting, done)
    )
    job.hangs += found.kind == "hung"
    lose(job, found.worker, found.kind, found.what, now, out, kill=found.what)


def depart(job: State, worker: Worker, now: float, out: list[Action]) -> None:
    """A worker that was to leave is left out of the view, or was in none: let it go in peace."""
    words = {
        "preempted": "it was asked to go and left at a step boundary",
        "straggler": "it was slow; another one takes its place",
    }
    reason = words.get(worker.leaves, "fewer workers are wanted")
    if worker.leaves in words:
        kind: FailureKind = "preempted" if worker.leaves == "preempted" else "straggler"
        out.append(NoteFailure(worker.number, worker.slot, phase_of(job, worker), kind, reason))
    out.append(Dismiss(worker.number, reason))
    forget(job, worker)
    _vacate(job, worker, "preempted", now)
    start_due(job, now, out)


def hand_over_slot(job: State, worker: Worker, why: str, now: float, out: list[Action]) -> None:
    """The worker stays for a while, its slot is already the next one's."""
    job.workers[worker.number] = replace(worker, leaves=why)
    _vacate(job, worker, "straggler" if why == "straggler" else "preempted", now)
    start_due(job, now, out)


def forget(job: State, worker: Worker) -> None:
    """Take a worker off all books but its slot's."""
    del job.workers[worker.number]
    job.heard.pop(worker.number, None)
    job.beats.pop(worker.number, None)
    job.probed.pop(worker.number, None)
    job.held = job.held - {worker.number}
    job.doubts = frozenset(pair for pair in job.doubts if worker.number not in pair)
    job.reports.pop(worker.number, None)
    job.waiting = job.waiting - {worker.number}


def _vacate(job: State, worker: Worker, kind: FailureKind, now: float) -> None:
    slot = job.slots.get(worker.slot)
    if slot is None or slot.worker != worker.number:
        return
    if not slot.wanted:
        del job.slots[slot.number]
    elif kind == "preempted":
        job.preemptions += 1
        job.slots[slot.number] = budgets.after_preemption(job.settings, slot, job.preemptions, now)
    elif kind == "straggler":
        job.slots[slot.number] = budgets.after_replacement(slot, now)
    elif kind in ("unattended", "restart"):
        job.slots[slot.number] = budgets.after_absence(job.settings, slot, now)
    else:
        # Only committed steps are good work: a worker that keeps views from forming does none.
        worked = job.worked - worker.worked if worker.standing in IN_VIEW else 0.0
        job.slots[slot.number] = budgets.after_failure(job.settings, slot, kind, worked, now)
