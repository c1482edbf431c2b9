"""Who is slow, and whether another deal would help.

    wait, backup   deal evenly (backup: workers compute slow shards twice, which is not decided here)
    rebalance      deal by speed, when that shortens the step noticeably
    replace        whoever is far slower than the others is replaced, a few times; then as rebalance

Must not know how views are made.
"""

from __future__ import annotations

from paceline.elastic import dealing
from paceline.elastic.model import Standing
from paceline.elastic.state import State, Worker

_probe_after = 15.0  # times rebalance_seconds: then a member with no shards is tried again


def speeds(job: State, order: list[Worker], now: float) -> list[float]:
    """By rank: what the deal is made by."""
    weights = [slot.weight if (slot := job.slots.get(worker.slot)) is not None else 1.0 for worker in order]
    if job.settings.stragglers in ("wait", "backup"):
        return weights
    idle = _idle_for_long(job, now)
    seconds = [
        beat.shard_seconds
        if (beat := job.beats.get(worker.number)) is not None and worker.number not in idle
        else 0.0
        for worker in order
    ]
    return dealing.speeds_from(seconds, weights, job.settings.straggler_factor)


def better_deal(job: State, now: float) -> str | None:
    """Why the shards should be dealt again at the next boundary; None: they should not."""
    settings = job.settings
    view = job.view
    if view is None or not view.shards or now - job.dealt_at < settings.rebalance_seconds:
        return None
    order = [job.workers[number] for number in view.members if number in job.workers]
    if len(order) != len(view.members):
        return None
    fast = speeds(job, order, now)
    best = dealing.contiguous(settings.shards, fast)
    if best == view.shards:
        return None
    if not job.tidy:
        return "shards were left where they were held; they are dealt in blocks again"
    if settings.stragglers in ("wait", "backup"):
        return None
    gain = dealing.makespan(view.shards, fast) / max(dealing.makespan(best, fast), 1e-12)
    if gain >= 1 + (settings.straggler_factor - 1) / 2:
        slow = min(zip(fast, order, strict=True), key=lambda pair: pair[0])[1]
        return (
            f"shards are dealt by speed, rank {slow.slot} is the slowest: steps get {gain:.1f} times shorter"
        )
    return None


def to_replace(job: State, now: float) -> list[Worker]:
    """Members that the policy `replace` sends away."""
    settings = job.settings
    if settings.stragglers != "replace" or job.view is None:
        return []
    if now - job.dealt_at < settings.rebalance_seconds:
        return []
    seconds = {
        number: job.beats[number].shard_seconds
        for number in job.view.members
        if number in job.beats and job.beats[number].shard_seconds > 0
    }
    limit = settings.replace_factor * dealing.median(list(seconds.values()))
    return [
        worker
        for number, lasted in seconds.items()
        if len(seconds) > 1
        and lasted >= limit
        and (worker := job.workers.get(number)) is not None
        and worker.standing is Standing.MEMBER
        and (slot := job.slots.get(worker.slot)) is not None
        and slot.worker == number
        and slot.replaced < settings.max_worker_failures
    ]


def _idle_for_long(job: State, now: float) -> frozenset[int]:
    """Members without shards: their speed was measured long ago and may be better now."""
    view = job.view
    if view is None or now - job.dealt_at < _probe_after * job.settings.rebalance_seconds:
        return frozenset()
    return frozenset(number for number, mine in zip(view.members, view.shards, strict=False) if not mine)
