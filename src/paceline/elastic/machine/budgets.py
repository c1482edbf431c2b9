"""Decide when a slot gets its next worker, and when it is given up.

The first replacement starts at once. Further failures in a row wait backoff * 2**(k-2) seconds, of which a
share is random, drawn from the seed, the slot and the count: the same job waits the same time again. After
`forgive_seconds` of committed steps failures count from zero. Preemptions have their own budget, for all
slots together.
"""

from __future__ import annotations

import random
from dataclasses import replace

from paceline.core.backoff import doubled
from paceline.elastic.machine.actions import FailureKind
from paceline.elastic.machine.settings import LOCAL_AGENT, MachineSettings
from paceline.elastic.machine.state import Slot


def wait_before_start(settings: MachineSettings, slot: int, failures: int, total: int) -> float:
    """Return the seconds until the replacement after this number of failures in a row is started."""
    if failures < 2:
        return 0.0
    wait = doubled(settings.backoff, failures - 2, settings.backoff_most)
    drawn = random.Random(f"{settings.seed}:{slot}:{total}").random()
    return wait * (1.0 - settings.jitter + settings.jitter * drawn)


def after_failure(
    settings: MachineSettings, slot: Slot, kind: FailureKind, worked: float, now: float
) -> Slot:
    """Return the slot after its worker failed, having taken part in committed steps for so long."""
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
        start_at=None if given_up else now + wait_before_start(settings, slot.number, failures, total),
    )


def after_preemption(settings: MachineSettings, slot: Slot, preemptions: int, now: float) -> Slot:
    """Return the slot after its worker was asked to go; `preemptions` counts this one."""
    if preemptions > settings.max_preemptions:
        return replace(slot, worker=None, start_at=None, given_up=True)
    return after_absence(settings, slot, now)


def after_absence(settings: MachineSettings, slot: Slot, now: float) -> Slot:
    """Return the slot after its worker left because the supervisor stayed away, or started over because
    another member was lost: not the worker's failure."""
    # Another host whose worker leaves is likely to leave altogether.
    return replace(
        slot, worker=None, start_at=now if slot.agent_id == LOCAL_AGENT else now + settings.backoff
    )


def after_replacement(slot: Slot, now: float) -> Slot:
    """Return the slot after its worker was sent away for being slow: no failure."""
    return replace(slot, worker=None, start_at=now, replacements=slot.replacements + 1)
