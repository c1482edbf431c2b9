"""Puts a run together from what the user gave: model, objective, optimizer, data and settings; and takes it
up again from a checkpoint.

Must not know how the process was started, nor walk through the run.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import nn

from paceline.aggregate.strategy import Aggregation
from paceline.checkpoint.digests import digest_of
from paceline.checkpoint.store import CheckpointStore
from paceline.core import events
from paceline.core.errors import PacelineError, PeerError, UsageError
from paceline.core.journal import Journal, PatientJournal
from paceline.data.plan import Position
from paceline.data.sources import Source
from paceline.train import fingerprint, modifier_states, opening, optimizers, resuming, state as model_state
from paceline.train.callbacks import Callbacks, Modifier, Observer, RunInfo
from paceline.train.config import TrainConfig, definition, recorded_toml
from paceline.train.dynamic_batch import GradientNoise
from paceline.train.early_stop import EarlyStopper
from paceline.train.feed import open_feed
from paceline.train.optimizers import OptimizerFactory
from paceline.train.phases import Phases
from paceline.train.precision import LossScaler
from paceline.train.recorder import Recorder
from paceline.train.run import Run
from paceline.train.run_folder import RunFolder
from paceline.train.run_lock import held
from paceline.train.run_parts import Members, Parts
from paceline.train.saving import Contents, Saver
from paceline.train.schedule import Schedule, total_steps
from paceline.train.signals import StopRequest
from paceline.train.step import StepTransaction
from paceline.train.summation import Checks
from paceline.train.team import Team
from paceline.train.update import Update
from paceline.train.worker_log import WorkerLog

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Given:
    """What a run is made of, on every rank alike. `config` is resolved."""

    module: nn.Module
    optimizer: OptimizerFactory | torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    config: TrainConfig
    data: Source
    callbacks: Sequence[Observer | Modifier] = ()
    folder: Path | None = None
    observers: Sequence[Observer] = field(default_factory=tuple)  # of the main rank only
    aggregation: Aggregation | None = None


@dataclass(frozen=True)
class LookedAfter:
    """What is different where a supervisor looks after the run: it keeps the journal and the folder, and
    members come and go, some of machines that do not see the folder. `slot`: this worker, for people."""

    members: Members
    tell: Callable[[events.Event], None]
    slot: int
    checks: Checks = field(default_factory=Checks)
    sees_folder: bool = True


@final
class Assembled:
    """A run and the parts that have to be closed after it: use it with `with`, or an ExitStack."""

    def __init__(
        self,
        team: Team,
        given: Given,
        device: torch.device,
        stop: StopRequest,
        *,
        looked_after: LookedAfter | None = None,
        phases: Phases | None = None,
    ) -> None:
        self.team, self._given, self._device = team, given, device
        # As the job knows this worker: a member that saves alone is rank 0 of the group that it makes.
        self._rank = team.context.rank
        self._looked_after, self._phases = looked_after, phases or Phases()
        self.module = given.module
        self.folder = None if given.folder is None else RunFolder(given.folder)
        self.saver: Saver | None = None
        self.first_step = 0  # of this process
        self.parent: int | None = None
        self._mark = secrets.token_hex(8)  # of this run, in all its versions
        self._ended: str | None = None  # why the run was over when it was saved
        self._evaluated: int | None = None
        self._closing = ExitStack()
        try:
            self._build(team, given, device, stop)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _build(self, team: Team, given: Given, device: torch.device, stop: StopRequest) -> None:
        config, looked_after = given.config, self._looked_after
        self._sees_folder = looked_after is None or looked_after.sees_folder
        self._worker_log: WorkerLog | None = None
        self.journal: Journal | None = None
        tell = None if looked_after is None else looked_after.tell
        if looked_after is None:
            self._hold(stop)
        if self.folder is not None:
            slot, workers = (
                (team.rank, team.world_size) if looked_after is None else (looked_after.slot, config.workers)
            )
            if self._sees_folder:
                self._worker_log = WorkerLog(self.folder.logs, slot, workers)
                self._closing.callback(self._worker_log.close)
            if looked_after is None:
                self.journal = Journal(self.folder.journal_file)
                self._closing.callback(self.journal.close)
                tell = PatientJournal(self.journal).append
        self.store = (
            CheckpointStore(self.folder.checkpoint_url(config))
            if self.folder is not None and config.checkpoint.enabled
            else None
        )
        self.callbacks = Callbacks([*given.callbacks, *(given.observers if team.is_master else ())])
        self.recorder = Recorder(
            self.callbacks,
            tell,
            device,
            lambda: team.is_master,
            lambda: time.monotonic() if looked_after is None else looked_after.members.heard_at,
        )
        self.optimizers = optimizers.build(given.optimizer, given.module)
        checks = None if looked_after is None else looked_after.checks
        self.transaction = StepTransaction(
            team, given.module, config, device, checks=checks, aggregation=given.aggregation
        )
        self._closing.callback(self.transaction.close)
        scaler = LossScaler(config.loss_scaling) if config.precision == "fp16" else None
        self.update = Update(
            self.transaction.trained,
            self.optimizers,
            clip_norm=config.clip_norm,
            scaler=scaler,
            change_gradients=self.callbacks.change_gradients if self.callbacks.changes_gradients else None,
        )
        self._noise = None if config.dynamic_batch is None else GradientNoise(config.dynamic_batch)
        self._early = None if config.early_stopping is None else EarlyStopper(config.early_stopping)
        self._feed = open_feed(given.data, config, team)
        self._closing.callback(self._feed.close)
        self.fingerprint = fingerprint.fingerprint(device, torch.get_num_threads())
        self.total_steps = total_steps(config, given.data.size)
        self._stop = stop
        self.config = config

    def _hold(self, stop: StopRequest) -> None:
        """Nobody else runs in this folder or saves to this place until the run ends. Where a launcher looks
        after the run, it holds the folder; the first rank the rest. All ranks are refused alike."""
        refused: PacelineError | None = None
        if self.team.context.is_master and self.folder is not None:
            try:
                if not stop.from_launcher:
                    self._closing.enter_context(held(self.folder.lock_file, str(self.folder.path)))
                place = local_place(self.folder, self._given.config)
                if place is not None:
                    self._closing.enter_context(held(place / ".run", f"checkpoint.url={str(place)!r}"))
            except PacelineError as error:
                refused = error
        if self.team.context.world_size > 1:
            told = self.team.context.broadcast(None if refused is None else [refused.message, refused.remedy])
            if refused is None and told is not None:
                raise UsageError(f"rank 0 refuses the run: {told[0]}", remedy=told[1])
        if refused is not None:
            raise refused

    @property
    def shards(self) -> int:
        return self.team.shards

    @property
    def seekable(self) -> bool:
        """Whether every rank can read any sample by its number."""
        return self._given.data.size is not None

    @property
    def workers(self) -> int:
        return self.team.world_size

    def run(self, evaluate: Callable[[], tuple[dict[str, float], int]] | None = None) -> Run:
        """The run at its position: the beginning, or where a checkpoint left it. Where members come and go,
        the position is known once this one is a member."""
        if self.store is not None:
            self.saver = Saver(
                self._given.config.checkpoint,
                self.store,
                self.team,
                run=self._mark,
                patience=self._given.config.timeout,
                tell=self.recorder.note_here,
                on_saved=self.callbacks.checkpoint,
                writes=self._sees_folder or not self.store.storage.exclusive,
            )
            self._closing.callback(self.saver.close)
        parts = Parts(
            team=self.team,
            config=self._given.config,
            device=self._device,
            module=self._given.module,
            transaction=self.transaction,
            update=self.update,
            schedule=Schedule(self._given.config, self.total_steps),
            feed=self._feed,
            recorder=self.recorder,
            callbacks=self.callbacks,
            stop=self._stop,
            noise=self._noise,
            early=self._early,
            saver=self.saver,
            evaluate=evaluate,
            contents=self.contents,
            members=None if self._looked_after is None else self._looked_after.members,
            phases=self._phases,
            draws_after_exchange=bool(self.callbacks.modifiers)
            or any(not type(made).__module__.startswith("torch.optim.") for made in self.optimizers),
        )
        run = Run(parts)
        if self._looked_after is None:
            self.take_up(run, self._given.config.resume)
        return run

    def take_up(self, run: Run, which: str | int | None, before: int = -1, *, fresh: bool = True) -> None:
        """All ranks together: the beginning, or the state of a checkpoint; `before` >= 0: of at most that
        step. `fresh`: this rank has not trained before."""
        resuming.check_alike(self.team.context, self.config, self.fingerprint, self.module, fresh=fresh)
        position, residuals = self._resume(which, before)
        self.transaction.load_residuals(residuals, position.step)
        self._mark = str(self.team.context.broadcast(self._mark))
        self.first_step = position.step
        self._start_journal(position, disowned=before >= 0)
        if self.saver is not None:
            self.saver.begin_from(self.parent, position.step, self._mark)
        run.begin_at(position)
        run.ended, run.evaluated_step = self._ended, self._evaluated
        if self.parent is not None and run.ended is None:
            run.owe_evaluation()

    def disown_after(self, step: int) -> None:
        """What was saved after `step` is not to be trusted: whoever reads for all of them removes it."""
        if self.store is None or self.saver is None:
            return
        if self.team.context.rank == next(iter(self.saver.writers), None):
            resuming.discard_after(self.store, step)

    def digest(self) -> str:
        """Of the parameters and the optimizers' state: the same on members that are equally far. Not of the
        buffers, which move while the shards of an open step are computed."""
        module = self._given.module
        tensors = {model_state.MODEL + name: one.detach() for name, one in module.named_parameters()}
        tensors |= optimizers.tensors_of(self.optimizers, module)
        return digest_of(tensors)

    # the state of a member for one that lacks it: a checkpoint that never lies on a disk

    def hand_over(self, run: Run) -> Contents:
        """Everything that the run is, and what is due; not what this member's shards owe: those who need that
        get it from the members that have it (`share_residuals`)."""
        self.recorder.flush()
        self.transaction.settle(run.position.step)
        contents = self.contents(run)
        extra = {
            "agenda": run.agenda_dict(),
            "saving": None if self.saver is None else self.saver.state_dict(),
            "first_step": self.first_step,
        }
        return Contents(contents.tensors, {}, {**contents.state, **extra})

    def take_over(self, run: Run, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """The state of another member becomes this one's; what only this one has goes the same way."""
        position = Position(**state["position"])
        self.transaction.settle(position.step)
        # Before, not after: it puts the buffers back that the open step began with.
        self.transaction.abandon()
        self._put(state, tensors)
        self.first_step = state["first_step"]
        if self.saver is not None and state["saving"] is not None:
            self.saver.load_state_dict(state["saving"])
        run.begin_at(position)
        run.evaluated_step = state["evaluated"]
        run.load_agenda_dict(state["agenda"])

    def rebind(self) -> None:
        """The team has another group."""
        self.transaction.rebind()
        if self.saver is not None:
            self.saver.rebind(self._newest)

    def _newest(self) -> tuple[int, int] | None:
        """What the store holds; another rank may have saved it."""
        assert self.store is not None
        try:
            manifests = self.store.manifests()
        except PacelineError as error:
            _log.warning("the newest version is not known: %s", error.message)
            return None
        return (manifests[-1].version, manifests[-1].info.step) if manifests else None

    def info(self, run: Run) -> RunInfo:
        """What observers are told before the first step."""
        return RunInfo(
            config=self.config,
            workers=self.workers,
            total_steps=self.total_steps,
            samples=self._given.data.size,
            first_step=run.position.step,
            first_epoch=run.position.epoch,
            run_dir=None if self.folder is None else str(self.folder.path),
            device=str(self._device),
        )

    def contents(self, run: Run) -> Contents:
        """Everything that the run is, for a checkpoint."""
        module, config = self._given.module, self._given.config
        tensors = {model_state.MODEL + n: t for n, t in model_state.model_tensors(module).items()}
        tensors |= optimizers.tensors_of(self.optimizers, module)
        modifiers, modified = modifier_states.split(self.callbacks.state_dict())
        tensors |= modified
        tensors, pairs = model_state.as_pairs(tensors)
        own = {model_state.RESIDUAL + n: t for n, t in self.transaction.residuals().items()}
        scaler = self.update.scaler
        plain = {
            "format": resuming.FORMAT,
            "position": vars(run.position),
            "ended": run.over,
            "evaluated": run.evaluated_step,
            "model": model_state.model_names(module),
            "optimizers": optimizers.plain_state_of(self.optimizers, module),
            "scaler": None if scaler is None else scaler.state_dict(),
            "dynamic_batch": None if self._noise is None else self._noise.state_dict(),
            "early_stopping": None if self._early is None else self._early.state_dict(),
            "patience": _patience(config),
            "modifiers": modifiers,
            "data": {"size": self._given.data.size, "feed": self._feed.state_dict()},
            "records": self.recorder.state_dict(),
            "definition": definition(config),
            "config": recorded_toml(config),
            "fingerprint": self.fingerprint,
            "pairs": pairs,
        }
        return Contents(tensors, own, plain)

    @property
    def stop_asked(self) -> bool:
        return self._stop.asked()

    @property
    def stop_reason(self) -> str:
        return self._stop.reason or "a signal to another worker"

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._closing:
            if isinstance(error, Exception):
                self._say_failed(error)

    def _say_failed(self, error: Exception) -> None:
        """Into this rank's log; into the journal as well, unless it is another rank that failed."""
        if self._worker_log is not None:
            self._worker_log.say(logging.ERROR, "this rank failed", error)
        if self.journal is not None and not isinstance(error, PeerError):
            lines = str(error).splitlines() or [""]
            failed = events.WorkerFailed(
                time=time.time(),
                rank=self._rank,
                pid=os.getpid(),
                phase="training",
                reason=f"{type(error).__name__}: {lines[0]}",
            )
            with suppress(PacelineError):  # the error itself is on its way, and says more
                self.journal.append(failed)

    # taking up a run

    def _resume(self, which: str | int | None, before: int) -> tuple[Position, dict[str, torch.Tensor]]:
        """Where the run goes on from, and what its shards owe there."""
        if which is None or self.store is None:
            return Position(), {}
        readers = None if self.saver is None else self.saver.writers
        found = resuming.fetch(self.team.context, self.store, which, before, readers)
        if found is None:
            return Position(), {}
        resuming.check_same_run(found, self._given.config, self._given.data.size)
        self._put(found.state, model_state.from_pairs(found.tensors, found.state["pairs"]))
        self.parent, self._mark = found.version, found.run or self._mark
        residuals = {
            name.removeprefix(model_state.RESIDUAL): tensor
            for name, tensor in found.tensors.items()
            if name.startswith(model_state.RESIDUAL)
        }
        return Position(**found.state["position"]), residuals

    def _put(self, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """A saved state becomes that of model, optimizers and everything else."""
        config = self._given.config
        model_state.load_model(self._given.module, tensors)
        optimizers.load(self.optimizers, self._given.module, saved["optimizers"], tensors)
        if self.update.scaler is not None and saved["scaler"] is not None:
            self.update.scaler.load_state_dict(saved["scaler"])
        if self._noise is not None and saved["dynamic_batch"] is not None:
            self._noise.load_state_dict(saved["dynamic_batch"])
        if self._early is not None and saved["early_stopping"] is not None:
            self._early.load_state_dict(saved["early_stopping"])
        self.callbacks.load_state_dict(modifier_states.joined(saved["modifiers"], tensors, self._device))
        self._ended = None
        # Over is over, unless what ended the run has been changed or taken away.
        if saved["patience"] == _patience(config) and (self._early is not None or self.callbacks.may_stop):
            self._ended = saved["ended"]
        self._evaluated = saved["evaluated"]
        self.recorder.load_state_dict(saved["records"])
        self._feed.load_state_dict(saved["data"]["feed"])
        if config.mode == "exact":
            fingerprint.check(saved["fingerprint"], self.fingerprint, f"rank {self.team.context.rank}")

    def _start_journal(self, position: Position, *, disowned: bool) -> None:
        recorder, team = self.recorder, self.team
        if self._looked_after is None:
            opening.note_workers(recorder, team)
        if self.parent is not None:
            file = None if self.journal is None else self.journal.path
            opening.note_resumed(recorder, team, self.parent, position, file, disowned=disowned)
        else:
            opening.note_started(
                recorder,
                team,
                self._given.config,
                self._given.data.size,
                self.fingerprint,
                disowned=disowned,
            )


def local_place(folder: RunFolder, config: TrainConfig) -> Path | None:
    """The folder of checkpoints that are kept outside of the run's own; None for a URL far away."""
    if not config.checkpoint.enabled or config.checkpoint.url is None:
        return None
    storage = CheckpointStore(folder.checkpoint_url(config)).storage
    return Path(storage.url) if storage.exclusive else None


def _patience(config: TrainConfig) -> dict[str, Any] | None:
    return None if config.early_stopping is None else asdict(config.early_stopping)
