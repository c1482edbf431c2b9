"""Build a run from what the user gave (model, optimizer, data, settings), and close its parts after it.

The state of the run is `RunState`, its loop is `Run`; neither knows the builder.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, final

import torch
from torch import nn

from paceline.checkpoint.store import CheckpointStore
from paceline.core import events, log, metric_reports
from paceline.core.errors import PacelineError, PeerError, UsageError
from paceline.core.journal import Journal, PatientJournal
from paceline.core.wording import first_line
from paceline.data.orders import facts_of
from paceline.data.sources import Source
from paceline.train import host_fingerprint
from paceline.train.callbacks import Callbacks, Modifier, Observer, RunInfo
from paceline.train.loop.run import Run
from paceline.train.loop.run_hooks import (
    Evaluate,
    FixedGroup,
    ReplicaHooks,
    RunParts,
    ScoreMicroBatch,
    StepHooks,
)
from paceline.train.loop.worker_log import WorkerLog
from paceline.train.phases import Phases
from paceline.train.precision import LossScaler
from paceline.train.settings.dynamic_batch import GradientNoise
from paceline.train.settings.run_length import RunLength
from paceline.train.settings.schedule import EarlyStopper, Schedule, run_length
from paceline.train.settings.train_config import TrainConfig
from paceline.train.state import optimizers, schedulers
from paceline.train.state.checkpointing import Checkpointer
from paceline.train.state.optimizers import OptimizerFactory
from paceline.train.state.recorder import Recorder
from paceline.train.state.resume import note_start, resume
from paceline.train.state.run_folder import RunFolder
from paceline.train.state.run_lock import held
from paceline.train.state.run_state import RunState
from paceline.train.state.schedulers import GivenScheduler
from paceline.train.step.aggregation_registry import Aggregation
from paceline.train.step.batch_feed import BatchFeed, open_feed
from paceline.train.step.gradient_reducer import GradientChecks
from paceline.train.step.lockstep import Lockstep
from paceline.train.step.lockstep_limits import needs_lockstep
from paceline.train.step.optimizer_turns import OptimizerTurns
from paceline.train.step.transaction import StepTransaction
from paceline.train.step.unfreezing import Unfreezing
from paceline.train.step.weight_update import WeightUpdate
from paceline.train.step_info import first_step_of
from paceline.train.stop_signals import StopRequest
from paceline.train.team import Team


@dataclass(frozen=True)
class RunSpec:
    """Parts that a run is built from, on every rank alike. `config` is resolved."""

    module: nn.Module
    optimizer: OptimizerFactory | torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    config: TrainConfig
    data: Source
    callbacks: Sequence[Observer | Modifier] = ()
    folder: Path | None = None
    observers: Sequence[Observer] = field(default_factory=tuple)  # of the main rank only
    aggregation: Aggregation | None = None
    scheduler: GivenScheduler | None = None
    feed: BatchFeed | None = None  # in place of the one that reads `data`
    score: ScoreMicroBatch | None = None  # None: the caller's own loop computes the losses

    @property
    def length(self) -> RunLength:
        return run_length(self.config, self.data.size)


@dataclass(frozen=True)
class SupervisedHooks:
    """What differs under a supervisor: it keeps the journal and the folder, and members join and leave, some
    on machines that do not see the folder. `slot` is this worker's rank."""

    steps: StepHooks
    replicas: ReplicaHooks
    tell: Callable[[events.Event], None]
    journal_acked_at: Callable[[], float]  # on this process's clock
    slot: int
    checks: GradientChecks = field(default_factory=GradientChecks)
    sees_folder: bool = True


@final
class RunBuilder:
    """Makes one run; use it with `with`, or push it on an ExitStack, before `run` is called: it closes what
    `run` has opened, and notes an error that ends the run in the rank's log and in the journal."""

    def __init__(
        self,
        team: Team,
        spec: RunSpec,
        device: torch.device,
        stop: StopRequest,
        *,
        hooks: SupervisedHooks | None = None,
        phases: Phases | None = None,
    ) -> None:
        self._team, self._spec, self._device, self._stop = team, spec, device, stop
        self._hooks, self._phases = hooks, phases or Phases()
        self._sees_folder = hooks is None or hooks.sees_folder
        # As the job knows this worker: a member that saves alone is rank 0 of the group that it makes.
        self._rank = team.context.rank
        self._folder = None if spec.folder is None else RunFolder(spec.folder)
        self._worker_log: WorkerLog | None = None
        self._journal: Journal | None = None
        self._closing = ExitStack()

    def run(self, evaluate: Evaluate | None = None) -> Run:
        """Build the run. Without supervision it is at its position afterwards: the beginning, or that of a
        checkpoint; under a supervisor its first view decides."""
        if self._hooks is None:
            self._lock()
        tell = self._open_logs()
        parts = self._parts(tell, evaluate)
        self._closing.enter_context(log.labelled(self._rank, lambda: self._phases.step))
        self._closing.enter_context(metric_reports.journal_of(self._rank, partial(_report, parts)))
        state = RunState(parts)
        if parts.store is not None:
            parts.checkpointer = self._checkpointer(parts.store, parts, state.run_id)
        if self._hooks is None:
            resume(state, parts.config.resume)
            processes = self._team.context.all_gather([os.getpid(), socket.gethostname()])
            for rank, (pid, host) in enumerate(processes):
                parts.recorder.note(events.WorkerStarted(time=time.time(), rank=rank, pid=pid, host=host))
            note_start(state)
        return Run(parts, state)

    def info(self, run: Run) -> RunInfo:
        """Return what observers get before the first step."""
        position, config = run.state.position, self._spec.config
        return RunInfo(
            config=config,
            workers=self._team.world_size,
            total_steps=self._spec.length.total_steps,
            samples=self._spec.data.size,
            first_step=position.step,
            first_epoch=position.epoch,
            run_dir=None if self._folder is None or config.run_dir is False else str(self._folder.path),
            device=str(self._device),
        )

    def _parts(self, tell: Callable[[events.Event], None] | None, evaluate: Evaluate | None) -> RunParts:
        spec, team, device, hooks = self._spec, self._team, self._device, self._hooks
        config = spec.config
        callbacks = Callbacks([*spec.callbacks, *(spec.observers if team.is_master else ())])
        # Before the optimizers, which hold from the start what learns later.
        unfreezing = Unfreezing(spec.module, config.unfreeze)
        made = optimizers.build(spec.optimizer, spec.module)
        # Before the update remembers the rates: some schedulers begin with another one.
        scheduled = schedulers.build(
            spec.scheduler, made, config, spec.length, validation=evaluate is not None
        )
        checks = None if hooks is None else hooks.checks
        transaction = StepTransaction(
            team,
            spec.module,
            config,
            device,
            checks=checks,
            aggregation=spec.aggregation,
            unfreezing=unfreezing,
        )
        self._closing.callback(transaction.close)
        update = WeightUpdate(
            transaction.trained,
            made,
            clip_norm=config.clip_norm,
            scaler=LossScaler(config.loss_scaling) if config.precision == "fp16" else None,
            change_gradients=callbacks.change_gradients if callbacks.changes_gradients else None,
            scheduled=bool(scheduled),
            log_norm_every=int(config.log_grad_norm),
        )
        turns = OptimizerTurns(made, config.optimizer_turns)
        feed = open_feed(spec.data, config, team) if spec.feed is None else spec.feed
        self._closing.callback(feed.close)
        acked_at = None if hooks is None else hooks.journal_acked_at
        steps, replicas = (FixedGroup(team),) * 2 if hooks is None else (hooks.steps, hooks.replicas)
        saves = self._folder is not None and config.checkpoint.enabled
        return RunParts(
            team=team,
            config=config,
            device=device,
            module=spec.module,
            optimizers=made,
            schedulers=scheduled,
            transaction=transaction,
            update=update,
            recorder=Recorder(
                callbacks,
                tell,
                device,
                lambda: team.is_master,
                acked_at,
                take_times=self._phases.take_times,
            ),
            callbacks=callbacks,
            feed=feed,
            samples=spec.data.size,
            order=facts_of(spec.data),
            fingerprint=host_fingerprint.fingerprint(device, torch.get_num_threads()),
            noise=None if config.dynamic_batch is None else GradientNoise(config.dynamic_batch),
            early=None if config.early_stopping is None else EarlyStopper(config.early_stopping),
            store=CheckpointStore(self._folder.checkpoint_url(config)) if self._folder and saves else None,
            journal_file=None if self._journal is None else self._journal.path,
            schedule=Schedule(config, spec.length),
            turns=turns,
            course=first_step_of(config, spec.data.size),
            stop=self._stop,
            evaluate=evaluate,
            step_hooks=steps,
            replica_hooks=replicas,
            phases=self._phases,
            folder=self._folder,
            lockstep=self._lockstep(transaction),
            score=spec.score,
            draws_after_exchange=bool(callbacks.modifiers)
            or any(not type(one).__module__.startswith("torch.optim.") for one in made),
        )

    def _lockstep(self, transaction: StepTransaction) -> Lockstep | None:
        """Return what computes the shards of a step together, where the model needs that."""
        spec = self._spec
        if not needs_lockstep(spec.module, spec.config, own_loop=spec.score is None):
            return None
        transaction.is_lockstep = True
        lockstep = Lockstep(
            self._team, spec.module, transaction, self._device, spec.config.seed, self._phases
        )
        self._closing.callback(lockstep.close)
        return lockstep

    def _checkpointer(self, store: CheckpointStore, parts: RunParts, run_id: str) -> Checkpointer:
        checkpointer = Checkpointer(
            parts.config.checkpoint,
            store,
            self._team,
            run=run_id,
            patience=parts.config.timeout,
            tell=parts.recorder.note_here,
            on_saved=partial(parts.callbacks.notify, Observer.on_checkpoint),
            writes=self._sees_folder or not store.storage.exclusive,
        )
        self._closing.callback(checkpointer.close)
        return checkpointer

    def _lock(self) -> None:
        """Reserve the run's folder and its place for checkpoints until the run ends. A launcher holds the
        folder itself; the first rank holds the rest. A refusal reaches all ranks alike."""
        refused: PacelineError | None = None
        context = self._team.context
        if context.is_master and self._folder is not None:
            try:
                if not self._stop.from_launcher:
                    self._closing.enter_context(held(self._folder.lock_file, str(self._folder.path)))
                place = local_place(self._folder, self._spec.config)
                if place is not None:
                    self._closing.enter_context(held(place / ".run", f"checkpoint.url={str(place)!r}"))
            except PacelineError as error:
                refused = error
        if context.world_size > 1:
            reason = context.broadcast(None if refused is None else [refused.message, refused.remedy])
            if refused is None and reason is not None:
                raise UsageError(f"rank 0 refuses the run: {reason[0]}", remedy=reason[1])
        if refused is not None:
            raise refused

    def _open_logs(self) -> Callable[[events.Event], None] | None:
        """Open this rank's log file and, without a supervisor, the journal; return what writes to it."""
        hooks, folder, team = self._hooks, self._folder, self._team
        if folder is not None and self._sees_folder:
            slot, workers = (
                (team.rank, team.world_size) if hooks is None else (hooks.slot, self._spec.config.workers)
            )
            self._worker_log = WorkerLog(folder.logs, slot, workers)
            self._closing.callback(self._worker_log.close)
        if hooks is not None:
            return hooks.tell
        if folder is None:
            return None
        self._journal = Journal(folder.journal_file)
        self._closing.callback(self._journal.close)
        return PatientJournal(self._journal).append

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._closing:
            if isinstance(error, Exception):
                self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        """Write to this rank's log; to the journal as well, unless it is another rank that failed."""
        if self._worker_log is not None:
            self._worker_log.say(logging.ERROR, "this rank failed", error)
        if self._journal is not None and not isinstance(error, PeerError):
            failed = events.WorkerFailed(
                time=time.time(),
                rank=self._rank,
                pid=os.getpid(),
                phase="training",
                reason=f"{type(error).__name__}: {first_line(error)}",
            )
            with suppress(PacelineError):  # the error itself is on its way, and says more
                self._journal.append(failed)


def _report(parts: RunParts, metric: events.MetricReported) -> None:
    """Send a number that the user's code reported to the journal, and to the observers that are here."""
    parts.recorder.note_here(metric)
    if parts.team.is_master:
        parts.callbacks.notify(Observer.on_metric, metric)


def local_place(folder: RunFolder, config: TrainConfig) -> Path | None:
    """Return the folder of checkpoints that are kept outside of the run's own; None for a URL far away."""
    if not config.checkpoint.enabled or config.checkpoint.url is None:
        return None
    storage = CheckpointStore(folder.checkpoint_url(config)).storage
    return Path(storage.url) if storage.exclusive else None
