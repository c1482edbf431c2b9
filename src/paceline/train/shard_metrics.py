"""What the objective returns besides the loss: weighted, and summed over the micro-batches of a shard.

The names are those of the first batch, on every rank. Must not know how the numbers travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.train.objective import check_metrics

MOST_METRICS: Final = 16


@final
class ShardMetrics:
    """`values` are those of the current shard, in the order of `names`; empty before its first batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: list[str] | None = None  # before the first batch of the run
        self.values: list[Tensor] = []

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names or ())

    def start(self) -> None:
        """Another shard."""
        self.values = []

    def add(self, metrics: Mapping[str, Any], weight: float) -> None:
        """One micro-batch, which is so much of its step."""
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

    def agree(self, told: Sequence[Sequence[Any]]) -> bool:
        """`told`: the names and the number of samples of each rank. Ranks whose first shards were empty learn
        the names, and different names are found out; False: no rank has had a sample yet."""
        if not any(samples for _, samples in told):
            return False
        named = {tuple(names) for names, samples in told if samples}
        if len(named) > 1:
            raise UsageError(
                f"the objective returned different metrics on different workers: {sorted(named)}",
                remedy="return the same metrics for every batch",
            )
        self._names = list(named.pop())
        return True
