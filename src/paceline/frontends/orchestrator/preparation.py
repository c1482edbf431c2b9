"""From what the user gave to a job that can be started: checked, with nothing left open.

May take a while (data is generated, a folder is made), so it is done off the event loop. Must not know
asyncio, nor how a job goes on.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from paceline.comm import default_group
from paceline.comm.environment import find_place
from paceline.core.errors import ConfigError, UsageError
from paceline.core.words import a_kind
from paceline.data.sources import Source, as_source
from paceline.frontends.joining import prepare
from paceline.frontends.orchestrator import synthetic
from paceline.frontends.orchestrator.async_entry import AsyncWork
from paceline.frontends.orchestrator.async_job import AsyncJob
from paceline.frontends.orchestrator.config import ALGORITHMS, AggregationStrategy, TrainingConfig, check_keys
from paceline.frontends.orchestrator.job import Job, SyncJob
from paceline.train.checks import check
from paceline.train.config import CheckpointConfig, FaultTolerance, TrainConfig
from paceline.train.objective import Objective
from paceline.train.own_process import OwnProcess
from paceline.train.worker import TrainJob

_NAME = "orchestrator"
_DATA_KEYS = ("total_samples", "noise")


@final
@dataclass(frozen=True)
class Given:
    """What to train, on what, and how well it is doing."""

    model: nn.Module | Callable[[], nn.Module]
    objective: Callable[..., Any]
    optimizer: Any
    source: Source


@final
@dataclass(frozen=True)
class Prepared:
    """A job to be, with its folder made; `shards` are those that can be looked at. `measured`: a supervisor
    knows of each worker when it was heard and how fast it is."""

    config: TrainConfig
    given: Given
    shards: int
    start: Callable[[], Job]
    measured: bool = False


def refuse_inside_a_job() -> None:
    """The orchestrator starts workers; a worker that did so would start them once for each."""
    if default_group.current() is not None or find_place(os.environ).world_size > 1:
        raise UsageError(
            "this process is a rank of a job already, and the orchestrator starts workers of its own",
            remedy="use the orchestrator in a plain program, or paceline.Trainer here, which joins the job",
        )


def read_data(data: Mapping[str, Any] | None) -> tuple[int | None, float | None]:
    """Number of samples and noise of a synthetic task, checked."""
    if data is None:
        return None, None
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"the settings of the data are {a_kind(data)}",
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


def check_given(
    config: TrainingConfig,
    data: Mapping[str, Any] | None,
    model: object,
    dataset: object,
    objective: object,
    optimizer: object,
) -> None:
    """Refuses, at once, what cannot go together."""
    samples, noise = read_data(data)
    if (model is None) != (dataset is None):
        missing, there = ("dataset", "model") if dataset is None else ("model", "dataset")
        raise UsageError(
            f"there is a {there}= and no {missing}=: what Paceline makes up would not fit to it",
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
        if not callable(model):
            raise UsageError(
                f"the model is {a_kind(model)}",
                remedy="pass a torch.nn.Module or a function that builds one",
            )
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
    several = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    built = bool(several) and all(hasattr(one, "param_groups") for one in several)
    if optimizer is not None and not callable(optimizer) and not built:
        raise UsageError(
            f"the optimizer is {optimizer!r:.60}",
            remedy="pass a function from parameters to an optimizer, or leave it out for AdamW",
        )


def choose(
    config: TrainingConfig,
    data: Mapping[str, Any] | None,
    model: Any,
    dataset: Any,
    objective: Any,
    optimizer: Any,
) -> Given:
    """The user's parts, or a model and a task of the sizes that were asked for."""
    samples, noise = read_data(data)
    optimizer = optimizer or synthetic.AdamWBuilder(config.learning_rate)
    if model is None:
        assert config.model_size is not None
        assert samples is not None
        shape = synthetic.shape_for(config.model_size)
        more = {} if noise is None else {"noise": float(noise)}
        task = synthetic.make_task(shape.inputs, samples, config.seed, **more)
        return Given(synthetic.ModelBuilder(shape), nn.MSELoss(), optimizer, as_source(task))
    Objective(objective)
    source = as_source(dataset)
    if samples is not None and source.size != samples:
        raise ConfigError(
            f"total_samples={samples}, and the dataset has {source.size}",
            remedy="leave total_samples out: the dataset says it",
            key="total_samples",
        )
    return Given(model, objective, optimizer, source)


def make_ready(config: TrainingConfig, given: Given, workers: int) -> Prepared:
    """Settings resolved and checked, the run's folder made."""
    if config.asynchronous and given.source.size is None:
        raise UsageError(
            "ASYNC_SGD deals ranges of the samples' order, and an iterable dataset has no size",
            remedy="give a dataset with __len__ and __getitem__, or use a synchronous strategy",
        )
    settled, folder = prepare(
        train_config(config, workers),
        None,
        lambda made: check(made, samples=given.source.size, validation=False),
    )
    process = OwnProcess.like_this_one()
    if config.asynchronous:
        work = AsyncWork(
            model=given.model,
            objective=given.objective,
            optimizer=given.optimizer,
            config=settled,
            batch=config.batch_size,
            train=given.source,
            folder=folder.path,
            staleness=config.staleness,
            process=process,
            patience=config.worker_timeout,
        )

        def start_asynchronous() -> Job:
            job = AsyncJob(work, replace_lost=config.fault_tolerance, budget=config.max_worker_failures)
            return job.start()

        return Prepared(settled, given, workers, start_asynchronous)
    job = TrainJob(
        model=given.model,
        objective=given.objective,
        optimizer=given.optimizer,
        config=settled,
        train=given.source,
        folder=folder.path,
        process=process,
    )
    own = config.own_aggregation
    if own is not None:
        job = dataclasses.replace(job, aggregation=own)
    shards, measured = settled.shards or workers, settled.fault_tolerance.enabled
    return Prepared(settled, given, shards, lambda: SyncJob(job).start(), measured)


def train_config(config: TrainingConfig, workers: int) -> TrainConfig:
    """The same settings as the training loop has them: global, and per run."""
    own = isinstance(config.aggregation_strategy, str)
    exact = config.exact and not config.asynchronous and not own
    more: dict[str, Any] = {}
    if not exact and isinstance(config.aggregation_strategy, AggregationStrategy) and not config.asynchronous:
        more["algorithm"] = ALGORITHMS[config.aggregation_strategy]
    return TrainConfig(
        workers=workers,
        shards=config.shards,
        global_batch=config.batch_size * workers,
        epochs=config.epochs,
        seed=config.seed,
        mode="exact" if exact else "fast",
        clip_norm=config.gradient_clip,
        threads=config.threads,
        progress=False,
        fault_tolerance=FaultTolerance(
            enabled=config.fault_tolerance, max_worker_failures=config.max_worker_failures
        ),
        checkpoint=CheckpointConfig(every_steps=config.checkpoint_interval, every_epochs=None),
        run_dir=config.run_dir,
        name=_NAME,
        resume="auto" if config.resume else None,
        **more,
    )
