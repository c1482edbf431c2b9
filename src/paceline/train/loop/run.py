"""A run on one rank: the steps that its parts take together.

    while the run is not over:
        the position of a step determines which samples it takes    feed
        for each shard of this rank, each of its micro-batches:     handed out, `backward` comes back
        the shards of all ranks become one gradient                 transaction
        the gradient changes the model; the step is committed       update
        the step is recorded; evaluate, save, stop when due         recorder, agenda

Both the trainer and a loop of the user's own (`session`) iterate over `microbatches`. `Run` does not know its
supervisor: when the group fails, in a step or in the agenda, it raises GroupChangedError to its driver, which
installs another group and iterates again (`worker_jobs.train_to_end`). The state of the run is `RunState`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from paceline.core import events
from paceline.core.errors import GROUP_FAILURES, UsageError
from paceline.core.wording import counted
from paceline.data.batch_plan import DataPosition, slices_of_step
from paceline.data.seeding import seed_everything
from paceline.data.sources import Batch
from paceline.train.loop.duties import Duties
from paceline.train.loop.replica_checks import ReplicaChecks
from paceline.train.loop.run_hooks import GroupChangedError, MicroBatch, RunParts
from paceline.train.objective import ObjectiveResult
from paceline.train.phases import BACKWARD, COLLECTIVE, DATA, FORWARD, OPTIMIZER
from paceline.train.state import modifier_states
from paceline.train.state.recorder import PendingStep
from paceline.train.state.repeatable_changes import RepeatableChanges
from paceline.train.state.run_state import RunState
from paceline.train.step import misuse_guard, replica_agreement
from paceline.train.step.batch_feed import to_device
from paceline.train.step.lockstep import Lockstep, ShardWork
from paceline.train.step.misuse_guard import NonFiniteLossError, is_finite
from paceline.train.step.step_counters import ReducedStep, StepRequests
from paceline.train.step.weight_update import AppliedUpdate
from paceline.train.step_info import StepInfo

_log = logging.getLogger(__name__)

DRY_STEPS = 2
"""Of a dry run: two epochs of one step each."""
_ONCE = "call run.backward(loss) exactly once for every micro-batch"


@final
class Run:
    """One rank's share of a run; every rank goes through the same steps."""

    def __init__(self, parts: RunParts, state: RunState) -> None:
        self.parts, self.state = parts, state
        self._replicas = ReplicaChecks(parts, state)
        self.duties = Duties(parts, state, self._replicas)
        self._saver_prepared = False
        self._modifiers_checked = False
        self._learns: set[int | None] = set()  # turns in which a step of this process gave a gradient
        self._said_spoiled = False
        self._changes = RepeatableChanges(parts.callbacks)
        self._pause = False  # after the step that was just committed
        self._pending = 0  # samples of a micro-batch that was handed out and has not come back
        self._planned = 0  # samples of the open step
        self._counts: list[int] = []  # by shard

    @property
    def batch(self) -> int:
        """Samples of the next full step."""
        noise = self.parts.noise
        if noise is not None:
            return noise.batch
        return self.parts.feed.full_step or self.parts.config.global_batch

    @property
    def finished(self) -> bool:
        config, position = self.parts.config, self.state.position
        return (
            self.state.ended is not None
            or (config.max_steps is not None and position.step >= config.max_steps)
            or (config.dry_run and position.step >= DRY_STEPS)
            or (config.epochs is not None and position.epoch >= config.epochs)
        )

    def microbatches(self) -> Generator[MicroBatch, None, None]:
        """Yield every micro-batch of this rank, to the end of the run; after each one `backward` is due."""
        parts, state = self.parts, self.state
        parts.recorder.start_clock()
        parts.update.watch()
        self._pending = 0
        try:
            yield from self._steps()
        except GeneratorExit:
            # The loop was left within a step, which then never happened.
            state.loop_left = state.ended is None
            state.ended = state.ended or "the loop was left"
            parts.transaction.abandon()
            raise

    def one_step(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the next step, which is committed when the iteration ends: for a caller
        that decides by itself when the next one begins, and that no agenda follows."""
        self._pending = 0
        self.parts.recorder.start_clock()
        with self._failures_change_the_group():
            yield from self._step()

    def _steps(self) -> Iterator[MicroBatch]:
        state = self.state
        with self._failures_change_the_group():
            while True:
                if self._pause:
                    # All ranks agreed on it in the step's exchange, so none of them waits in a collective for
                    # a rank that has left. Before the agenda: members that join take part in its duties.
                    self._pause = False
                    raise GroupChangedError
                # Counted duty by duty: after a failure the next group continues with the one that failed.
                state.agenda.work_off(self.duties.do)
                if self.finished or state.agenda.concluding:
                    return
                yield from self._step()

    def conclude(self) -> bool:
        """Do the last evaluation and checkpoint, and agree with all ranks on the result.

        False: the run is not at its end, because the group went back to a checkpoint when it changed (a
        member was lost with state that no other member has, or ranks differ): the steps since then have to be
        done again.
        """
        if not self.state.agenda.concluding:
            if not self.finished:
                return False
            self.duties.plan_conclusion()
        with self._failures_change_the_group():
            self.state.agenda.work_off(self.duties.do)
        return True

    @contextmanager
    def _failures_change_the_group(self) -> Iterator[None]:
        """Raise a failure of the group to the driver as GroupChangedError.

        The run itself is left as it is: an open step keeps its computed shards, the agenda the duties that
        were done. What to do with them depends on the next group, which only the driver can get.
        """
        try:
            yield
        except GROUP_FAILURES as failure:
            # A pause that was agreed on is overtaken: the driver changes the group now.
            self._pause = False
            raise GroupChangedError(failure) from failure

    # one step

    def _step(self) -> Iterator[MicroBatch]:
        parts, position = self.parts, self.state.position
        feed, transaction, phases = parts.feed, parts.transaction, parts.phases
        phases.step = position.step + 1
        phases.enter(DATA)
        held = transaction.held
        self._planned = feed.step(position, self.batch, transaction.missing if held else None)
        if self._planned == 0:
            self.duties.plan_end_of_epoch()
            return
        scaler = parts.update.scaler
        slices = slices_of_step(position.offset, self._planned, self.batch, parts.team.shards)
        self._counts = [part.count for part in slices]
        turn = parts.turns.at(position.step)
        info = parts.course.at(position.step, position.epoch, turn)
        transaction.resting = parts.turns.resting(turn)
        transaction.open(position.epoch, position.step, self._counts, scaler.scale if scaler else 1.0)
        first = position.step == 0 and not self._modifiers_checked
        modifiers = modifier_states.digests(parts.callbacks) if first else {}
        batches: Callable[[int], Iterable[Batch]] = feed.batches
        lasted = None
        if parts.lockstep is not None:
            batches, lasted = self._compute_together(parts.lockstep, info), parts.lockstep.shard_seconds
        for shard in parts.step_hooks.shards_to_compute(phases.step, transaction.missing, lasted):
            transaction.start_shard(shard)
            for batch in batches(shard):
                if batch.skipped:
                    transaction.leave_out(len(batch.skipped))
                    self._note_skipped(batch)
                if not batch.count:
                    continue
                self._pending = batch.count
                data = to_device(batch.data, parts.device)
                if parts.lockstep is None:
                    phases.enter(FORWARD)
                yield MicroBatch(data, batch.count, shard, info)
                if self._pending:
                    raise UsageError(
                        f"step {position.step}: a micro-batch of {counted(batch.count, 'sample')} was handed "
                        "out and no backward came back",
                        remedy=_ONCE,
                    )
                phases.enter(DATA)  # the next batch is fetched
            transaction.finish_shard(shard)
        if first:
            self._modifiers_checked = True
            modifier_states.check_batch_changers(modifiers, parts.callbacks)
        self._commit()

    def _compute_together(self, lockstep: Lockstep, info: StepInfo) -> Callable[[int], list[Batch]]:
        """Compute all shards of this rank at once; return their batches. The micro-batches that are handed
        out afterwards are computed: `taken` has their losses."""
        parts, score = self.parts, self.parts.score
        assert score is not None
        read = {
            shard: [
                replace(batch, data=to_device(batch.data, parts.device))
                for batch in parts.feed.batches(shard)
            ]
            for shard in parts.transaction.missing
        }
        micros = [
            MicroBatch(batch.data, batch.count, shard, info)
            for shard, batches in read.items()
            for batch in batches
            if batch.count
        ]
        parts.phases.enter(FORWARD)
        change = parts.callbacks.change_batch
        work = [ShardWork(micro.shard, micro.count, partial(score, micro, change)) for micro in micros]
        lockstep.compute(info.epoch, info.step, work)
        return read.__getitem__

    def taken(self, micro: MicroBatch) -> ObjectiveResult | None:
        """Return what a step that computes its shards together has of this micro-batch, whose gradients are
        the parameters' from now on; None: it is to be computed."""
        return None if self.parts.lockstep is None else self.parts.lockstep.take(micro.shard)

    def backward(self, loss: Tensor, metrics: Mapping[str, Any] | None = None) -> None:
        """Compute the gradients of the loss (a mean) of the micro-batch that was handed out last."""
        if not self._pending:
            raise UsageError("backward was called without a micro-batch, or twice for one", remedy=_ONCE)
        count, self._pending = self._pending, 0
        if self.parts.lockstep is not None:
            self.parts.transaction.count(loss, count, metrics)
            return
        self.parts.phases.enter(BACKWARD)
        self.parts.transaction.backward(loss, count, metrics)

    def _commit(self) -> None:
        parts, state = self.parts, self.state
        position, batch = state.position, self.batch
        reduced, sample = self._reduce()
        # Buffers have moved: until the update is through, the state is that of no step.
        state.at_boundary = False
        hashed = None if sample is None else self._replicas.sample_agreed(sample)
        self._check_learns(reduced)
        parts.phases.enter(OPTIMIZER)
        step, epoch = position.step, position.epoch
        if parts.draws_after_exchange:
            # What draws numbers from here on does so on every rank, and must draw the same ones.
            seed_everything(parts.config.seed, epoch, step, parts.team.shards)
        try:
            factor = parts.schedule.factor(step, batch)
            with self._changes.undone_when_the_group_fails(parts.team.context, step + 1):
                applied = self._apply(factor, step, reduced)
        except GROUP_FAILURES:
            # A modifier communicates with the other ranks, and one of them is gone. No weight has changed
            # yet: the decided step is undone, and repeated, or taken over from a rank that came through.
            parts.transaction.undo()
            state.at_boundary = True
            raise
        parts.transaction.updated()
        if not applied.skipped:
            info = parts.course.at(step, epoch, parts.turns.at(step))
            parts.callbacks.after_update(parts.transaction.trained, info)
        if parts.noise is not None:
            self._observe_noise(reduced, applied)
        state.position = position.after(self._planned, reduced.applied)
        if parts.schedulers and not applied.skipped:
            parts.schedulers.after_step(state.position.step)
            parts.update.watch()
        if parts.replica_hooks.watches_weights:
            self._replicas.updated()
        self._pause = reduced.pauses > 0
        self.duties.plan_after_step(reduced)
        state.at_boundary = True
        self._record(reduced, applied, position, hashed)
        if parts.checkpointer is not None:
            if not self._saver_prepared:
                # Now, after a first step, optimizers have all the state that they will have.
                self._saver_prepared = True
                parts.checkpointer.prepare(state.export())
            parts.checkpointer.poll()

    def _apply(self, factor: float, step: int, reduced: ReducedStep) -> AppliedUpdate:
        parts = self.parts
        if reduced.spoiled:
            return parts.update.skip()
        active = parts.turns.active(parts.turns.at(step))
        return parts.update.apply(factor, step=step + 1, need_norm=parts.noise is not None, active=active)

    def _reduce(self) -> tuple[ReducedStep, int | None]:
        """Exchange gradients, counters and a sample of the weights with all ranks: the point of decision."""
        parts = self.parts
        written, failed = parts.checkpointer.written if parts.checkpointer is not None else (False, False)
        pause = parts.step_hooks.wants_pause
        parts.phases.enter(COLLECTIVE)
        sample = self._replicas.sample()
        requests = StepRequests(parts.stop.asked(), written, failed, pause, sample or 0)
        try:
            reduced = parts.transaction.reduce(requests)
        except NonFiniteLossError:
            # The step before may have spoiled the weights already: then nothing is worth a version.
            self.state.at_boundary = is_finite(parts.module)
            raise
        except replica_agreement.WeightsDifferError:
            reduced = None  # not raised from here: this error says nothing to a user
        if reduced is None:
            assert sample is not None
            self._replicas.sample_differs(sample)
        return reduced, sample

    def _record(
        self, reduced: ReducedStep, applied: AppliedUpdate, before: DataPosition, sample: str | None
    ) -> None:
        parts, state = self.parts, self.state
        step, audit = state.position.step, parts.config.audit_every
        if reduced.unused and parts.team.is_master and parts.turns.first_of_turn(before.step):
            turn = parts.turns.at(before.step)
            unused = set(reduced.unused).intersection(
                parts.turns.taking_part(turn, parts.transaction.trained)
            )
            if unused:
                _log.warning(
                    "the first step%s gave no gradient to %s: a parameter keeps its value in every step "
                    "in which no sample uses it",
                    "" if turn is None else f" of optimizer {turn}",
                    ", ".join(name for name in reduced.unused if name in unused),
                )
        numbers = reduced.numbers
        if reduced.spoiled and not self._said_spoiled and math.isfinite(numbers[0]) and parts.team.is_master:
            # Where the loss is not finite the recorder says it.
            self._said_spoiled = True
            _log.warning("the gradient of step %d is not finite: the step changed no weight", step)
        if applied.norm is not None:
            norm = applied.norm.to(numbers).reshape(1)
            numbers = torch.cat([numbers[:1], norm, numbers[1:]])
        event = events.StepCommitted(
            time=0.0,
            step=step,
            epoch=before.epoch,
            loss=math.nan,  # known once the device has computed it
            samples=reduced.applied,
            hash=state.weights_hash() if audit and step % audit == 0 else None,
            sample=sample,
            offset=before.offset,
            taken=self._planned,
            learning_rate=applied.learning_rate,
            skipped=applied.skipped,
            generation=parts.team.generation,
        )
        record = parts.recorder.commit(PendingStep(event, numbers, applied.norm is not None, reduced.metrics))
        parts.step_hooks.committed(state, event, parts.transaction.counted, parts.transaction.shard_hashes)
        if parts.callbacks.may_stop:
            record = record or parts.recorder.flush()
            assert record is not None
            # Asked every time, also when the run ends anyway: modifiers keep equal states on every rank.
            state.at_boundary = False
            reason = parts.callbacks.stop(record)
            state.at_boundary = True
            state.ended = state.ended or reason

    def _observe_noise(self, reduced: ReducedStep, applied: AppliedUpdate) -> None:
        noise, norms = self.parts.noise, reduced.shard_square_norms
        # A step that lost samples tells little about noise: they are not counted by shard.
        if noise is None or norms is None or applied.measured is None or reduced.applied != self._planned:
            return
        # The shards' gradients were weighted by their share of the samples; the noise is about their means.
        means = [
            norm * (self._planned / count) ** 2 if count else 0.0
            for norm, count in zip(norms.tolist(), self._counts, strict=True)
        ]
        noise.observe(means, self._counts, float(applied.measured) ** 2)

    def _check_learns(self, reduced: ReducedStep) -> None:
        """Refuse, in the first step of this process and of each turn, a loss that no parameter takes part
        in."""
        step, turns = self.state.position.step, self.parts.turns
        turn = turns.at(step)
        if turn in self._learns or not reduced.applied:
            return
        learning = turns.taking_part(turn, self.parts.transaction.learning)
        if turn is not None and not learning:
            return  # all that its optimizer holds is still to be unfrozen
        if set(reduced.unused).issuperset(learning):
            if turn is not None:
                misuse_guard.refuse_turn(step + 1, turn, turns.kind(turn))
            misuse_guard.refuse_other_model(step + 1)
        self._learns.add(turn)

    def _note_skipped(self, batch: Batch) -> None:
        position = self.state.position
        for skipped in batch.skipped:
            self.parts.recorder.note_here(
                events.SampleSkipped(
                    time=time.time(),
                    step=position.step,
                    epoch=position.epoch,
                    index=skipped.index,
                    reason=skipped.reason,
                )
            )
