"""`DistributedNeuralNetTrainer`: a feed-forward network on the ranks of a context.

Translates an epoch to a `session` over the data of all ranks: the same bits for any number of ranks and any
split of the data among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from paceline.comm.context import DistributedContext
from paceline.core.errors import UsageError
from paceline.core.wording import counted
from paceline.data.whole_numbers import whole
from paceline.frontends import fit_drivers
from paceline.frontends.context_trainers import rank_data
from paceline.frontends.context_trainers.distributed_trainer import DistributedTrainer, positive_number
from paceline.frontends.context_trainers.strategies import TrainingStrategy
from paceline.frontends.error_folding import folding_errors
from paceline.frontends.session import session
from paceline.train.settings.keyword_hints import explained
from paceline.train.settings.train_config import CheckpointConfig, DynamicBatch, LossScaling, TrainConfig

# Answers to names of other libraries, and of TrainConfig.
_OTHER_NAMES = {
    "lr": "use learning_rate=...",
    "global_batch": "use batch_size=...",
    "epochs": "the loop is yours: train_epoch trains one epoch",
    "max_steps": "the loop is yours: train_epoch trains one epoch",
    "workers": "leave it out: the context has the ranks",
}


@explained(hints=_OTHER_NAMES)
class DistributedNeuralNetTrainer(DistributedTrainer):
    """A network of linear layers with ReLU between them, trained by Adam.

    Every rank passes its part of the data to `train_epoch`. The parts of all ranks are exchanged and make one
    data set in the order of the ranks, so each rank needs memory for all of it.
    """

    def __init__(
        self,
        context: DistributedContext,
        strategy: TrainingStrategy = TrainingStrategy.DATA_PARALLEL,
        input_dim: int = 1,
        hidden_dims: Sequence[int] = (),
        output_dim: int = 1,
        learning_rate: float = 1e-3,
        batch_size: int = 32,
        seed: int = 0,
    ) -> None:
        super().__init__(context, strategy)
        hidden: object = hidden_dims
        if not isinstance(hidden, Iterable) or isinstance(hidden, str):
            raise UsageError(
                f"hidden_dims={hidden!r}",
                remedy="pass a list of the sizes of the hidden layers: [64, 32]; without one []",
            )
        sizes = [
            whole("input_dim", input_dim, 1),
            *(whole("hidden_dims", size, 1) for size in hidden_dims),
            whole("output_dim", output_dim, 1),
        ]
        self.input_dim, self.output_dim = sizes[0], sizes[-1]
        self.batch_size = whole("batch_size", batch_size, 1)
        self.seed = whole("seed", seed, 0)
        self.epochs_trained = 0
        self.model = fit_drivers.built(lambda: _network(sizes), self.seed)
        rate = positive_number("learning_rate", learning_rate)
        self.optimizer = torch.optim.Adam(self.model.parameters(), rate)
        self.batch_sizes: tuple[int, ...] = ()  # samples of every full step so far, over all ranks together
        self._growth: DynamicBatch | None = None
        self._loss: nn.Module = nn.MSELoss()
        self._local_loss = self._global_loss = math.nan

    @folding_errors
    def train_epoch(self, local_data: Any, local_labels: Any) -> float:
        """Train one pass over the data of all ranks, in a seeded order, and return the mean loss."""
        data = rank_data.as_rows(local_data, self.input_dim, "the data")
        rows, labels, own = rank_data.gather_rows(
            self.context, data, rank_data.as_tensor(local_labels, "the labels")
        )
        # Of the labels of all ranks: a part of them may look like another kind.
        targets, self._loss = rank_data.targets_and_loss(labels, self.output_dim)
        self._global_loss, sizes = self._train(rows, targets)
        self.epochs_trained += 1
        self._local_loss = self._loss_of(rows[own], targets[own])
        # The last step of an epoch takes what is left.
        full = sizes[:-1] if len(sizes) > 1 and sizes[-1] < sizes[-2] else sizes
        self.batch_sizes = (*self.batch_sizes, *full)
        self.notify_callbacks(self.epochs_trained, self._global_loss)
        return self._global_loss

    def get_local_loss(self) -> float:
        """Return the loss of the model on this rank's data after the last epoch; NaN before the first."""
        return self._local_loss

    def get_global_loss(self) -> float:
        """Return the mean loss over all samples in the last epoch, which that epoch has reduced already: no
        rank communicates here, so one rank may ask alone."""
        return self._global_loss

    def get_parameters(self) -> Tensor:
        return parameters_to_vector(self.model.parameters()).detach().clone()

    @folding_errors
    def set_parameters(self, parameters: Any) -> None:
        vector = rank_data.as_tensor(parameters, "the parameters").float().reshape(-1)
        count = sum(parameter.numel() for parameter in self.model.parameters())
        if vector.numel() != count:
            raise UsageError(
                f"{counted(vector.numel(), 'parameter')} for a model of {count}",
                remedy="pass what get_parameters() of a trainer with the same sizes returned",
            )
        with torch.no_grad():
            vector_to_parameters(vector, self.model.parameters())

    @folding_errors
    def predict(self, data: Any) -> Any:
        given = rank_data.as_tensor(data, "the data")
        with torch.no_grad():
            outputs = self.model(rank_data.as_rows(given, self.input_dim, "the data"))
        is_row = given.ndim == 0 or (given.ndim == 1 and self.input_dim > 1)
        return rank_data.like(data, outputs[0] if is_row else outputs)

    # inside

    def _train(self, rows: Tensor, targets: Tensor) -> tuple[float, list[int]]:
        """Return the mean loss of the epoch and the samples of its steps, as the first rank recorded them."""
        config = self._config(len(rows))
        with session(self.model, self.optimizer, config, context=self.context) as run:
            for micro in run.microbatches((rows, targets)):
                run.backward(self._loss(self.model(micro.x), micro.y))
        history = run.history
        recorded = history and [history.epochs[-1].loss, [record.samples for record in history.steps]]
        loss, sizes = self.context.broadcast(recorded)
        return loss, sizes

    def _config(self, samples: int) -> TrainConfig:
        """Return the settings of one epoch; each has an order of its own by its seed."""
        precision: Literal["fp32", "bf16", "fp16"] = "bf16" if self.loss_scale is None else "fp16"
        return TrainConfig(
            workers=self.context.world_size,
            global_batch=min(self.batch_size, samples),
            epochs=1,
            seed=self.seed + self.epochs_trained,
            precision=precision if self.mixed_precision else "fp32",
            loss_scaling=LossScaling() if self.loss_scale is None else LossScaling(initial=self.loss_scale),
            dynamic_batch=self._dynamic_batch(samples),
            checkpoint=CheckpointConfig(enabled=False),
            run_dir=False,
            progress=False,
        )

    def _dynamic_batch(self, samples: int) -> DynamicBatch | None:
        """Return the settings of a batch that grows, for this epoch; None: it does not grow."""
        growth = self._growth
        if growth is None:
            return None
        if samples < growth.min:
            raise UsageError(
                f"min_batch={growth.min} for {counted(samples, 'sample')} on all ranks together",
                remedy=f"enable_dynamic_batching(min_batch={max(2, samples // 4)}, ...)",
            )
        # A batch that has grown stays: the next epoch begins with it.
        begin = max(growth.min, self.batch_sizes[-1] if self.batch_sizes else 0)
        return DynamicBatch(min(begin, growth.max), growth.max, growth.variance_threshold, hold=growth.hold)

    def _loss_of(self, rows: Tensor, targets: Tensor) -> float:
        """Return the loss of some samples as the model is now; NaN where there is none."""
        with torch.no_grad():
            return float(self._loss(self.model(rows), targets)) if len(rows) else math.nan


def _network(sizes: Sequence[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
