"""From the user's arguments to a job that can be started: checked and resolved.

May take a while (data is generated, a folder is made), so it runs off the event loop.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import nn
from torch.optim import AdamW

from paceline.aggregate.async_sgd.async_job import AsyncJob
from paceline.aggregate.async_sgd.process_entries import AsyncTraining
from paceline.comm import default_group
from paceline.comm.rendezvous.environment import find_launch_info
from paceline.core.errors import ConfigError, UsageError
from paceline.core.wording import with_article
from paceline.data.sources import as_source
from paceline.frontends import overrides
from paceline.frontends.announcements import announce
from paceline.frontends.engine_refusals import refuse_engine
from paceline.frontends.orchestrator import mpi_training, synthetic_task
from paceline.frontends.orchestrator.orchestrator_config import ALGORITHMS, TrainingConfig, check_keys
from paceline.frontends.orchestrator.sync_job import SyncJob
from paceline.frontends.own_words import in_words_of
from paceline.frontends.run_preparation import check_model, check_optimizer, prepare
from paceline.train.loop.process_setup import WorkerProcessTuning
from paceline.train.loop.training_thread import TrainingJob
from paceline.train.loop.worker_jobs import TrainJob
from paceline.train.objective import Objective
from paceline.train.settings import conflicts
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig

# What the settings of the training loop say, and what it is called in TrainingConfig.
_OWN_WORDS = {
    "TrainConfig": "TrainingConfig",
    "global_batch": "the global batch (workers x batch_size)",
    "clip_norm": "gradient_clip",
    'resume="auto"': "resume=True",
    "every_steps": "checkpoint_every_steps",
    "every_epochs": "checkpoint_interval",
}
_DATA_KEYS = ("total_samples", "noise")


@final
@dataclass(frozen=True)
class TrainingArguments:
    """The arguments of `train_distributed`."""

    data: Mapping[str, Any] | None = None
    model: Any = None
    dataset: Any = None
    objective: Callable[..., Any] | None = None
    optimizer: Any = None


@final
@dataclass(frozen=True)
class PreparedTraining:
    """A job that can be started, with its folder made; `shards` is the number of data shards to show.
    `measured`: a supervisor measures each worker."""

    job: TrainJob
    start: Callable[[], TrainingJob]
    shards: int
    measured: bool


def refuse_inside_a_job() -> None:
    """Refuse to start workers inside a worker: every rank of the job would start them."""
    if default_group.current() is not None or find_launch_info(os.environ).world_size > 1:
        raise UsageError(
            "this process is a rank of a job already, and the orchestrator starts workers itself",
            remedy="use the orchestrator in a plain program, or paceline.Trainer here, which joins the job",
        )


def refuse_engine_of_options() -> None:
    """Refuse an engine of the command line or its file; under mpirun the ranks are the nodes."""
    if mpi_training.own_ranks() is None:
        why = "for the orchestrator, whose workers are processes of this machine"
        refuse_engine(overrides.current().engine, why)


def read_data(data: Mapping[str, Any] | None) -> tuple[int | None, float | None]:
    """Return the number of samples and the noise of a synthetic task, checked."""
    if data is None:
        return None, None
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"the settings of the data are {with_article(data)}",
            remedy='give {"total_samples": 100_000}, or your own data as dataset=',
        )
    check_keys(data, _DATA_KEYS, "the settings of the data")
    samples, noise = data.get("total_samples"), data.get("noise")
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
        raise ConfigError(
            f"total_samples={samples!r} is not a whole number from 1",
            remedy="say how many samples to generate",
            key="total_samples",
        )
    plain = isinstance(noise, int | float) and not isinstance(noise, bool)
    if noise is not None and not (plain and 0.0 <= noise < float("inf")):
        raise ConfigError(
            f"noise={noise!r} is not a number from 0",
            remedy="leave it out for 0.1",
            key="noise",
        )
    return samples, noise


def check_arguments(config: TrainingConfig, given: TrainingArguments) -> None:
    """Refuse arguments that do not go together."""
    model, dataset, objective, optimizer = given.model, given.dataset, given.objective, given.optimizer
    samples, noise = read_data(given.data)
    if (model is None) != (dataset is None):
        missing, there = ("dataset", "model") if dataset is None else ("model", "dataset")
        raise UsageError(
            f"there is a {there}= and no {missing}=: what Paceline makes up would not fit it",
            remedy=f"give {missing}= as well, or neither for a synthetic task",
        )
    if model is None:
        if config.model_size is None or samples is None:
            name = '"size"' if config.model_size is None else '"total_samples"'
            raise ConfigError(
                f"{name} is missing, and there is neither a model= nor a dataset=",
                remedy='give {"size": 1_000_000, ...}, {"total_samples": 100_000}, or model= and dataset=',
                key=name.strip('"'),
            )
        if objective is not None:
            raise UsageError(
                "there is an objective= and no model=", remedy="give model= and dataset= as well"
            )
    else:
        check_model(model)
        if objective is None:
            raise UsageError(
                "there is a model= and no objective=",
                remedy="pass a loss module such as nn.MSELoss(), or a function (model, batch) -> loss",
            )
        if config.model_size is not None or noise is not None:
            name = "size" if config.model_size is not None else "noise"
            raise ConfigError(
                f"{name!r} is for what is made up, and there is a model=", remedy="leave it out", key=name
            )
    if optimizer is not None:
        remedy = "pass a function from parameters to an optimizer, or leave it out for AdamW"
        check_optimizer(optimizer, remedy)


def prepare_training(config: TrainingConfig, given: TrainingArguments, workers: int) -> PreparedTraining:
    """Resolve and check the settings, generate the data where none is given, and make the run's folder."""
    job = _unresolved_job(config, given, workers)
    if config.asynchronous and job.train.size is None:
        raise UsageError(
            "ASYNC_SGD assigns ranges of the samples' order, and an iterable dataset has no size",
            remedy="give a dataset with __len__ and __getitem__, or use a synchronous strategy",
        )
    fits = partial(conflicts.check, samples=job.train.size, validation=False)
    with in_words_of(_OWN_WORDS):
        settled, folder = prepare(job.config, None, fits)
    process = WorkerProcessTuning.like_this_one()
    job = dataclasses.replace(job, config=settled, folder=folder.path, process=process)
    if config.asynchronous:
        training = AsyncTraining(job, config.staleness, config.worker_timeout)
        return PreparedTraining(job, lambda: AsyncJob(training).start(), shards=workers, measured=False)
    shards, measured = settled.shards or workers, config.supervised
    return PreparedTraining(job, lambda: SyncJob(job).start(), shards, measured)


def model_of(config: TrainingConfig, given: TrainingArguments) -> Any:
    """Return the user's model, or a function that builds one of the size in the settings."""
    if given.model is not None:
        return given.model
    assert config.model_size is not None
    return partial(synthetic_task.make_model, synthetic_task.shape_for(config.model_size))


def _unresolved_job(config: TrainingConfig, given: TrainingArguments, workers: int) -> TrainJob:
    """Return a job of the user's parts, or of a model and a task of the given sizes."""
    samples, noise = read_data(given.data)
    model, objective = model_of(config, given), given.objective
    if given.model is None:
        assert config.model_size is not None
        assert samples is not None
        shape, objective = synthetic_task.shape_for(config.model_size), nn.MSELoss()
        more = {} if noise is None else {"noise": float(noise)}
        source = as_source(synthetic_task.make_task(shape.inputs, samples, config.seed, **more))
    else:
        assert objective is not None
        Objective(objective)
        source = as_source(given.dataset)
        if samples is not None and source.size != samples:
            raise ConfigError(
                f"total_samples={samples}, and the dataset has {source.size}",
                remedy="leave total_samples out: the dataset says it",
                key="total_samples",
            )
    optimizer = given.optimizer or partial(AdamW, lr=config.learning_rate)
    loop, own = train_config(config, workers), config.own_aggregation
    if mpi_training.own_ranks() is not None:
        loop = overrides.current().apply(loop)  # the rank that leads: the engine, and the run to go on with
    if workers > 1 and not config.asynchronous:
        announce(f"global batch {loop.global_batch} = batch_size {config.batch_size} x workers {workers}")
    return TrainJob(model, objective, optimizer, loop, source, aggregation=own)


def train_config(config: TrainingConfig, workers: int) -> TrainConfig:
    """Translate the settings to those of the training loop: global, and per run."""
    exact = config.sums_exactly
    return TrainConfig(
        workers=workers,
        shards=config.shards,
        global_batch=config.batch_size * workers,
        epochs=config.epochs,
        seed=config.seed,
        mode="exact" if exact else "fast",
        algorithm="auto" if exact else ALGORITHMS.get(config.aggregation_strategy, "auto"),
        clip_norm=config.gradient_clip,
        threads=config.threads,
        progress=False,
        fault_tolerance=config.supervision(),
        checkpoint=CheckpointConfig(
            every_steps=config.checkpoint_every_steps,
            every_epochs=config.checkpoint_interval if config.checkpoint_every_steps is None else None,
        ),
        run_dir=config.run_dir,
        name="orchestrator",
        resume="auto" if config.resume else None,
    )
