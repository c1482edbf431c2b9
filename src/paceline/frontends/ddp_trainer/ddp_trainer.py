"""`paceline.PyTorchDDPTrainer`: `Trainer` for users of DistributedDataParallel.

Settings count per GPU here. The door translates them, says once what they mean globally, and has `Trainer`
do the rest: workers are replaced, and the result is the same bits as without a failure.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from paceline.core.errors import UsageError
from paceline.core.wording import with_article
from paceline.frontends.announcements import announce
from paceline.frontends.chosen_parts import objective_for, optimizer_for
from paceline.frontends.ddp_trainer.distributed_config import (
    OTHER_NAMES,
    DistributedConfig,
    gpus_here,
    with_arguments,
)
from paceline.frontends.ddp_trainer.settings_in_words import OWN_WORDS, WORDS_OF_SCALING, meanings
from paceline.frontends.error_folding import folding_errors
from paceline.frontends.own_words import in_words_of
from paceline.frontends.run_preparation import check_model
from paceline.frontends.trainer import Trainer
from paceline.monitor.trackers.tracker_choice import chosen_trackers
from paceline.train.callbacks import Modifier, Observer, as_list
from paceline.train.settings.keyword_hints import explained
from paceline.train.settings.train_config import LossScaling, TrainConfig

if TYPE_CHECKING:
    from torch import nn

    from paceline.train.history import History
    from paceline.train.state.optimizers import OptimizerFactory

_USUAL = DistributedConfig()


@explained(hints=OTHER_NAMES)
@final
class PyTorchDDPTrainer:
    """A model, trained on `num_gpus` GPUs; without a GPU they are CPU workers.

        trainer = paceline.PyTorchDDPTrainer(model, num_gpus=4, batch_size=32, epochs=3)
        history = trainer.fit(train_loader, val_loader)

    batch_size counts the samples of one GPU's forward pass: a step has batch_size x
    gradient_accumulation_steps x num_gpus of them (`effective_batch`). checkpoint_frequency counts epochs.

    optimizer   a function from parameters to an optimizer; None: AdamW with learning_rate
    loss_fn     a loss of (output, target), or an objective (model, batch); None: chosen by the targets
    scheduler   a function from the optimizer to a torch scheduler, stepped once an epoch
    config      a DistributedConfig, or its file; an argument that is not its default wins over it
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        num_gpus: int | None = None,
        batch_size: int = 32,
        epochs: int = 1,
        learning_rate: float = 1e-3,
        mixed_precision: bool = False,
        gradient_accumulation_steps: int = 1,
        gradient_clipping: float | None = None,
        scaler_init_scale: float = 2.0**16,
        scaler_growth_interval: int = 2000,
        checkpoint_frequency: int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        resume_from_checkpoint: bool = False,
        tensorboard_dir: str | os.PathLike[str] | None = None,
        tensorboard: bool = False,
        mlflow_tracking: bool = False,
        log_every_n_steps: int = 50,
        find_unused_parameters: bool = False,
        communication_backend: str | None = None,
        optimizer: OptimizerFactory | None = None,
        loss_fn: Callable[..., Any] | None = None,
        scheduler: Callable[[Any], Any] | None = None,
        config: DistributedConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        callbacks: Sequence[Observer | Modifier] = (),
    ) -> None:
        given = dict(locals())
        check_model(model)
        if not isinstance(resume_from_checkpoint, bool):
            raise UsageError(
                f"resume_from_checkpoint is {with_article(resume_from_checkpoint)}: it is True or False",
                remedy="name the place with checkpoint_dir=..., and set resume_from_checkpoint=True",
            )
        self.model = model
        self.config = with_arguments(config, given)
        self.history: History | None = None
        self._optimizer, self._loss, self._scheduler = optimizer, loss_fn, scheduler
        self._callbacks = as_list(callbacks)
        self._tensorboard_dir = tensorboard_dir
        self._resume = "auto" if resume_from_checkpoint else None
        with in_words_of(WORDS_OF_SCALING):
            self._scaling = LossScaling(initial=scaler_init_scale, growth_interval=scaler_growth_interval)
        self._engine: Trainer | None = None
        self.config.to_train_config()  # refused here, before data is made

    @property
    def effective_batch(self) -> int:
        """The global batch: samples of one step, all GPUs and accumulation steps together."""
        return self.config.effective_batch

    @property
    def best_accuracy(self) -> float | None:
        """The highest accuracy of the last `fit`, on the validation data where there was any."""
        return None if self.history is None else self.history.best_accuracy

    @folding_errors
    def fit(
        self,
        train_loader: Any,
        val_loader: Any = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        mlflow_experiment: str | None = None,
        max_steps: int | None = None,
        profile: str | os.PathLike[str] | None = None,
    ) -> History:
        """Train to the last epoch, or for `max_steps` steps where that is less; return the history.

        A DataLoader is taken as its dataset, also where it carries a DistributedSampler: every sample comes
        once an epoch. With `profile` every worker writes a trace of a few steps to that folder.
        """
        from paceline.data.sources import as_source
        from paceline.frontends.loss_inference import first_targets

        self.config.refuse_lonely_nodes()
        source, rate = as_source(train_loader), self.config.learning_rate
        batch, drops_last = (getattr(train_loader, name, None) for name in ("batch_size", "drop_last"))
        for sentence in meanings(self.config, gpus_here(), batch, drops_last=drops_last is True):
            announce(sentence)
        with in_words_of(OWN_WORDS):
            config = self._train_config(checkpoint_dir, max_steps)
        self._engine = Trainer(
            self.model,
            objective_for(self._loss, lambda: first_targets(source)),
            optimizer=optimizer_for(self._optimizer, rate, rate_is_usual=rate == _USUAL.learning_rate),
            scheduler=self._scheduler,
            config=config,
            callbacks=[
                *self._callbacks,
                *chosen_trackers(
                    tensorboard=self.config.tensorboard,
                    tensorboard_dir=self._tensorboard_dir,
                    mlflow=self.config.mlflow_tracking,
                    mlflow_experiment=mlflow_experiment,
                    every=self.config.log_every_n_steps,
                ),
            ],
        )
        with in_words_of(OWN_WORDS):
            self.history = self._engine.fit(source, val_loader, profile=profile)
        self.model = self._engine.model
        return self.history

    @folding_errors
    def evaluate(self, loader: Any) -> dict[str, float]:
        """Return the means of loss and metrics over the data, after `fit`."""
        return self._after_fit("evaluate").evaluate(loader)

    @folding_errors
    def predict(self, loader: Any) -> Any:
        """Return the model's outputs in the order of the data, after `fit`."""
        return self._after_fit("predict").predict(loader)

    # inside

    def _train_config(
        self, checkpoint_dir: str | os.PathLike[str] | None, max_steps: int | None
    ) -> TrainConfig:
        config = self.config
        if checkpoint_dir is not None:
            config = dataclasses.replace(config, checkpoint_dir=os.fspath(checkpoint_dir))
        return dataclasses.replace(
            config.to_train_config(),
            max_steps=max_steps,
            loss_scaling=self._scaling,
            resume=self._resume,
        )

    def _after_fit(self, what: str) -> Trainer:
        if self._engine is None:
            raise UsageError(f"{what} before fit: there is no trained model yet", remedy="call fit first")
        return self._engine
