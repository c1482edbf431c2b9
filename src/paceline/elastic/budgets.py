"""When a slot gets its next worker, and when it gets none any more.

The first replacement starts at once. Further failures in a row wait backoff * 2**(k-2) seconds, of which a
share is random, drawn from the seed, the slot and the count: the same job waits the same time again. After
`forgive_seconds` of committed steps failures count from nothing. Preemptions have their own budget, for all
slots together. Must not know views.
"""

from __future__ import annotations

import random
from dataclasses import replace

from paceline.elastic.model import HOME, FailureKind, Settings
from paceline.elastic.state import Slot


def wait_before_start(settings: Settings, slot: int, failures: int, total: int) -> float:
    """Seconds until the replacement after so many failures in a row is started."""
    if failures < 2:
        return 0.0
    # The exponent is bounded because 2.0**1024 overflows.
    wait = min(settings.backoff * 2.0 ** min(failures - 2, 64), settings.backoff_most)
    drawn = random.Random(f"{settings.seed}:{slot}:{total}").random()
    return wait * (1.0 - settings.jitter + settings.jitter * drawn)


def after_failure(settings: Settings, slot: Slot, kind: FailureKind, worked: float, now: float) -> Slot:
    """The slot after its worker failed, having taken part in committed steps for so long."""
    forgiven = worked >= settings.forgive_seconds
    failures = 1 if forgiven else slot.failures + 1
    weight = 1.0 if forgiven else slot.weight
    total = slot.total_failures + 1
    given_up = failures > settings.max_worker_failures
    return replace(
        slot,
        worker=None,
        failures=failures,
        total_failures=total,
        weight=weight / 2 if kind == "memory" else weight,
        given_up=given_up,
        starts_at=None if given_up else now + wait_before_start(settings, slot.number, failures, total),
    )


def after_preemption(settings: Settings, slot: Slot, preemptions: int, now: float) -> Slot:
    """The slot after its worker was asked to go; `preemptions` counts this one."""
    if preemptions > settings.max_preemptions:
        return replace(slot, worker=None, starts_at=None, given_up=True)
    # Another machine whose worker is asked to go is likely to leave altogether.
    return replace(slot, worker=None, starts_at=now if slot.place == HOME else now + settings.backoff)


def after_absence(settings: Settings, slot: Slot, now: float) -> Slot:
    """The slot after its worker left because the supervisor stayed away, or started over because another
    member was lost: not the worker's failure."""
    # The agent of another machine has most likely left for the same reason.
    return replace(slot, worker=None, starts_at=now if slot.place == HOME else now + settings.backoff)


def after_replacement(slot: Slot, now: float) -> Slot:
    """The slot after its worker was sent away for being slow: no failure."""
    return replace(slot, worker=None, starts_at=now, replaced=slot.replaced + 1)
