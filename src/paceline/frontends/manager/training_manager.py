"""DistributedTrainingManager: a training loop of the caller's own, one call per step, with error codes.

    manager = DistributedTrainingManager("config.json")
    manager.init_environment()
    manager.prepare_training(model, total_samples=len(dataset))
    while manager.next_step < 1000:
        inputs, targets = ...the samples of this step, for all processes...
        start, end = manager.get_local_batch(len(inputs))
        metrics = manager.train_step((inputs[start:end], targets[start:end]), manager.next_step)
        if metrics.error_code == manager.ERROR_PROCESS_FAILURE:
            manager.handle_failure(metrics.failed_process_rank)

Methods return 0, or ERROR_PROCESS_FAILURE where another process has died; everything else that goes wrong is
raised. Must not start processes: a launcher, or the user by hand, has done that.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar, Self, final

from torch import nn

from paceline.checkpoint.store import CheckpointStore
from paceline.comm import default_group
from paceline.comm.context import DistributedContext
from paceline.core.errors import GROUP_FAILURES, UsageError
from paceline.frontends.announcements import announce
from paceline.frontends.error_folding import folding_errors
from paceline.frontends.manager import model_preparation
from paceline.frontends.manager.manager_config import (
    OF_MANAGER,
    OWN_WORDS,
    ManagerConfig,
    check_count,
    read_config,
)
from paceline.frontends.manager.manager_group import ManagerGroup
from paceline.frontends.manager.model_preparation import ManagedObjective
from paceline.frontends.manager.step_metrics import StepMetrics
from paceline.frontends.own_words import in_words_of
from paceline.train.loop.stepwise_run import ComputeMicroBatch, StepwiseRun
from paceline.train.settings.keyword_hints import explained

_log = logging.getLogger(__name__)


@explained(hints=OF_MANAGER)
@final
class DistributedTrainingManager:
    """One process's end of a training by steps. `config` is a dict, the name of a JSON file, or a
    ManagerConfig."""

    SUCCESS: ClassVar[int] = 0
    ERROR_PROCESS_FAILURE: ClassVar[int] = 1

    @folding_errors
    def __init__(self, config: ManagerConfig | Mapping[str, Any] | str | os.PathLike[str]) -> None:
        self.config, self._launch = read_config(config).launched()
        directory = self.config.checkpoint_dir
        self._store = None if directory is None else CheckpointStore(directory)
        self._closing = ExitStack()
        # For a program that ends, or drops the manager, without close().
        weakref.finalize(self, self._closing.close)
        self._group: ManagerGroup | None = None
        self._run: StepwiseRun | None = None
        self._trained: nn.Module | None = None
        self._compute: ComputeMicroBatch | None = None
        self._total: int | None = self.config.batch_size  # samples of the step; None: to be dealt again

    # beginning

    @folding_errors
    def init_environment(self) -> int:
        """Meet the other processes; all of them call it."""
        if self._group is not None:
            raise UsageError("init_environment was called twice", remedy="call it once")
        self._group = ManagerGroup.meet(self.config, self._launch)
        self._closing.callback(self._group.leave)
        announce(self.config.arithmetic())
        return self.SUCCESS

    @folding_errors
    def prepare_training(
        self,
        model: nn.Module,
        total_samples: int,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: Any = None,
    ) -> int:
        """Prepare a model, with the same weights on every process, for training on `total_samples`.

        loss_fn     a loss of (output, target), or a function (model, batch) -> loss; without one the targets
                    decide: cross-entropy for classes, squared error for other numbers
        optimizer   an optimizer, or a function of the parameters; without one AdamW with learning_rate
        """
        group = self._connected("prepare_training")
        check_count("prepare_training", "total_samples", total_samples)
        module = model_preparation.check_model(model)
        if self._run is None or (module is not self._trained and not self._run.has_begun):
            objective = ManagedObjective(module, loss_fn)
            run = model_preparation.build_run(
                self.config, group, objective, optimizer, total_samples, self._closing
            )
            self._run, self._trained, self._compute = run, module, objective.compute
            model_preparation.write_settings(self._store, run.config, group.context)
        with in_words_of(OWN_WORDS):
            return self._together(group, self._prepared("prepare_training").begin)

    # steps

    @folding_errors
    def get_local_batch(self, total_samples: int) -> tuple[int, int]:
        """Return (start, end): which of the `total_samples` of the next step are this process's. The ranges
        of all processes that are left cover the step; call it again after handle_failure."""
        run = self._prepared("get_local_batch")
        check_count("get_local_batch", "total_samples", total_samples)
        batch_size = self.config.batch_size
        if total_samples > batch_size:
            announce(
                f"get_local_batch({total_samples}) deals out one step of {total_samples} samples, and "
                f"batch_size={batch_size}"
            )
        self._total = total_samples
        return run.deal(total_samples)

    @folding_errors
    def train_step(self, batch: Any, step: int) -> StepMetrics:
        """Take one step on the samples that get_local_batch dealt to this process, together with all others.

        `step` is its number: any at first, then one after the other. Where a process has died, the step is
        undone and the metrics have the error code; after handle_failure it is taken again.
        """
        group, run = self._connected("train_step"), self._prepared("train_step")
        check_count("train_step", "step", step, least=0)
        repairable = group.repairable
        if repairable.lost_rank is not None:
            return StepMetrics.of_failure(repairable.lost_rank, self.ERROR_PROCESS_FAILURE)
        if self._total is None:
            raise UsageError(
                f"step {step}: the samples were not dealt again since the processes changed",
                remedy="start, end = manager.get_local_batch(...) before every train_step",
            )
        assert self._compute is not None
        started = time.perf_counter()
        try:
            result = run.step(batch, self._total, step, self._compute)
        except GROUP_FAILURES as error:
            repairable.fail(error)
            seconds = time.perf_counter() - started
            return StepMetrics.of_failure(repairable.lost_rank or 0, self.ERROR_PROCESS_FAILURE, seconds)
        seconds = time.perf_counter() - started
        interval = self.config.save_interval
        if interval is not None and run.next_step % interval == 0:
            run.save_unasked(self._checkpoints("save_interval"), run.next_step)
        return StepMetrics.of_step(result, seconds)

    # failures

    @folding_errors
    def handle_failure(self, rank: int) -> int:
        """Continue without the processes that died, of which `rank` is one; all others call it.

        Waits for every process that lives, whatever it still computes. Afterwards all have the same state,
        and get_local_batch deals the samples over those who are left.
        """
        group, run = self._connected("handle_failure"), self._run
        check_count("handle_failure", "rank", rank, least=-1)
        if not group.repairable.needs_repair:
            _log.warning("handle_failure(%d): all processes live, and no exchange has failed", rank)
            return self.SUCCESS
        group.repairable.repair(DistributedContext.barrier if run is None else run.rebind)
        self._total = None
        default_group.install(group.context)
        return self.SUCCESS

    def _together(self, group: ManagerGroup, operation: Callable[[], None]) -> int:
        """Do what all processes do at the same time; return the code."""
        if group.repairable.lost_rank is None:
            try:
                operation()
                return self.SUCCESS
            except GROUP_FAILURES as error:
                group.repairable.fail(error)
        return self.ERROR_PROCESS_FAILURE

    # checkpoints

    @folding_errors
    def save_checkpoint(self, step: int) -> int:
        """Save the present state as checkpoint `step`. One process writes, and returns when the checkpoint is
        complete; the others may call it too, and do not wait."""
        run, store = self._prepared("save_checkpoint"), self._checkpoints("save_checkpoint")
        check_count("save_checkpoint", "step", step, least=0)
        run.save(store, step)
        return self.SUCCESS

    @folding_errors
    def load_checkpoint(self, step: int) -> int:
        """Continue from checkpoint `step`, whatever number of processes there was; all processes call it.
        `next_step` then is the step to take."""
        run, store = self._prepared("load_checkpoint"), self._checkpoints("load_checkpoint")
        check_count("load_checkpoint", "step", step, least=0)
        self._total = None
        return self._together(self._connected("load_checkpoint"), lambda: run.load(store, step))

    def _checkpoints(self, what: str) -> CheckpointStore:
        if self._store is None:
            raise UsageError(f"{what}: there is no checkpoint_dir", remedy="set checkpoint_dir in the config")
        return self._store

    # what there is

    @property
    def world_size(self) -> int:
        """The number of processes that are left; before init_environment that of the launcher."""
        return self._launch.world_size if self._group is None else self._group.context.world_size

    @property
    def rank(self) -> int:
        """The rank that this process was started with."""
        return self._launch.rank

    @property
    def next_step(self) -> int:
        """The number of the next step."""
        return 0 if self._run is None else self._run.next_step

    def close(self) -> None:
        """Leave the group; the model keeps its weights. The manager is of no use afterwards."""
        self._closing.close()
        self._group = self._run = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _connected(self, what: str) -> ManagerGroup:
        if self._group is None:
            raise UsageError(
                f"{what} before init_environment", remedy="call manager.init_environment() first"
            )
        return self._group

    def _prepared(self, what: str) -> StepwiseRun:
        self._connected(what)
        if self._run is None:
            raise UsageError(
                f"{what} before prepare_training", remedy="call manager.prepare_training(...) first"
            )
        return self._run
