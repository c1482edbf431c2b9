"""The numbers that travel with a step's gradients, and what all ranks know after the exchange.

Counters are the whole numbers of a rank, summed in fp32 exactly up to 2^24: samples, requests, and by
parameter the number of ranks whose shards have used it. A sample of the weights follows them
(replica_agreement.py). Metrics are what the objective returns besides the loss, weighted and summed over the
micro-batches of a shard; their names are those of the first batch, on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.train.objective import check_metrics

MOST_METRICS: Final = 16
STEP_COUNTERS: Final = 6
"""Counters before those of the parameters."""


@dataclass(frozen=True)
class StepRequests:
    """Requests and facts that one rank adds to a step besides gradients."""

    stop: bool = False
    part_written: bool = False  # of the checkpoint under way
    part_failed: bool = False
    pause: bool = False  # after this step, so that members can come and go
    sample: int = 0  # of the weights that the step is computed with: replica_agreement.py


@dataclass(frozen=True)
class ReducedStep:
    """Result of a step's exchange, known to all ranks. Loss and metrics may still be on the device."""

    numbers: Tensor  # the loss, then the metrics
    metrics: tuple[str, ...]
    applied: int  # samples
    unused: tuple[str, ...]
    stops: int
    parts_written: int
    parts_failed: int
    pauses: int
    shard_square_norms: Tensor | None
    spoiled: bool = False  # loss or gradient are not finite, and the settings skip such a step


@dataclass(frozen=True)
class ComputedShard:
    """Counters of a shard: samples that were really in it, samples that were left out because they are
    damaged, and which parameters it used."""

    applied: int
    left_out: int
    used: tuple[bool, ...]


def pack_counters(requests: StepRequests, computed: Sequence[ComputedShard], parameters: int) -> list[int]:
    """Return the counters of a rank that has computed these shards of a model with this number of trained
    parameters."""
    used = [any(marks) for marks in zip(*(one.used for one in computed), strict=True)]
    return [
        sum(one.applied for one in computed),
        sum(one.left_out for one in computed),
        requests.stop,
        requests.part_written,
        requests.part_failed,
        requests.pause,
        *(used or [False] * parameters),
    ]


@final
class ShardMetrics:
    """`values` are those of the current shard, in the order of `names`; empty before its first batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: list[str] | None = None  # None: before the first batch of the run
        self.values: list[Tensor] = []

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names or ())

    def start(self) -> None:
        """Begin another shard, without values."""
        self.values = []

    def add(self, metrics: Mapping[str, Any], weight: float) -> None:
        """Add one micro-batch, with its share of the step."""
        if not metrics and not self._names:
            self._names = []
            return
        check_metrics(metrics)
        names = sorted(metrics)
        if self._names is None:
            if len(names) > MOST_METRICS:
                raise UsageError(
                    f"the objective returned {len(names)} metrics, and {MOST_METRICS} travel with a step",
                    remedy="return the most important ones, and compute the others in evaluation",
                )
            self._names = names
        if names != self._names:
            raise UsageError(
                f"the objective returned metrics {names}, and earlier {self._names or 'none'}",
                remedy="return the same metrics for every batch, from the first on",
            )
        values = [
            torch.as_tensor(metrics[name], device=self._device).detach().reshape(()).float() * weight
            for name in names
        ]
        self.values = [a + b for a, b in zip(self.values, values, strict=True)] if self.values else values

    def agree(self, gathered: Sequence[Sequence[Any]]) -> bool:
        """Adopt the names of ranks that had samples and refuse different ones; False: no rank had a sample.
        `gathered`: the names and the number of samples of each rank."""
        if not any(samples for _, samples in gathered):
            return False
        named = {tuple(names) for names, samples in gathered if samples}
        if len(named) > 1:
            raise UsageError(
                f"the objective returned different metrics on different workers: {sorted(named)}",
                remedy="return the same metrics for every batch",
            )
        self._names = list(named.pop())
        return True
