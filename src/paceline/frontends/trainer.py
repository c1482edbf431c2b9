"""`paceline.Trainer`: train, evaluate and predict on many workers with the result of one.

Called from a plain script or a notebook it starts the workers; inside a job that is already started (a
spawned function, torchrun, `init_process_group`) it joins. train/ has what a worker does, fit_drivers.py how
a run is carried out. Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, final

from paceline.core.errors import ConfigError, PacelineError
from paceline.frontends import fit_drivers, overrides
from paceline.frontends.recomputation import record_command, replay_fit
from paceline.frontends.run_preparation import (
    as_recorded,
    check_model,
    check_optimizer,
    prepare,
    running_job,
)
from paceline.monitor.progress_factory import progress_display
from paceline.train.callbacks import Callbacks, Modifier, Observer, refuse_inside
from paceline.train.settings import conflicts
from paceline.train.settings.keyword_hints import explained
from paceline.train.settings.train_config import TrainConfig
from paceline.train.stop_signals import ending, interrupted

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from paceline.comm.context import DistributedContext
    from paceline.train.history import History
    from paceline.train.loop.recompute import ReplayedShard
    from paceline.train.loop.worker_jobs import TrainJob
    from paceline.train.state.optimizers import OptimizerFactory

T = TypeVar("T")


@explained(TrainConfig)
@final
class Trainer:
    """A model, its objective and its optimizer.

        trainer = paceline.Trainer(model, objective, optimizer=lambda p: torch.optim.AdamW(p, 1e-3),
                                   config=paceline.TrainConfig(workers=4, global_batch=256, epochs=3))
        history = trainer.fit(train_data, val_data)

    model       a module, or a function that builds one (with randomness from the run's seed)
    objective   a loss module (output, target), or a function (model, batch) -> loss or (loss, metrics)
    optimizer   a function from parameters (with names in `p.named`) to one or several optimizers
    callbacks   Observers and Modifiers

    After `fit` the caller's module holds the trained weights; one that was built is `trainer.model`.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        objective: Callable[..., Any],
        *,
        optimizer: OptimizerFactory | Optimizer | Sequence[Optimizer],
        config: TrainConfig | None = None,
        callbacks: Sequence[Observer | Modifier] = (),
    ) -> None:
        check_model(model)
        example = "optimizer=lambda p: torch.optim.AdamW(p, 1e-3)"
        check_optimizer(optimizer, f"pass a function from parameters to an optimizer: {example}")
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.config = config or TrainConfig()
        self.callbacks = tuple(callbacks)
        self._settled: TrainConfig | None = None  # the resolved config of the last fit
        Callbacks(self.callbacks)  # refused here, before a worker starts

    def fit(self, train_data: Any, val_data: Any = None) -> History:
        """Train to the end that the config names, or until a stop is requested, and return the history.

        SIGTERM and SIGUSR1 finish the step, save and raise `Stopped`, which ends the process with code 75; a
        state that cannot be saved then is an error instead. Ctrl-C finishes the step, saves and raises a
        KeyboardInterrupt; a second one ends at once. An error of the model, the objective or the data ends
        the run too, after the last committed step was saved.
        """
        try:
            return self._fit(train_data, val_data)
        except PacelineError as error:
            if error.fault == "ours":
                raise
            # Paceline's own frames say nothing about what the program did.
            raise error.with_traceback(None) from error.__cause__
        except KeyboardInterrupt as error:
            if str(error):
                raise error.with_traceback(None) from None
            raise interrupted("stopped by Ctrl-C before the run had begun") from None

    def _fit(self, train_data: Any, val_data: Any) -> History:
        refuse_inside("fit")
        replacement = overrides.current().replaces_fit
        if replacement is not None:
            replaced: History = replacement(self, train_data, val_data)
            return replaced
        context, job = self._prepared_job(train_data, val_data)
        if context is not None:
            result = fit_drivers.fit_in_job(context, job)
        elif job.config.fault_tolerance.enabled:
            result = fit_drivers.fit_supervised(job)
        else:
            result = fit_drivers.fit_spawned(job)
        if result.weights is not None:
            fit_drivers.load_weights(self._built(), result.weights)
        if result.stop_signal is not None:
            raise ending(result.stop_signal, result.history, result.saved)
        return result.history

    def _prepared_job(self, train_data: Any, val_data: Any) -> tuple[DistributedContext | None, TrainJob]:
        """Check everything that can be checked before a folder is made or a worker starts; make the folder.

        The context is that of the job that this process belongs to, or None.
        """
        from paceline.data.sources import as_source, check_apart
        from paceline.train.loop.process_setup import WorkerProcessTuning
        from paceline.train.loop.worker_jobs import TrainJob
        from paceline.train.objective import Objective

        given = overrides.current().apply(self.config)
        Objective(self.objective)
        source, validation = as_source(train_data), None if val_data is None else as_source(val_data)
        context = running_job()
        url = given.checkpoint.url or ""
        if context is None and url.startswith("memory:"):
            raise ConfigError(
                f"checkpoint.url={url!r}: the workers would write to their own memory, which ends with them",
                remedy="give a folder or a URL that outlives the workers; memory:// is for paceline.session",
                key="checkpoint.url",
            )
        if validation is not None:
            check_apart(source, validation)
        fits = partial(conflicts.check, samples=source.size, validation=validation is not None)
        config, folder = prepare(given, context, fits)
        job = TrainJob(
            model=self.model if context is None else self._built(),
            objective=self.objective,
            optimizer=self.optimizer,
            config=config,
            train=source,
            validation=validation,
            callbacks=self.callbacks,
            folder=folder.path,
            stop_file=None if context is not None else folder.stop_file,
            display=progress_display,
            process=None if context is not None else WorkerProcessTuning.like_this_one(),
        )
        if config.micro_batch == "auto":
            # Part of the run's definition from now on: the same on every worker.
            config = dataclasses.replace(config, micro_batch=fit_drivers.find_micro_batch(context, job))
            job = dataclasses.replace(job, config=config)
            if context is None or context.is_master:
                folder.save_config(config)
        self._settled = config
        if context is None and config.fault_tolerance.enabled:
            record_command(folder)
        return context, job

    def evaluate(self, data: Any) -> dict[str, float]:
        """Return the means of loss and metrics over the data: the same bits on any number of workers, and as
        `fit` computes them, with the shards and threads of the last `fit`, else of the run that `resume`
        names."""
        from paceline.train.loop import worker_jobs

        return self._pass_over(worker_jobs.evaluate, data)

    def predict(self, data: Any) -> Any:
        """Return the model's outputs, in the order of the data; inside a job, on every rank of it.

        Ranks other than the first get plain dicts, lists and tuples, also where the model returns others.
        """
        from paceline.data.containers import plain
        from paceline.train.loop import worker_jobs

        outputs = self._pass_over(worker_jobs.predict, data)
        context = running_job("predict")
        if context is None or context.world_size == 1:
            return outputs
        received = context.broadcast(plain(outputs) if context.is_master else None)
        return outputs if context.is_master else received

    def replay(
        self, run_dir: str | os.PathLike[str], step: int, shard: int, train_data: Any
    ) -> ReplayedShard:
        """Compute one shard's gradient of one step of an earlier run again in this process, and compare its
        hash with the one in the run's journal (of steps that TrainConfig(audit_every=...) names)."""
        return replay_fit(self, run_dir, step, shard, train_data)

    # inside

    def _pass_over(self, function: Callable[[DistributedContext, TrainJob], T], data: Any) -> T:
        from paceline.data.sources import as_source
        from paceline.train.loop.worker_jobs import TrainJob

        context = running_job(function.__name__)
        workers = self.config.workers if context is None else context.world_size
        config = dataclasses.replace(self._settled or as_recorded(self.config), workers=workers)
        job = TrainJob(self.model, self.objective, None, config, as_source(data))
        return function(context, job) if context is not None else fit_drivers.spawn_ranks(function, job)

    def _built(self) -> nn.Module:
        """Return the caller's module; one that a function builds is built once."""
        module = self.model = fit_drivers.built(self.model, self.config.seed)
        return module
