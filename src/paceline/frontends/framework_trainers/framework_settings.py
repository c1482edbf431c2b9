"""Settings of a run on another framework: DistributedConfig, arguments, and what `paceline train` sets.

The number of workers is the framework's launcher's, and so is never a setting here. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from paceline.core.errors import ConfigError, UnavailableError, UsageError
from paceline.core.wording import counted, with_article
from paceline.frontends import overrides
from paceline.frontends.ddp_trainer.distributed_config import DistributedConfig, loaded, under_overrides
from paceline.frontends.engine_refusals import refuse_engine
from paceline.frontends.framework_trainers.framework_overrides import overridden
from paceline.monitor.trackers.tracker import Tracker
from paceline.monitor.trackers.tracker_choice import chosen_trackers
from paceline.train.callbacks import Observer
from paceline.train.settings.train_config import TrainConfig

GivenConfig = DistributedConfig | Mapping[str, Any] | str | os.PathLike[str] | None


@final
class FrameworkSettings:
    """Settings of a trainer on another framework; `backend` is its word in DistributedConfig."""

    def __init__(
        self,
        given: GivenConfig,
        backend: str,
        *,
        checkpoint_dir: str | os.PathLike[str] | None,
        resume: bool,
    ) -> None:
        if not isinstance(resume, bool):
            raise UsageError(
                f"resume_from_checkpoint is {with_article(resume)}: it is True or False",
                remedy="name the place with checkpoint_dir=..., and set resume_from_checkpoint=True",
            )
        refuse_engine(overrides.current().engine, f"for a trainer on {backend}, which has its own workers")
        config = under_overrides(loaded(given))
        if config.backend not in (backend, "pytorch-ddp"):  # the second is what a config has that names none
            raise ConfigError(
                f'backend="{config.backend}" in the settings of a trainer on {backend}',
                remedy=f'set backend="{backend}", or use paceline.make_trainer, which takes this',
                key="backend",
            )
        place = config.checkpoint_dir if checkpoint_dir is None else os.fspath(checkpoint_dir)
        self.config = dataclasses.replace(config, backend="pytorch-ddp", checkpoint_dir=place)
        self.backend, self._resume = backend, resume
        self._otherwise: Mapping[str, str] = {}

    def train_config(self, workers: int, batch: int, epochs: int | None) -> TrainConfig:
        """Return the settings of a run of `workers` workers with `batch` samples each in a step."""
        chosen = overrides.current().workers
        if chosen is not None and chosen != workers:
            raise ConfigError(
                f"workers={chosen}, and {self.backend} has {counted(workers, 'worker')}: its own launcher "
                "decides how many there are",
                remedy="leave --workers and --num-gpus out",
                key="workers",
            )
        if epochs is not None and (not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1):
            raise ConfigError(
                f"epochs={epochs!r}: it counts passes over the data", remedy="give 1 or more", key="epochs"
            )
        counted_here = dataclasses.replace(
            self.config,
            num_gpus=workers,
            num_nodes=1,
            gpus_per_node=None,
            batch_size=max(1, batch),
            epochs=self.config.epochs if epochs is None else epochs,
        )
        made = dataclasses.replace(
            counted_here.to_train_config(),
            mode="fast",  # sums are the framework's, and so is their order
            shards=None,
            workers=workers,
            name=self.backend,
            resume="auto" if self._resume else None,
        )
        return overridden(made, self.backend, self._otherwise)

    def trackers(self) -> list[Tracker]:
        every = _set_by_command(TrainConfig(log_every=self.config.log_every_n_steps)).log_every
        return settings_trackers(dataclasses.replace(self.config, log_every_n_steps=every))

    def refuse(self, names: Mapping[str, str]) -> None:
        """Refuse settings that this framework has in another way: name -> what to do instead."""
        usual, self._otherwise = DistributedConfig(), names
        for name, remedy in names.items():
            value = getattr(self.config, name)
            if value != getattr(usual, name):
                raise ConfigError(
                    f"{name}={value!r} has no meaning under {self.backend}", remedy=remedy, key=name
                )


def require_package(module: str, remedy: str) -> Any:
    """Return a framework's module; UnavailableError with what to install where it is not here."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise UnavailableError(f"the package {package} is not installed", remedy=remedy)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(
            f"the package {package} is installed and cannot be imported: {error}", remedy=remedy
        ) from error


@contextmanager
def progress_shown(wanted: bool) -> Iterator[tuple[Observer, ...]]:
    """Show progress on this process's terminal, where that is wanted: the observers of it."""
    if not wanted or not _set_by_command(TrainConfig()).progress:
        yield ()
        return
    from paceline.monitor.progress_factory import progress_display

    with progress_display() as display:
        yield (display,)


def _set_by_command(config: TrainConfig) -> TrainConfig:
    """Return the settings with what `paceline train` sets in their place."""
    return overrides.current().apply(config)


def settings_trackers(config: DistributedConfig) -> list[Tracker]:
    """Return the trackers that the settings ask for by a word."""
    return chosen_trackers(
        tensorboard=config.tensorboard,
        tensorboard_dir=None,
        mlflow=config.mlflow_tracking,
        mlflow_experiment=None,
        every=config.log_every_n_steps,
    )
