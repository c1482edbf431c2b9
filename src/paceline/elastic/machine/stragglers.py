"""The assignment of a view's shards: which members are slow, and whether another assignment would help.

wait, backup   assign evenly (backup: workers compute slow shards twice, which is not decided here)
rebalance      assign by speed, when that shortens the step noticeably
replace        replace a member that is far slower than the others, a few times; then as rebalance
"""

from __future__ import annotations

from paceline.elastic.machine import replica_divergence, shard_assignment
from paceline.elastic.machine.shard_assignment import ShardAssignment
from paceline.elastic.machine.state import JobState, Worker, WorkerStatus

_probe_after = 15.0  # times rebalance_seconds: then a member with no shards is tried again

_LEAVING_SPEED = 1e-9
"""A member that leaves and is in the view once more computes what it holds, and nothing that others can."""


def speeds(job: JobState, order: list[Worker]) -> list[float]:
    """Return the speed of each rank for the assignment of shards."""
    weights = [slot.weight if (slot := job.slots.get(worker.slot)) is not None else 1.0 for worker in order]
    if job.settings.stragglers in ("wait", "backup"):
        return weights
    idle = _idle_for_long(job)
    seconds = [
        heartbeat.shard_seconds
        if (heartbeat := job.heartbeats.get(worker.number)) is not None and worker.number not in idle
        else 0.0
        for worker in order
    ]
    return shard_assignment.speeds_from(seconds, weights, job.settings.straggler_factor)


def assign(job: JobState, order: list[Worker], held: list[tuple[int, ...]]) -> ShardAssignment:
    """Assign held shards to their holders and the rest by speed; as before where a step is disputed."""
    fast = speeds(job, order)
    if not all(worker.leave_reason for worker in order):
        fast = [
            _LEAVING_SPEED if worker.leave_reason else speed
            for worker, speed in zip(order, fast, strict=True)
        ]
    job.is_contiguous = not any(held)
    disputed = replica_divergence.assignment_of_dispute(job, order)
    if disputed is not None:
        return disputed
    if job.is_contiguous:
        return shard_assignment.contiguous(job.settings.shards, fast)
    return shard_assignment.around_held(job.settings.shards, held, fast)


def better_assignment(job: JobState) -> str | None:
    """Return why the shards should be assigned again at the next step boundary; None: they should not."""
    settings = job.settings
    view = job.view
    if view is None or not view.shards or job.now - job.assigned_at < settings.rebalance_seconds:
        return None
    order = [job.workers[number] for number in view.members if number in job.workers]
    if len(order) != len(view.members):
        return None
    fast = speeds(job, order)
    best = shard_assignment.contiguous(settings.shards, fast)
    if best == view.shards:
        return None
    if not job.is_contiguous:
        return "shards were left where they were held; they are assigned in blocks again"
    if settings.stragglers in ("wait", "backup"):
        return None
    gain = shard_assignment.makespan(view.shards, fast) / max(shard_assignment.makespan(best, fast), 1e-12)
    if gain >= 1 + (settings.straggler_factor - 1) / 2:
        slow = min(zip(fast, order, strict=True), key=lambda pair: pair[0])[1]
        shorter = f"steps get {gain:.1f} times shorter"
        return f"shards are assigned by speed, rank {slow.slot} is the slowest: {shorter}"
    return None


def to_replace(job: JobState) -> list[Worker]:
    """Return the members that the policy `replace` replaces."""
    settings = job.settings
    recent = job.now - job.assigned_at < settings.rebalance_seconds
    if settings.stragglers != "replace" or job.view is None or recent:
        return []
    seconds = {
        number: job.heartbeats[number].shard_seconds
        for number in job.view.members
        if number in job.heartbeats and job.heartbeats[number].shard_seconds > 0
    }
    limit = settings.replace_factor * shard_assignment.median(list(seconds.values()))
    return [
        worker
        for number, lasted in seconds.items()
        if len(seconds) > 1
        and lasted >= limit
        and (worker := job.workers.get(number)) is not None
        and worker.status is WorkerStatus.MEMBER
        and (slot := job.slots.get(worker.slot)) is not None
        and slot.worker == number
        and slot.replacements < settings.max_worker_failures
    ]


def _idle_for_long(job: JobState) -> frozenset[int]:
    """Return members without shards: their speed was measured long ago and may be better now."""
    view = job.view
    if view is None or job.now - job.assigned_at < _probe_after * job.settings.rebalance_seconds:
        return frozenset()
    return frozenset(number for number, mine in zip(view.members, view.shards, strict=False) if not mine)
