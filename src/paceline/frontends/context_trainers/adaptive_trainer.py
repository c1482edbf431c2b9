"""`DistributedAdaptiveTrainer`: a network whose global batch grows while its gradient is mostly noise."""

from __future__ import annotations

from typing import final

from paceline.frontends.context_trainers.neural_net_trainer import DistributedNeuralNetTrainer
from paceline.frontends.own_words import in_words_of
from paceline.train.settings.train_config import DynamicBatch

# What the settings of a growing batch say, and what it is called here.
_OWN_WORDS = {"DynamicBatch": "enable_dynamic_batching", "min": "min_batch", "max": "max_batch"}


@final
class DistributedAdaptiveTrainer(DistributedNeuralNetTrainer):
    """A `DistributedNeuralNetTrainer` whose batch grows; `batch_sizes` has the samples of every full step."""

    def enable_dynamic_batching(
        self, min_batch: int = 32, max_batch: int = 512, variance_threshold: float = 0.01
    ) -> None:
        """Begin with `min_batch` samples a step and double them, up to `max_batch`, while the relative
        variance of the gradient exceeds `variance_threshold`."""
        with in_words_of(_OWN_WORDS):
            self._growth = DynamicBatch(min_batch, max_batch, variance_threshold)
