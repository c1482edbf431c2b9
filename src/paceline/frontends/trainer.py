"""`paceline.Trainer`: train, evaluate and predict on many workers with the result of one.

Called from a plain script or a notebook it starts the workers; inside a job that is already started (a
spawned function, torchrun, `init_process_group`) it joins. train/ has what a worker does, fit_drivers.py how
a run is carried out. Importing this module does not import torch.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

from paceline.core.available_resources import cores
from paceline.core.engine_registry import EngineSettings
from paceline.core.errors import ConfigError, UsageError
from paceline.core.wording import counted
from paceline.frontends import fit_drivers, joint_calls, overrides
from paceline.frontends.dry_run import dry_callbacks, dry_settings
from paceline.frontends.engine_refusals import check_search, refuse_engine_on_ranks
from paceline.frontends.error_folding import folding_errors
from paceline.frontends.recomputation import record_command, replay_fit
from paceline.frontends.run_preparation import (
    as_recorded,
    check_length,
    check_model,
    check_optimizer,
    check_scheduler,
    prepare,
    running_job,
    with_measurements,
    with_profile,
)
from paceline.monitor.progress_factory import progress_display
from paceline.train.callbacks import Callbacks, Modifier, Observer, as_list, refuse_inside
from paceline.train.settings import conflicts
from paceline.train.settings.evaluation_config import EvaluationConfig
from paceline.train.settings.keyword_hints import explained
from paceline.train.settings.train_config import TrainConfig
from paceline.train.step_info import StepInfo, first_step_of
from paceline.train.stop_signals import NOTHING_KEPT, ending, interrupted
from paceline.train.trace_summary import clear_traces

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from paceline.comm.context import DistributedContext
    from paceline.frontends.launcher_link import LauncherLink
    from paceline.frontends.mpi_calls import MpiRanks
    from paceline.train.history import History
    from paceline.train.loop.recompute import ReplayedShard
    from paceline.train.loop.worker_jobs import TrainJob
    from paceline.train.state.optimizers import OptimizerFactory
    from paceline.train.state.schedulers import GivenScheduler
    from paceline.train.state.weight_averages import WeightAverage

T = TypeVar("T")


@explained(TrainConfig)
@final
class Trainer:
    """A model, its objective and its optimizer.

        trainer = paceline.Trainer(model, objective, optimizer=lambda p: torch.optim.AdamW(p, 1e-3),
                                   config=paceline.TrainConfig(workers=4, global_batch=256, epochs=3))
        history = trainer.fit(train_data, val_data)

    model       a module, or a function that builds one (with randomness from the run's seed)
    objective   a loss module (output, target), or a function (model, batch) -> loss or (loss, metrics); with
                a third parameter it gets the StepInfo: def objective(model, batch, step)
    optimizer   a function from parameters (with names in `p.named`) to one or several optimizers
    scheduler   a function from the optimizer to a torch scheduler; for several optimizers one from their list
                to a list, or a list of functions. It may ask by name for steps_per_epoch, total_steps, epochs
    callbacks   Observers and Modifiers
    evaluation  an EvaluationConfig: an objective, metrics over whole sets, more sets, a batch size

    After `fit` the caller's module holds the trained weights; one that was built is `trainer.model`.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        objective: Callable[..., Any],
        *,
        optimizer: OptimizerFactory | Optimizer | Sequence[Optimizer],
        scheduler: GivenScheduler | None = None,
        config: TrainConfig | None = None,
        callbacks: Sequence[Observer | Modifier] = (),
        evaluation: EvaluationConfig | None = None,
    ) -> None:
        check_model(model)
        example = "optimizer=lambda p: torch.optim.AdamW(p, 1e-3)"
        check_optimizer(optimizer, f"pass a function from parameters to an optimizer: {example}")
        check_scheduler(scheduler)
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.config = config or TrainConfig()
        self.callbacks = as_list(callbacks)
        self.evaluation = evaluation or EvaluationConfig()
        self._settled: TrainConfig | None = None  # the resolved config of the last fit
        self._reached = StepInfo()  # the place in the run of the weights that the last fit left
        self._folder: Path | None = None  # of its run
        Callbacks(self.callbacks)  # refused here, before a worker starts

    @folding_errors
    def fit(
        self, train_data: Any, val_data: Any = None, *, profile: str | os.PathLike[str] | None = None
    ) -> History:
        """Train to the end that the config names, or until a stop is requested, and return the history.

        With one worker and a debugger or a torch.profiler active in this process, it computes here. With
        `profile` every worker writes a trace of a few steps to that folder, and `history.profile.table()`
        joins them.

        SIGTERM and SIGUSR1 finish the step, save and raise `Stopped`, which ends the process with code 75; a
        state that cannot be saved then is an error instead. Ctrl-C finishes the step, saves and raises a
        KeyboardInterrupt; a second one ends at once. An error of the model, the objective or the data ends
        the run too, after the last committed step was saved.
        """
        try:
            return self._fit(train_data, val_data, profile)
        except KeyboardInterrupt as error:
            if str(error):
                raise
            raise interrupted("stopped by Ctrl-C before the run had begun") from None

    def _fit(self, train_data: Any, val_data: Any, profile: str | os.PathLike[str] | None) -> History:
        refuse_inside("fit")
        replacement = overrides.current().replaces_fit
        if replacement is not None:
            replaced: History = replacement(self, train_data, val_data)
            return replaced
        dry = overrides.current().apply(self.config).dry_run
        drive = partial(self._drive, train_data, val_data, profile)
        result = self._together(drive, was_stopped=lambda fitted: fitted.stop_signal is not None)
        if not dry:  # else the caller's model and averages stay as they were
            if result.weights is not None:
                fit_drivers.load_weights(self._built(), result.weights)
            for average, weights in zip(self._averages(), result.averages, strict=False):
                average.weights = weights
            self._reached = result.reached
        if result.stop_signal is not None:
            raise ending(result.stop_signal, result.history, result.saved)
        return result.history

    def _drive(
        self, train_data: Any, val_data: Any, profile: str | os.PathLike[str] | None
    ) -> fit_drivers.FitResult:
        """Train, and say how far the weights have come."""
        context, job = self._prepared_job(train_data, val_data, profile)
        with fit_drivers.keeping_nothing(context, job):
            if context is not None:
                result = fit_drivers.fit_in_job(context, job)
            elif (tool := fit_drivers.tool_to_stay_for(job.config)) is not None:
                result = fit_drivers.fit_in_caller(job, tool)
            elif job.config.fault_tolerance.enabled:
                result = fit_drivers.fit_supervised(job)
            else:
                result = fit_drivers.fit_spawned(job)
        if job.config.run_dir is False:
            result = dataclasses.replace(result, saved=NOTHING_KEPT)
        reached = first_step_of(job.config, job.train.size)
        if result.history.steps:
            last = result.history.steps[-1]
            reached = reached.at(last.step, last.epoch)
        return dataclasses.replace(result, reached=reached)

    def _prepared_job(
        self, train_data: Any, val_data: Any, profile: str | os.PathLike[str] | None
    ) -> tuple[DistributedContext | None, TrainJob]:
        """Check everything that can be checked before a folder is made or a worker starts; make the folder.

        The context is that of the job that this process belongs to, or None.
        """
        from paceline.data.orders import check_shuffled
        from paceline.data.sources import as_source, check_apart
        from paceline.train.loop.process_setup import WorkerProcessTuning
        from paceline.train.loop.worker_jobs import TrainJob
        from paceline.train.objective import Objective

        given = dry_settings(overrides.current().apply(self.config))
        Objective(self.objective)
        if self.evaluation.objective is not None:
            Objective(self.evaluation.objective)
        sets = {name: as_source(data) for name, data in self.evaluation.sets.items()}
        source, validation = as_source(train_data), None if val_data is None else as_source(val_data)
        context = self._running_job("fit")
        given = with_profile(given, None if given.dry_run else profile, context)
        given = with_measurements(given, self.callbacks)
        url = given.checkpoint.url or ""
        if context is None and url.startswith("memory:"):
            raise ConfigError(
                f"checkpoint.url={url!r}: the workers would write to their own memory, which ends with them",
                remedy="give a folder or a URL that outlives the workers; memory:// is for paceline.session",
                key="checkpoint.url",
            )
        validated = {**sets, **({} if validation is None else {"": validation})}
        check_apart(source, validated)

        def fits(config: TrainConfig) -> None:
            conflicts.check(config, samples=source.size, validation=bool(validated))
            check_search(config)
            check_shuffled(source, config.shuffle)
            check_length(self.scheduler, config, source.size)

        config, folder = prepare(given, context, fits)
        if config.profile is not None and (context is None or context.is_master):
            clear_traces(Path(config.profile))
        model, optimizer = self._learner(context, config)
        job = TrainJob(
            model=model,
            objective=self.objective,
            optimizer=optimizer,
            config=config,
            train=source,
            validation=validation,
            evaluation=dataclasses.replace(self.evaluation, sets=sets),
            callbacks=dry_callbacks(self.callbacks) if config.dry_run else self.callbacks,
            folder=folder.path,
            stop_file=None if context is not None else folder.stop_file,
            display=progress_display,
            process=None if context is not None else WorkerProcessTuning.like_this_one(),
            scheduler=self.scheduler,
        )
        if config.micro_batch == "auto":
            # Part of the run's definition from now on: the same on every worker.
            try:
                found = fit_drivers.find_micro_batch(context, job)
            except BaseException:
                with fit_drivers.keeping_nothing(context, job):
                    raise
            config = dataclasses.replace(config, micro_batch=found)
            job = dataclasses.replace(job, config=config)
            if context is None or context.is_master:
                folder.save_config(config)
        if not config.dry_run:
            self._settled, self._folder = config, None if config.run_dir is False else folder.path
        if context is None and config.fault_tolerance.enabled:
            record_command(folder)
        return context, job

    @property
    def averaged_model(self) -> nn.Module:
        """A copy of the model with the weights of the EMA or SWA among the callbacks, after `fit`."""
        found = self._averages()
        if len(found) != 1:
            raise UsageError(
                f"averaged_model of a Trainer with {counted(len(found), 'average')} among its callbacks",
                remedy="give it callbacks=[paceline.EMA()]; with several, ask each for its `weights`",
            )
        module = copy.deepcopy(self._built())
        found[0].load_into(module)
        return module

    @folding_errors
    def evaluate(self, data: Any) -> dict[str, float]:
        """Return the means of loss and metrics over the data: the same bits on any number of workers, and as
        `fit` computes them, with the shards and threads of the last `fit`, else of the run that `resume`
        names."""
        from paceline.train.loop import worker_jobs

        return self._together(partial(self._pass_over, worker_jobs.evaluate, data))

    @folding_errors
    def predict(self, data: Any) -> Any:
        """Return the model's outputs, in the order of the data; inside a job, on every rank of it.

        Ranks other than the first get plain dicts, lists and tuples, also where the model returns others.
        """
        from paceline.data.containers import plain
        from paceline.train.loop import worker_jobs

        outputs = self._together(partial(self._pass_over, worker_jobs.predict, data))
        context = self._running_job("predict")
        if context is None or context.world_size == 1:
            return outputs
        received = context.broadcast(plain(outputs) if context.is_master else None)
        return outputs if context.is_master else received

    @folding_errors
    def load(
        self,
        version: int | str = "best",
        *,
        metric: str | None = None,
        mode: Literal["min", "max"] | None = None,
    ) -> nn.Module:
        """Load weights and buffers of a checkpoint into `trainer.model`, and return it.

        version   "best" as the CheckpointConfig of this trainer means it (or these arguments), "last", the
                  number of a version, or a tag
        After `fit` it is a checkpoint of that run; else of the one in `run_dir`, or the newest called `name`.
        """
        from paceline.frontends.saved_models import SavedRun

        config = overrides.current().apply(self.config)
        saved = SavedRun.of_folder(self._folder, config) if self._folder else SavedRun.named(config)
        module = self._built()
        saved.load_into(module, version, metric, mode)
        return module

    @folding_errors
    def replay(
        self, run_dir: str | os.PathLike[str], step: int, shard: int, train_data: Any
    ) -> ReplayedShard:
        """Compute one shard's gradient of one step of an earlier run again in this process, and compare its
        hash with the one in the run's journal (of steps that TrainConfig(audit_every=...) names)."""
        return replay_fit(self, run_dir, step, shard, train_data)

    # inside

    def _together(self, compute: Callable[[], T], was_stopped: Callable[[T], bool] = lambda _: False) -> T:
        """Compute; under `paceline run` and mpirun, once for all of their ranks."""
        link = self._joint_link()
        if link is None:
            return compute()
        return joint_calls.call_together(link, self.config, compute, was_stopped)

    def _joint_link(self) -> LauncherLink | MpiRanks | None:
        return joint_calls.joint_link() if self.config.fault_tolerance.enabled else None

    def _running_job(self, what: str) -> DistributedContext | None:
        """Return the group that this process belongs to; None also for a rank that computes for the others of
        its launcher, and where an engine has the workers, which is refused on the ranks of a job."""
        refuse_inside(what)
        if self._joint_link() is not None:
            return None
        engine = overrides.current().apply(self.config).engine
        if isinstance(engine, EngineSettings):
            refuse_engine_on_ranks(engine)
            return None
        return running_job(what)

    def _pass_over(self, function: Callable[[DistributedContext, TrainJob], T], data: Any) -> T:
        from paceline.data.sources import as_source, refuse_order
        from paceline.train.loop.worker_jobs import TrainJob

        context = self._running_job(function.__name__)
        source = as_source(data)
        refuse_order(source)
        group = context or self._joint_link()
        workers = self.config.workers if group is None else group.world_size
        config = self._settled or as_recorded(self.config)
        if context is None and overrides.current().apply(self.config).engine is not None:
            # Workers of this machine, which may have room for fewer than the nodes have.
            workers = min(workers, config.chosen_shards, cores())
        job = TrainJob(
            self.model,
            self.objective,
            None,
            dataclasses.replace(config, engine=None, workers=workers),
            source,
            info=self._reached,
            evaluation=self.evaluation,
        )
        return function(context, job) if context is not None else fit_drivers.spawn_ranks(function, job)

    def _learner(self, context: DistributedContext | None, config: TrainConfig) -> tuple[Any, Any]:
        """Return model and optimizer as the workers get them; a dry run leaves the caller's own alone, also
        where the caller's process is the worker."""
        parts = (self.model if context is None else self._built(config.seed), self.optimizer)
        return copy.deepcopy(parts) if config.dry_run else parts

    def _averages(self) -> list[WeightAverage]:
        from paceline.train.state.weight_averages import averages_in

        return averages_in(self.callbacks)

    def _built(self, seed: int | None = None) -> nn.Module:
        """Return the caller's module; one that a function builds is built once, with the run's seed where
        that is another than the config's."""
        module = self.model = fit_drivers.built(self.model, self.config.seed if seed is None else seed)
        return module
