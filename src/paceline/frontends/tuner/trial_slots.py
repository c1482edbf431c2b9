"""Slots in which trials run at once, and each slot's share of the devices and the cores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from paceline.core.errors import ConfigError
from paceline.core.wording import counted


@final
@dataclass(frozen=True)
class TrialSlot:
    """One trial's share: variables of its environment, and threads of numeric libraries."""

    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1


def slots_at_once(num_gpus: int, trials_per_gpu: float) -> int:
    """Return how many trials run at once; ConfigError where that is none, or a trial's share is no share."""
    if isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or num_gpus < 1:
        raise ConfigError(
            f"num_gpus={num_gpus!r}",
            remedy="give a whole number from 1 up; without a GPU it counts trials at once on the CPU",
            key="num_gpus",
        )
    if isinstance(trials_per_gpu, bool) or not isinstance(trials_per_gpu, int | float) or trials_per_gpu <= 0:
        raise ConfigError(
            f"trials_per_gpu={trials_per_gpu!r}",
            remedy="give 1 or more, or 0.5 for two GPUs per trial",
            key="trials_per_gpu",
        )
    if trials_per_gpu >= 1:
        if trials_per_gpu != int(trials_per_gpu):
            raise ConfigError(
                f"trials_per_gpu={trials_per_gpu!r}", remedy="give a whole number, or a fraction below 1"
            )
        return num_gpus * int(trials_per_gpu)
    each = gpus_per_trial(trials_per_gpu)
    if num_gpus < each:
        raise ConfigError(
            f"num_gpus={num_gpus}: a trial needs {counted(each, 'GPU')} (trials_per_gpu={trials_per_gpu:g})",
            remedy=f"give num_gpus={each} or more",
        )
    return num_gpus // each


def gpus_per_trial(trials_per_gpu: float) -> int:
    """Return the whole GPUs that a trial has: 1 where trials share one."""
    each = max(1.0, 1.0 / trials_per_gpu)
    if not math.isclose(each, round(each), rel_tol=1e-6):
        raise ConfigError(
            f"trials_per_gpu={trials_per_gpu!r} is no whole number of GPUs per trial",
            remedy="give 0.5 for two GPUs per trial, 0.25 for four",
            key="trials_per_gpu",
        )
    return round(each)


def gpu_share(trials_per_gpu: float) -> float:
    """Return the GPUs that a trial has; a part of one where trials share it."""
    return gpus_per_trial(trials_per_gpu) / max(1.0, trials_per_gpu)


def local_slots(
    num_gpus: int, trials_per_gpu: float, cores: int, gpus: int, visible: str | None
) -> list[TrialSlot]:
    """Return the slots of a machine with `gpus` GPUs; `visible`: CUDA_VISIBLE_DEVICES, where it is set."""
    count = slots_at_once(num_gpus, trials_per_gpu)
    threads = max(1, cores // count)
    if not gpus:
        return [TrialSlot({}, threads)] * count
    names = (
        [name.strip() for name in visible.split(",")][:gpus] if visible else [str(one) for one in range(gpus)]
    )
    each = gpus_per_trial(trials_per_gpu)
    slots = []
    for slot in range(count):
        first = slot * each if each > 1 else int(slot // max(1.0, trials_per_gpu))
        # More trials than GPUs: trials share them.
        own = [names[(first + place) % len(names)] for place in range(min(each, len(names)))]
        slots.append(TrialSlot({"CUDA_VISIBLE_DEVICES": ",".join(own)}, threads))
    return slots


def describe_slots(num_gpus: int, count: int, gpus: int) -> str:
    """Return what `num_gpus` means here, where that needs a word."""
    if not gpus:
        return f"no GPU here: {counted(count, 'trial')} at once on the CPU"
    if num_gpus > gpus:
        return f"num_gpus {num_gpus} on a host with {counted(gpus, 'GPU')}: trials share them"
    return ""
