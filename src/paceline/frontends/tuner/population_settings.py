"""Settings of population-based training, which a user writes where Optuna need not be installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from paceline.core.errors import ConfigError


@final
@dataclass(frozen=True, kw_only=True)
class PopulationTraining:
    """Population-based training: `DistributedTuner(sampler=PopulationTraining(size=8))`.

    size      members of the population; `tune(num_samples=size * generations)`
    quantile  share of the members that counts as the best, and as the worst
    resample  probability that a parameter is drawn anew where a member goes on from a better one
    factors   else a number is multiplied by one of these
    """

    size: int = 8
    quantile: float = 0.25
    resample: float = 0.25
    factors: tuple[float, ...] = (0.8, 1.2)

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 2:
            raise ConfigError(f"size={self.size!r}", remedy="a population has at least 2 members", key="size")
        if not 0 < self.quantile <= 0.5:
            raise ConfigError(
                f"quantile={self.quantile!r}", remedy="give a share above 0, at most 0.5", key="quantile"
            )
        if not 0 <= self.resample <= 1:
            raise ConfigError(
                f"resample={self.resample!r}", remedy="give a probability from 0 to 1", key="resample"
            )
        if not self.factors or not all(factor > 0 for factor in self.factors):
            raise ConfigError(f"factors={self.factors!r}", remedy="give factors above 0", key="factors")
