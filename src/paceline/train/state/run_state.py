"""State of a run on one rank: its one home, for checkpoints, state transfer and resume alike.

    export   tensors by name and plain data: everything another process needs to continue with the same bits
    load     the reverse: model, optimizers, scaler, modifiers, data position, records
    hash     of parameters and optimizer state: equal on ranks that are equally far

A checkpoint writes what `export` returns (checkpointing.py), a resume loads it (resume.py), a member that
lacks the state gets it from one that has it (`synchronize`) together with the agenda, which no checkpoint
holds. Tensors: parameters and buffers as "model/<name>", those of the best evaluation as "best/<name>",
optimizer state as "optimizer/<number>/<parameter>/<key>", tensors of schedulers as
"scheduler/<number>.<...>", residuals of compression as "residual/<dtype>/<shard>"; complex128 as pairs of
doubles. Randomness needs no entry: generators are seeded from (seed, epoch, step, shard), so the position is
enough. The loop that changes this state is in loop/run.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.digests import digest_of
from paceline.checkpoint.store import CheckpointStore
from paceline.comm.state_transfer import receive_state, send_state
from paceline.control.field_types import Progress
from paceline.data.batch_plan import DataPosition
from paceline.train import host_fingerprint
from paceline.train.callbacks import Callbacks
from paceline.train.settings.dynamic_batch import GradientNoise
from paceline.train.settings.schedule import EarlyStopper
from paceline.train.settings.train_config import TrainConfig, definition, recorded_toml
from paceline.train.state import model_state, modifier_states, optimizers
from paceline.train.state.best_weights import BestWeights
from paceline.train.state.checkpointing import Checkpointer, RunContents
from paceline.train.state.duty_progress import Agenda, Duty
from paceline.train.state.recorder import Recorder
from paceline.train.state.schedulers import TorchSchedulers
from paceline.train.step.batch_feed import BatchFeed
from paceline.train.step.replica_agreement import WeightSample, WeightWatch
from paceline.train.step.step_hashes import StepHashes
from paceline.train.step.transaction import StepTransaction
from paceline.train.step.weight_update import WeightUpdate
from paceline.train.team import Team

FORMAT = 1


@dataclass(kw_only=True)
class StateParts:
    """The objects that hold the state of a run. `samples`: of the training data; None for a stream.

    `journal_file`: the run's journal, where this process writes it; a supervisor writes its own.
    """

    team: Team
    config: TrainConfig
    device: torch.device
    module: nn.Module
    optimizers: list[Optimizer]
    schedulers: TorchSchedulers
    transaction: StepTransaction
    update: WeightUpdate
    recorder: Recorder
    callbacks: Callbacks
    feed: BatchFeed
    samples: int | None
    fingerprint: dict[str, str]
    noise: GradientNoise | None = None
    early: EarlyStopper | None = None
    store: CheckpointStore | None = None
    checkpointer: Checkpointer | None = None
    journal_file: Path | None = None
    order: Mapping[str, Any] | None = None  # of the data, where it has one of its own


@final
class RunState:
    """The state of one rank. Equal on all ranks after each committed step, but for residuals of compression,
    which belong to the shards that a rank computes."""

    def __init__(self, parts: StateParts) -> None:
        self.parts = parts
        self.run_id = secrets.token_hex(8)  # in all versions of this run
        self.position = DataPosition()
        self.agenda = Agenda()  # since the last commit
        self.ended: str | None = None  # why, before the end of what was asked for
        self.stopped_on_request = False
        self.loop_left = False  # by a loop of the user's, which may come back
        self.failing = False  # the run cannot continue: its last state is saved
        self.at_boundary = True  # the state is that of a step boundary, once the open step is abandoned
        self.evaluated_step: int | None = None
        self.agreed_step = 0  # the last step after which all ranks were seen to hold the same state
        # Of all ranks, at the end: the hash, whether a stop was asked for, why the last save failed.
        self.final_hashes: list[list[Any]] = []
        self.restored: int | None = None  # the step whose weights these are, where it is not the last
        self.first_step = 0  # that this process started from
        self.parent: int | None = None  # the version that this process resumed from
        self.best = BestWeights(parts.module)
        self.sample = WeightSample(parts.module.parameters())
        self.watch = WeightWatch(self.sample, parts.module.parameters())
        self.hashes = StepHashes(self.sample.parts)
        if self.hashes.needed:
            parts.transaction.watch_contributions()

    @property
    def progress(self) -> Progress:
        """Progress of this rank; ranks that trained together differ by what one collective decides."""
        return self.position.step, self.position.epoch, self.agenda.done

    def step_to_restore(self) -> int | None:
        """Return the step of the best evaluation, whose weights a run returns at its end instead of its last.
        None for a run that will continue, and where the last weights are the best."""
        early, best, evaluations = self.parts.early, self.best.step, self.parts.recorder.evaluations
        if early is None or not early.restores or best is None:
            return None
        if best == self.position.step and self.parts.callbacks.evaluation_weights() is None:
            return None
        last = evaluations[-1:]
        # The evaluation at the end of a run takes no part in early stopping.
        if last and last[0].step == self.position.step and early.improves(last[0].metrics):
            return None
        return None if self.stopped_on_request or self.loop_left else best

    def weights_hash(self) -> str:
        """Return the hash of the model that journal and history have: of parameters and buffers."""
        return model_state.state_hash(self.parts.module)

    def hash(self) -> str:
        """Return the digest of the parameters and the optimizers' state, without the buffers, which move
        while the shards of an open step are computed."""
        module = self.parts.module
        tensors = {model_state.MODEL + name: one.detach() for name, one in module.named_parameters()}
        tensors |= optimizers.tensors_of(self.parts.optimizers, module)
        return digest_of(tensors)

    # export and load

    def export(self) -> RunContents:
        """Return all of the state. Tensors are views of the live ones, not copies."""
        parts, module, scaler = self.parts, self.parts.module, self.parts.update.scaler
        tensors = {model_state.MODEL + n: t for n, t in model_state.model_tensors(module).items()}
        tensors |= optimizers.tensors_of(parts.optimizers, module)
        tensors |= parts.schedulers.tensors()
        tensors |= self.best.export()
        modifiers, modified = modifier_states.split(parts.callbacks.state_dict())
        tensors |= modified
        tensors, pairs = model_state.as_pairs(tensors)
        own = {model_state.RESIDUAL + n: t for n, t in parts.transaction.residuals.export().items()}
        plain = {
            "format": FORMAT,
            "position": vars(self.position),
            # A run that was asked to stop, or whose loop the user left, continues when it is resumed.
            "ended": None if self.stopped_on_request or self.loop_left else self.ended,
            "evaluated": self.evaluated_step,
            "model": model_state.model_names(module),
            "optimizers": optimizers.plain_state_of(parts.optimizers, module),
            "schedulers": parts.schedulers.plain_state(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "dynamic_batch": None if parts.noise is None else parts.noise.state_dict(),
            "early_stopping": None if parts.early is None else parts.early.state_dict(),
            "patience": self._patience(),
            "best_step": self.best.step,
            "modifiers": modifiers,
            "data": {"size": parts.samples, "feed": parts.feed.state_dict()},
            "records": parts.recorder.state_dict(),
            "definition": definition(parts.config, parts.order),
            "config": recorded_toml(parts.config),
            "fingerprint": parts.fingerprint,
            "pairs": pairs,
        }
        return RunContents(tensors, own, plain)

    def load(self, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Load the state that `export` returned, at its position, with an empty agenda. Residuals are not
        part of it: their shards may belong to other ranks now."""
        parts = self.parts
        # First: abandoning the open step restores the buffers that it began with.
        self.begin_at(DataPosition(**saved["position"]))
        tensors = model_state.from_pairs(tensors, saved["pairs"])
        model_state.load_model(parts.module, tensors)
        scheduled = bool(parts.schedulers)
        optimizers.load(parts.optimizers, parts.module, saved["optimizers"], tensors, scheduled=scheduled)
        parts.schedulers.load(saved.get("schedulers", ()), tensors)  # an earlier format had none
        if parts.update.scaler is not None and saved["scaler"] is not None:
            parts.update.scaler.load_state_dict(saved["scaler"])
        if parts.noise is not None and saved["dynamic_batch"] is not None:
            parts.noise.load_state_dict(saved["dynamic_batch"])
        if parts.early is not None and saved["early_stopping"] is not None:
            parts.early.load_state_dict(saved["early_stopping"])
        # A run that does not restore them keeps them no longer; versions of earlier releases have none.
        restores = parts.early is not None and parts.early.restores
        self.best.load(saved.get("best_step") if restores else None, tensors)
        parts.callbacks.load_state_dict(modifier_states.joined(saved["modifiers"], tensors, parts.device))
        # A run that had ended stays ended, unless what ended it has been changed or removed.
        if saved["patience"] == self._patience() and (parts.early is not None or parts.callbacks.may_stop):
            self.ended = saved["ended"]
        self.evaluated_step = saved["evaluated"]
        parts.recorder.load_state_dict(saved["records"])
        parts.feed.load_state_dict(saved["data"]["feed"])
        if parts.config.mode == "exact":
            context = parts.team.context
            host_fingerprint.check(
                saved["fingerprint"], parts.fingerprint, f"rank {context.labels[context.rank]}"
            )

    def begin_at(self, position: DataPosition) -> None:
        """Be at a step boundary, with an empty agenda; the weights are the caller's."""
        self.parts.transaction.abandon()
        self.position, self.agreed_step = position, position.step
        self.hashes.clear()
        self.watch.forget()
        self.agenda.clear()
        self.ended, self.stopped_on_request = None, False

    def _patience(self) -> dict[str, Any] | None:
        settings = self.parts.config.early_stopping
        if settings is None:
            return None
        return {name: value for name, value in asdict(settings).items() if name != "restore_best"}

    # state transfer: a checkpoint that never touches a disk

    def rebind(self) -> None:
        """Adapt to the team's new group. An open step continues with the shards that are held."""
        self.parts.transaction.rebind()
        if self.parts.checkpointer is not None:
            self.parts.checkpointer.rebind()

    def synchronize(self, source: int, stale: Sequence[int]) -> None:
        """Bring the ranks `stale` to the state of rank `source`; a collective call of the new group.

        Residuals do not travel with the state: the ranks that compute the shards from now on get them from
        the ranks that have them.
        """
        context, transaction = self.parts.team.context, self.parts.transaction
        if context.rank == source and stale:
            contents = self._export_for_transfer()
            send_state(context, stale, contents.tensors, contents.state)
        elif context.rank in stale:
            tensors, state = receive_state(context, source)
            transaction.residuals.settle(DataPosition(**state["position"]).step)
            self._import_transferred(tensors, state)
        transaction.residuals.settle(self.position.step)
        transaction.residuals.share()

    def _export_for_transfer(self) -> RunContents:
        self.parts.recorder.flush()
        self.parts.transaction.residuals.settle(self.position.step)
        contents, checkpointer = self.export(), self.parts.checkpointer
        agenda = {
            **self.agenda.state_dict(),
            "ended": self.ended,
            "stopped_on_request": self.stopped_on_request,
            "left": self.loop_left,
            "final_hashes": self.final_hashes,
            "restored": self.restored,
            "agreed": self.agreed_step,
        }
        saving = None if checkpointer is None else checkpointer.state_dict()
        extra = {"agenda": agenda, "saving": saving, "first_step": self.first_step}
        return RunContents(contents.tensors, {}, {**contents.state, **extra})

    def _import_transferred(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.load(state, tensors)
        self.first_step = state["first_step"]
        if self.parts.checkpointer is not None and state["saving"] is not None:
            self.parts.checkpointer.load_state_dict(state["saving"])
        agenda = state["agenda"]
        self.agenda.load_state_dict(agenda)
        self.ended, self.agreed_step = agenda["ended"], agenda["agreed"]
        self.stopped_on_request, self.loop_left = agenda["stopped_on_request"], agenda["left"]
        self.final_hashes, self.restored = list(agenda["final_hashes"]), agenda["restored"]

    # the end of a run that cannot continue

    def save_and_end(self, reason: str) -> None:
        """Replace the agenda: this rank, like all others, saves the state of the last committed step and
        ends. No code of the user's is called: it is what failed."""
        self.parts.transaction.abandon()
        self.ended, self.stopped_on_request, self.failing = reason, True, True
        self.agenda.clear(concluding=True)
        if self.parts.checkpointer is not None:
            self.agenda.add(Duty.SAVE_LAST)
            self.agenda.add(Duty.DRAIN_CHECKPOINTS)
        self.agenda.add(Duty.COMPARE_WEIGHTS)

    @property
    def worth_saving(self) -> bool:
        """Whether a rank whose code has raised holds a state that no version has yet."""
        checkpointer = self.parts.checkpointer
        if checkpointer is None or not self.at_boundary or self.failing:
            return False
        return self.position.step > checkpointer.begun_step
