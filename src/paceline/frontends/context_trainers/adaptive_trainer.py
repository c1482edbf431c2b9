"""`DistributedAdaptiveTrainer`: a network whose global batch grows while its gradient is mostly noise."""

from __future__ import annotations

from typing import final

from paceline.frontends.context_trainers.neural_net_trainer import DistributedNeuralNetTrainer
from paceline.train.settings.train_config import DynamicBatch


@final
class DistributedAdaptiveTrainer(DistributedNeuralNetTrainer):
    """A `DistributedNeuralNetTrainer` whose batch grows; `batch_sizes` has the samples of every full step."""

    def enable_dynamic_batching(
        self, min_batch: int = 32, max_batch: int = 512, variance_threshold: float = 0.01
    ) -> None:
        """Begin with `min_batch` samples a step and double them, up to `max_batch`, while the relative
        variance of the gradient exceeds `variance_threshold`."""
        self._growth = DynamicBatch(min_batch, max_batch, variance_threshold)
