"""Grow the global batch when the gradient is mostly noise; a function of global state only.

What is measured. Shard j averages the gradients of its n_j samples to g_j, the whole batch of N = sum n_j
samples averages to g = sum (n_j / N) g_j. Let G be the true gradient and S the trace of the covariance of one
sample's gradient, i.e. the noise of one sample. An average over n independent samples has

    E |g_j|^2 = |G|^2 + S / n_j          E |g|^2 = |G|^2 + S / N

The spread of k shards around their own mean needs only square norms, because the mixed terms fold into |g|^2:

    sum n_j |g_j - g|^2  =  sum n_j |g_j|^2 - N |g|^2
    E of it              =  sum (n_j |G|^2 + S) - (N |G|^2 + S)  =  (k - 1) S

so that both of these are unbiased, for shards of any sizes:

    noise   S     ~  (sum n_j |g_j|^2 - N |g|^2) / (k - 1)
    signal  |G|^2 ~  |g|^2 - S / N

Neither depends on N, so averages over steps stay meaningful while the batch grows. Both are smoothed
exponentially (and divided by the weight seen so far, so that the start is not biased towards zero), and only
then divided: a ratio of averages, since the average of ratios has no mean to speak of.

What is decided. The step's gradient has the relative variance r = (S / N) / |G|^2. When r exceeds
`variance_threshold`, the batch doubles, which halves r; never beyond `max`, never down. A signal at or below
zero means noise only: r is infinite. `hold` steps pass before the first growth and after each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from paceline.core.errors import UsageError
from paceline.core.wording import counted
from paceline.train.settings.keyword_hints import OF_PARTS, explained
from paceline.train.settings.value_checks import at_least, between, conform, positive, refuse


@explained(hints=OF_PARTS)
@final
@dataclass(frozen=True)
class DynamicBatch:
    """Start with `min` samples per step and double up to `max` whenever the gradient is too noisy.

    `variance_threshold` bounds the relative variance of a step's gradient: 1.0 is as much noise as signal.
    """

    min: int
    max: int
    variance_threshold: float = 1.0
    smoothing: float = 0.95
    hold: int = 20

    def __post_init__(self) -> None:
        conform(self)
        at_least(self, "min", 1, "it counts the samples of one step")
        if self.max < self.min:
            message = f"max={self.max} is less than min={self.min}: the batch only grows"
            refuse(self, "max", message, f"set max to {2 * self.min} or more")
        positive(self, "variance_threshold", "the relative variance of a gradient is compared with it")
        between(self, "smoothing", 0.0, 1.0, "it is the weight of the past in each average")
        at_least(self, "hold", 1, "at least one gradient has to be seen")


@final
class GradientNoise:
    """The measured noise and the global batch that follows from it."""

    def __init__(self, settings: DynamicBatch) -> None:
        self._settings = settings
        self.batch = settings.min  # the samples of the next step
        self._noise = self._signal = self._weight = 0.0
        self._held = 0

    @property
    def relative_variance(self) -> float:
        """Variance over squared signal of a gradient of `batch` samples; NaN before anything was seen."""
        return self.noise_scale / self.batch

    @property
    def noise_scale(self) -> float:
        """The batch at which noise and signal are equal, S / |G|^2; NaN before anything was seen."""
        if self._weight == 0.0:
            return math.nan
        noise, signal = self._noise / self._weight, self._signal / self._weight
        if noise <= 0.0:
            return 0.0
        return noise / signal if signal > 0.0 else math.inf

    def observe(
        self, shard_square_norms: Sequence[float], shard_counts: Sequence[int], mean_square_norm: float
    ) -> int:
        """Add one step's gradient to the measurement and return the next global batch.

        `shard_square_norms` are |g_j|^2 of the shards' mean gradients, `shard_counts` their samples,
        `mean_square_norm` is |g|^2. Shards without samples do not count; a step with fewer than two others,
        or with a number that is not finite, tells nothing about noise and changes nothing.
        """
        if len(shard_square_norms) != len(shard_counts):
            raise UsageError(
                f"{counted(len(shard_square_norms), 'square norm', 'was', 'were')} given for "
                f"{counted(len(shard_counts), 'shard')}",
                remedy="give one square norm and one count per shard",
            )
        seen = [
            (norm, count) for norm, count in zip(shard_square_norms, shard_counts, strict=True) if count > 0
        ]
        total = sum(count for _, count in seen)
        finite = math.isfinite(mean_square_norm) and all(math.isfinite(norm) for norm, _ in seen)
        if len(seen) < 2 or not finite:
            return self.batch
        spread = math.fsum(count * norm for norm, count in seen) - total * mean_square_norm
        noise = spread / (len(seen) - 1)
        past = self._settings.smoothing
        self._noise = past * self._noise + (1.0 - past) * noise
        self._signal = past * self._signal + (1.0 - past) * (mean_square_norm - noise / total)
        self._weight = past * self._weight + (1.0 - past)
        self._held += 1
        settings, held = self._settings, self._held >= self._settings.hold
        if held and self.batch < settings.max and self.relative_variance > settings.variance_threshold:
            self.batch, self._held = min(2 * self.batch, settings.max), 0
        return self.batch

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers; floats survive JSON bit for bit."""
        return {
            "batch": self.batch,
            "noise": self._noise,
            "signal": self._signal,
            "weight": self._weight,
            "held": self._held,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; refuse a batch outside of the settings."""
        batch = int(state["batch"])
        if not self._settings.min <= batch <= self._settings.max:
            raise UsageError(
                f"the saved global batch is {batch}, and dynamic_batch allows "
                f"{self._settings.min} to {self._settings.max}",
                remedy="resume with the dynamic_batch settings that the checkpoint was saved with",
            )
        self.batch, self._held = batch, int(state["held"])
        self._noise, self._signal = float(state["noise"]), float(state["signal"])
        self._weight = float(state["weight"])
