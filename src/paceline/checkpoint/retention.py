"""Retention of checkpoints: the last n, the best n, one of k, all with a tag. Decides, never deletes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.checkpoint.manifest import CheckpointManifest
from paceline.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Rules of retention. `keep_every=k` keeps the first checkpoint of each k consecutive versions.

    `keep_last=None` keeps all. The best are by `metric`; checkpoints without it, or with NaN, are not among
    them, and of equals the newer one is better.
    """

    keep_last: int | None = 3
    keep_best: int = 0
    keep_every: int | None = None
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ConfigError(
                f"keep_last={self.keep_last}: the newest checkpoint is never deleted",
                remedy="use keep_last=1 or more, or None to keep all",
            )
        if self.keep_best < 0:
            raise ConfigError(f"keep_best={self.keep_best}", remedy="use keep_best=0 or more")
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(f"keep_every={self.keep_every}", remedy="use keep_every=1 or more, or None")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"mode={self.mode!r}", remedy="use mode='min' or mode='max'")


def kept(
    manifests: Sequence[CheckpointManifest], retention: Retention, protected: Collection[int] = ()
) -> frozenset[int]:
    """Return the versions that stay: also `protected` ones, and the newest whose weights are finite."""
    versions = sorted(manifest.version for manifest in manifests)
    if retention.keep_last is None:
        return frozenset(versions)
    stay = set(versions[-retention.keep_last :]) | (set(protected) & set(versions))
    # What went wrong with a run is in all versions after it: the last one before is the one to go back to.
    stay |= set(sorted(manifest.version for manifest in manifests if manifest.finite is not False)[-1:])
    stay |= {manifest.version for manifest in ranked(manifests, retention)[: retention.keep_best]}
    if retention.keep_every is not None:
        firsts = {(version - 1) // retention.keep_every: version for version in reversed(versions)}
        stay.update(firsts.values())
    return frozenset(stay)


def ranked(manifests: Sequence[CheckpointManifest], retention: Retention) -> list[CheckpointManifest]:
    """Return those that have the metric, best first."""
    sign = 1.0 if retention.mode == "min" else -1.0

    def value(manifest: CheckpointManifest) -> float:
        return manifest.info.metrics.get(retention.metric, math.nan)

    measured = [manifest for manifest in manifests if not math.isnan(value(manifest))]
    return sorted(measured, key=lambda manifest: (sign * value(manifest), -manifest.version))
