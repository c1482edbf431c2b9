"""A run on one rank: all its parts, and the steps they take together.

    while the run is not over:
        a step's position says which samples it takes              feed
        for each shard of this rank, each of its micro-batches:    handed out, `backward` comes back
        the shards of all ranks become one gradient                step
        the gradient changes the model; the step is committed      update
        what happened is recorded; evaluate, save, stop when due   recorder, evaluation, saving

Both the trainer and a loop of the user's own (`session`) walk through `microbatches`. What is due after a
step is an agenda that all ranks work off in order. When the group breaks, in a step or in the agenda, those
who are left meet again (`members`) and go on where the furthest of them is: `progress`. Must not know how
workers start, nor where a loss comes from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from paceline.checkpoint.digests import combined
from paceline.core import events
from paceline.core.control.messages import Progress
from paceline.core.errors import GroupInterruptedError, UsageError
from paceline.data.plan import Position, slices_of_step
from paceline.data.randomness import seed_everything
from paceline.data.sources import Batch
from paceline.train import agreement, modifier_states, nonfinite
from paceline.train.agenda import Agenda, Duty
from paceline.train.feed import to_device
from paceline.train.history import Evaluation
from paceline.train.nonfinite import NonFiniteLossError
from paceline.train.own_memory import OwnMemory
from paceline.train.phases import BACKWARD, CHECKPOINT, COLLECTIVE, DATA, EVALUATION, FORWARD, OPTIMIZER
from paceline.train.recorder import CommittedStep
from paceline.train.run_parts import GROUP_TROUBLE, Micro, Parts
from paceline.train.state import state_hash
from paceline.train.step import Reduced, Wishes
from paceline.train.trail import Trail
from paceline.train.update import Applied

_log = logging.getLogger(__name__)


@final
class Run:
    """One rank's share of a run; every rank walks through the same steps."""

    def __init__(self, parts: Parts, position: Position | None = None) -> None:
        self._parts = parts
        self.position = position or Position()
        self.ended: str | None = None  # why, before the end of what was asked for
        self.stopped_on_request = False
        self._left = False  # by a loop of the user's, which may come back
        self._first = True
        self.evaluated_step: int | None = None
        self._prepared = False
        self._pending = 0  # samples of a micro-batch that was handed out and has not come back
        self._planned = 0
        self._counts: list[int] = []
        self._named_unused = self.position.step > 0
        self._learns = False  # a step of this process gave some parameter a gradient
        self._pause = False  # after the step that was just committed
        self.whole = True  # the state is that of a step boundary, once the open step is abandoned
        self.failing = False  # the run cannot go on: its last state is saved
        self._agenda = Agenda()  # since the last commit
        self.agreed = self.position.step  # the last step after which all ranks were seen to hold the same
        self._sample = agreement.WeightSample(parts.module.parameters())
        self._memory = OwnMemory(self._sample, parts.module.parameters())
        self.trail = Trail(self._sample.parts)
        if self.trail.needed:
            parts.transaction.watch_contributions()
        # Of all ranks: the hash, whether it was asked to stop, what is unsaved.
        self.final_hashes: list[list[Any]] = []

    @property
    def batch(self) -> int:
        """Samples of the next full step."""
        noise = self._parts.noise
        return self._parts.config.global_batch if noise is None else noise.batch

    @property
    def finished(self) -> bool:
        config, position = self._parts.config, self.position
        return (
            self.ended is not None
            or (config.max_steps is not None and position.step >= config.max_steps)
            or (config.epochs is not None and position.epoch >= config.epochs)
        )

    @property
    def progress(self) -> Progress:
        """How far this rank is; ranks that trained together differ by what one collective decides."""
        return self.position.step, self.position.epoch, self._agenda.done

    def microbatches(self) -> Generator[Micro, None, None]:
        """Every micro-batch of this rank, to the end of the run; after each one `backward` is due."""
        parts = self._parts
        parts.recorder.start_clock()
        parts.update.watch()
        try:
            yield from self._steps()
        except GeneratorExit:
            # The loop was left within a step, which then never happened.
            self._left = self.ended is None
            self.ended = self.ended or "the loop was left"
            parts.transaction.abandon()
            raise

    def conclude(self) -> bool:
        """The last evaluation and checkpoint, and the agreement of all ranks on the result.

        False: while it concluded, the group went back to a checkpoint (a member was lost with state that no
        other member has, or ranks differ). The steps since then have to be done again before the end.
        """
        while not self.concluded:
            if not self._agenda.concluding:
                if not self.finished:
                    return False
                self._begin_conclusion()
            try:
                self._agenda.work_off(self._do)
            except GROUP_TROUBLE as trouble:
                self._meet_again(trouble)
        return True

    @property
    def concluded(self) -> bool:
        return self._agenda.concluded

    def _steps(self) -> Iterator[Micro]:
        while True:
            try:
                if self._pause:
                    self._meet_again(None)
                self._agenda.work_off(self._do)
                if self.finished or self._agenda.concluding:
                    return
                yield from self._step()
            except GROUP_TROUBLE as trouble:
                self._meet_again(trouble)

    def _meet_again(self, trouble: BaseException | None) -> None:
        members = self._parts.members
        if members is None:
            assert trouble is not None
            raise trouble
        self._pause, self._pending = False, 0
        members.meet_again(self, trouble)
        self._parts.recorder.start_clock()

    def _step(self) -> Iterator[Micro]:
        parts = self._parts
        feed, transaction, phases = parts.feed, parts.transaction, parts.phases
        position = self.position
        phases.step = position.step + 1
        phases.enter(DATA)
        held = transaction.held
        self._planned = feed.step(position, self.batch, transaction.missing if held else None)
        if self._planned == 0:
            self._end_epoch()
            return
        scaler = parts.update.scaler
        slices = slices_of_step(position.offset, self._planned, self.batch, transaction.shards)
        self._counts = [part.count for part in slices]
        transaction.open(position.epoch, position.step, self._counts, scaler.scale if scaler else 1.0)
        modifiers = modifier_states.digests(parts.callbacks) if self._first else {}
        missing = transaction.missing
        for shard in missing if parts.members is None else parts.members.todo(phases.step, missing):
            started = time.perf_counter()
            transaction.start_shard(shard)
            for batch in feed.batches(shard):
                if batch.skipped:
                    transaction.leave_out(len(batch.skipped))
                    self._say_skipped(batch)
                if not batch.count:
                    continue
                self._pending = batch.count
                data = to_device(batch.data, parts.device)
                phases.enter(FORWARD)
                yield Micro(data, batch.count, shard, position.epoch, position.step)
                if self._pending:
                    raise UsageError(
                        f"step {position.step}: a micro-batch of {batch.count} samples was handed out "
                        "and no backward came back",
                        remedy="call run.backward(loss) exactly once for every micro-batch",
                    )
                phases.enter(DATA)  # the next batch is fetched
            transaction.finish_shard(shard)
            if parts.members is not None:
                parts.members.shard_done(phases.step, shard, time.perf_counter() - started)
        if self._first:
            self._first = False
            modifier_states.check_batch_changers(modifiers, parts.callbacks)
        self._commit()

    def backward(self, loss: Tensor, metrics: Mapping[str, Any] | None = None) -> None:
        """The loss (a mean) of the micro-batch that was handed out last."""
        if not self._pending:
            raise UsageError(
                "backward was called without a micro-batch, or twice for one",
                remedy="call run.backward(loss) exactly once for every micro-batch",
            )
        count, self._pending = self._pending, 0
        self._parts.phases.enter(BACKWARD)
        self._parts.transaction.backward(loss, count, metrics)

    @property
    def over(self) -> str | None:
        """Why a run that goes on from here would end at once; not because it was asked to stop, nor because
        somebody left the loop."""
        return None if self.stopped_on_request or self._left else self.ended

    def evaluate(self, *, extra: bool = False) -> dict[str, float]:
        """Evaluates now, on every rank. An extra one, where the run ends between two of its evaluations,
        leaves no trace in what a longer run does: it takes no part in early stopping."""
        parts = self._parts
        if parts.evaluate is None or self.evaluated_step == self.position.step:
            return {}
        parts.recorder.flush()
        parts.phases.enter(EVALUATION)
        started = time.perf_counter()
        try:
            metrics, samples = parts.evaluate()
        except Exception as error:
            if not isinstance(error, GROUP_TROUBLE):
                error.add_note(f"in the evaluation after step {self.position.step}")
            raise
        parts.recorder.evaluated(
            Evaluation(
                step=self.position.step,
                epoch=self.position.epoch,
                metrics=metrics,
                samples=samples,
                seconds=time.perf_counter() - started,
            )
        )
        if not extra:
            self.evaluated_step = self.position.step
            if parts.early is not None:
                self.ended = self.ended or parts.early.observe(metrics)
        parts.recorder.start_clock()
        return metrics

    def save(self) -> None:
        """Starts a checkpoint of the state as it is, unless this step has one."""
        parts = self._parts
        if parts.saver is None or parts.contents is None or parts.saver.saved_step == self.position.step:
            return
        parts.phases.enter(CHECKPOINT)
        parts.recorder.flush()
        modifier_states.compare(parts.team.context, parts.callbacks, self.position.step)
        contents = parts.contents(self)
        shares = parts.saver.digests(contents)
        # A version is put together from what all ranks write: only where they hold the same is it anything.
        self._compare("saved", combined(shares))
        parts.saver.begin(self.position, contents, self._metrics(), shares)

    def save_and_end(self, reason: str) -> None:
        """The run cannot go on: from here on this rank, like all others, saves the state of the last
        committed step and ends. No code of the user's is called: it is what failed."""
        self.abandon_step()
        self.ended, self.stopped_on_request, self.failing = reason, True, True
        self._agenda.clear()
        self._agenda.concluding = True
        if self._parts.saver is not None:
            self._agenda.add("save-last")
            self._agenda.add("finish-saving")
        self._agenda.add("compare")

    def abandon_step(self) -> None:
        """The open step never happened: the model is that of the step before."""
        self._parts.transaction.abandon()
        self._pending = 0

    def owe_evaluation(self) -> None:
        """A run that goes on from a step whose evaluation failed: it comes first."""
        every, step = self._parts.config.evaluate_every, self.position.step
        if every is not None and step and step % every == 0 and self.evaluated_step != step:
            self._agenda.add("evaluate")

    @property
    def left(self) -> int | None:
        """The hash of the weights when the last step was committed; None: it is not known."""
        return self._memory.left(self.position.step)

    @property
    def spoiled(self) -> bool:
        """Whether the weights of this rank have changed by themselves since its last update."""
        return self._memory.has_changed(self.position.step)

    # inside

    def _compare(self, kind: str, digest: str) -> None:
        """All ranks together: their whole state after this step is the same, or none of them goes on."""
        parts, step = self._parts, self.position.step
        if parts.team.world_size == 1:
            self._check_memory(None)
        if parts.team.world_size > 1:
            try:
                told = parts.team.context.all_gather(digest)
            except GROUP_TROUBLE:
                # The first member that sees a difference has all others stopped, also those that are still
                # here. Buffers are in no report: without this vote the odd one of two could not be named.
                if parts.members is not None:
                    parts.members.broken_off(step, f"{kind}:{digest}")
                raise
            if len(set(told)) > 1:
                self._differ(kind, digest)
        self.agreed = step
        if parts.members is not None:
            parts.members.agree(step, f"{kind}:{digest}")

    def _check_memory(self, sample: int | None) -> None:
        """This rank is alone: whether its weights are those that it had when it last looked."""
        parts, step = self._parts, self.position.step
        if parts.members is None or not self._memory.has_changed(step, sample):
            return
        parts.transaction.abandon()
        raise GroupInterruptedError(f"the weights of this worker changed in its memory after step {step}")

    def _differ(self, kind: str, digest: str) -> NoReturn:
        parts, step = self._parts, self.position.step
        # What was summed in the open step has been written over, with the gradients of an odd rank in it.
        parts.transaction.abandon()
        if parts.members is not None:
            parts.members.differ(step, f"{kind}:{digest}", self.agreed)
        raise agreement.differ_error(step, parts.team.context.all_gather(digest))

    def _commit(self) -> None:
        parts, config = self._parts, self._parts.config
        wrote, failed = parts.saver.wrote if parts.saver is not None else (False, False)
        pause = parts.members is not None and parts.members.wants_pause
        parts.phases.enter(COLLECTIVE)
        position, batch = self.position, self.batch
        # Now, and not before the shards: weights that changed while these were computed are seen, too.
        sample = self._look()
        wishes = Wishes(parts.stop.asked(), wrote, failed, pause, sample or 0)
        try:
            reduced = parts.transaction.reduce(wishes)
        except NonFiniteLossError:
            # The step before may have spoiled the weights already: then nothing is worth a version.
            self.whole = nonfinite.is_finite(parts.module)
            raise
        except agreement.DifferError:
            assert sample is not None
            self._note_contribution(sample)
            self._differ("sample", agreement.text(sample))
        # Buffers have moved: until the update is through, the state is of no step.
        self.whole = False
        if sample is not None:
            self._agree(sample)
        self._check_learns(reduced)
        parts.phases.enter(OPTIMIZER)
        step, epoch = position.step, position.epoch
        if parts.draws_after_exchange:
            # What draws numbers from here on does so on every rank, and must draw the same ones.
            seed_everything(config.seed, epoch, step, parts.transaction.shards)
        try:
            factor = parts.schedule.factor(step, batch)
            applied = parts.update.apply(factor, need_norm=parts.noise is not None)
        except GROUP_TROUBLE:
            # A modifier talks to the other ranks, and one of them is gone: the step is done again.
            parts.transaction.undo()
            self.whole = True
            raise
        if parts.noise is not None:
            self._observe_noise(reduced, applied)
        self.position = position.after(self._planned, reduced.applied)
        if parts.members is not None:
            self._leave_trace()
        self._pause = reduced.pauses > 0
        self._agenda.begin(self._due_after(reduced))
        self.whole = True
        self._record(reduced, applied, position, sample)
        if parts.saver is not None:
            if not self._prepared and parts.contents is not None:
                # Now, after a first step, optimizers have all the state that they will have.
                self._prepared = True
                parts.saver.prepare(parts.contents(self))
            parts.saver.poll()

    def _leave_trace(self) -> None:
        """What the update left, for this rank to look at again, and for the others should it be gone."""
        step = self.position.step
        self._memory.leave(step, alone=self._parts.team.world_size == 1)
        left = self.left
        if left is not None:
            self._parts.phases.leave(step, left)

    def _look(self) -> int | None:
        """The sample of the weights that the open step was computed with. None: no rank compares it, and a
        device would have to be waited for. Others wait for it anyway, to exchange what it computed."""
        step = self.position.step
        alone = self._parts.team.world_size == 1
        if alone and not self._sample.at_hand:
            return None
        sample = self._sample.of(step)
        if alone:
            self._check_memory(sample)
        return sample

    def _agree(self, sample: int) -> None:
        """All ranks that there are hold this sample."""
        parts, step = self._parts, self.position.step
        self._note_contribution(sample)
        if parts.team.world_size > 1:
            self._memory.agreed(step, sample)
        if parts.members is not None:
            parts.members.agree(step, f"sample:{agreement.text(sample)}")

    def _note_contribution(self, sample: int) -> None:
        transaction = self._parts.transaction
        step = self.position.step + 1
        self.trail.add(step, transaction.counted, agreement.text(sample), transaction.contributed)

    def _due_after(self, reduced: Reduced) -> list[Duty]:
        """What every rank does together after this step; it follows from what every rank knows."""
        parts, step = self._parts, self.position.step
        due: list[Duty] = []
        if parts.saver is not None and parts.saver.complete(reduced.saved, reduced.saves_failed):
            due.append(["settle", reduced.saved, reduced.saves_failed])
        every = parts.config.evaluate_every
        if every is not None and step % every == 0:
            due.append(["evaluate"])
        if reduced.stops:
            due.append(["stop"])
        if parts.saver is not None and parts.saver.due_after_step(step):
            due.append(["save"])
        return due

    def _do(self, name: str, numbers: list[int]) -> None:
        parts, saver = self._parts, self._parts.saver
        if name == "settle" and saver is not None:
            parts.phases.enter(COLLECTIVE)
            saver.settle(*numbers)
        elif name == "evaluate":
            self.evaluate()
        elif name == "evaluate-extra":
            self.evaluate(extra=True)
        elif name == "stop" and self.ended is None:
            self.stopped_on_request = True
            self.ended = parts.stop.reason or "a signal to another worker"
        elif (name == "save" and self.ended is None) or name == "save-last":
            self.save()
        elif name == "finish-saving" and saver is not None:
            parts.phases.enter(CHECKPOINT)
            saver.finish()
        elif name == "close-epoch":
            self._close_epoch()
        elif name == "close-last-epoch":
            parts.recorder.end_epoch(self.position.epoch, self._last_validation())
        elif name == "compare-modifiers":
            parts.phases.enter(COLLECTIVE)
            modifier_states.compare(parts.team.context, parts.callbacks, self.position.step)
        elif name == "compare":
            parts.phases.enter(COLLECTIVE)
            unsaved = saver.unsaved(self.position.step) if saver is not None else None
            digest = state_hash(parts.module)
            told = parts.team.context.all_gather([digest, parts.stop.asked(), unsaved])
            self.final_hashes = told
            self._compare("end", digest)

    def _begin_conclusion(self) -> None:
        parts = self._parts
        parts.recorder.flush()
        self._agenda.concluding = True
        if not self._left:
            self._agenda.add("compare-modifiers")
        known = parts.recorder.evaluations[-1:]
        if not self.stopped_on_request and not (known and known[0].step == self.position.step):
            self._agenda.add("evaluate-extra")
        if parts.saver is not None:
            if self.stopped_on_request or parts.config.checkpoint.at_end:
                self._agenda.add("save-last")
            self._agenda.add("finish-saving")
        # After the save: a longer run that goes on from it is still in the middle of this epoch.
        if parts.recorder.sums.steps and not self.stopped_on_request:
            self._agenda.add("close-last-epoch")
        self._agenda.add("compare")

    def _last_validation(self) -> dict[str, float]:
        known = self._parts.recorder.evaluations[-1:]
        return known[0].metrics if known and known[0].step == self.position.step else {}

    # what a member that joins has to know, besides the run's state

    def agenda_dict(self) -> dict[str, Any]:
        return {
            **self._agenda.state_dict(),
            "ended": self.ended,
            "stopped_on_request": self.stopped_on_request,
            "left": self._left,
            "final_hashes": self.final_hashes,
            "agreed": self.agreed,
        }

    def load_agenda_dict(self, state: Mapping[str, Any]) -> None:
        self._agenda.load_state_dict(state)
        self.ended = state["ended"]
        self.stopped_on_request, self._left = state["stopped_on_request"], state["left"]
        self.final_hashes = list(state["final_hashes"])
        self.agreed = state["agreed"]

    def begin_at(self, position: Position) -> None:
        """The state of another position was taken up."""
        self._parts.transaction.abandon()
        self._parts.update.watch()
        self.position = position
        self.agreed = position.step
        self.trail.clear()
        self._memory.forget()
        self._agenda.clear()
        self._pause = False
        self.ended, self.stopped_on_request = None, False
        self._named_unused = position.step > 0
        self._first = self._first and position.step == 0

    def _record(self, reduced: Reduced, applied: Applied, before: Position, sample: int | None) -> None:
        parts, step = self._parts, self.position.step
        if not self._named_unused:
            self._named_unused = True
            self._say_unused(reduced.unused)
        audit = parts.config.audit_every
        numbers = reduced.numbers
        if applied.norm is not None:
            norm = applied.norm.to(numbers).reshape(1)
            numbers = torch.cat([numbers[:1], norm, numbers[1:]])
        committed = CommittedStep(
            step=step,
            epoch=before.epoch,
            offset=before.offset,
            taken=self._planned,
            generation=parts.team.generation,
            samples=reduced.applied,
            learning_rate=applied.learning_rate,
            skipped=applied.skipped,
            hash=state_hash(parts.module) if audit and step % audit == 0 else None,
            sample=None if sample is None else agreement.text(sample),
            names=reduced.metrics,
            has_norm=applied.norm is not None,
            numbers=numbers,
        )
        record = parts.recorder.commit(committed)
        if parts.members is not None:
            parts.members.committed(committed, parts.transaction.counted, parts.transaction.shard_hashes)
        if parts.callbacks.may_stop:
            record = record or parts.recorder.flush()
            assert record is not None
            # Asked every time, also when the run ends anyway: modifiers keep equal states on every rank.
            self.whole = False
            reason = parts.callbacks.stop(record)
            self.whole = True
            self.ended = self.ended or reason

    def _observe_noise(self, reduced: Reduced, applied: Applied) -> None:
        noise, norms = self._parts.noise, reduced.shard_square_norms
        # A step that lost samples says little about noise: nobody counted them by shard.
        if noise is None or norms is None or applied.measured is None or reduced.applied != self._planned:
            return
        counts = self._counts
        # The shards' gradients were weighted by their share of the samples; the noise is about their means.
        means = [
            norm * (self._planned / count) ** 2 if count else 0.0
            for norm, count in zip(norms.tolist(), counts, strict=True)
        ]
        noise.observe(means, counts, float(applied.measured) ** 2)

    def _end_epoch(self) -> None:
        parts, position = self._parts, self.position
        if position.offset == 0:
            raise UsageError(
                f"epoch {position.epoch} has no full step",
                remedy="use a smaller global_batch or drop_last=False",
            )
        parts.recorder.flush()
        if parts.config.evaluate_every is None:
            self._agenda.add("evaluate")
        self._agenda.add("close-epoch")
        if parts.saver is not None and parts.saver.due_after_epoch(position.epoch + 1):
            self._agenda.add("save")

    def _close_epoch(self) -> None:
        parts, position = self._parts, self.position
        validation = {} if parts.config.evaluate_every is not None else self._last_validation()
        parts.recorder.end_epoch(position.epoch, validation)
        self.position = position.next_epoch()
        if (
            parts.saver is not None
            and self.ended is None
            and parts.saver.due_after_epoch(self.position.epoch)
        ):
            parts.saver.forget_step()
        parts.recorder.start_clock()

    def _metrics(self) -> dict[str, float]:
        """What a version is judged by: what these very weights were evaluated to, else the last step's loss,
        under a name of its own: it is that of a few samples, before the step."""
        recorder = self._parts.recorder
        if recorder.evaluations and recorder.evaluations[-1].step == self.position.step:
            return dict(recorder.evaluations[-1].metrics)
        return {"train_loss": recorder.steps[-1].loss} if recorder.steps else {}

    def _check_learns(self, reduced: Reduced) -> None:
        """The first step of this process: a loss that no parameter of the model takes part in."""
        if self._learns or not reduced.applied:
            return
        if len(reduced.unused) == len(self._parts.transaction.trained):
            raise UsageError(
                f"step {self.position.step + 1} gave no gradient to any parameter of the model that is "
                "trained: the loss was computed by another model, or by parameters that are not the model's",
                remedy="use the model that the objective is called with (def objective(model, batch)): every "
                "worker trains a copy of its own, and one from outside of the function is another; in a "
                "session, the module that was given to it",
            )
        self._learns = True

    def _say_unused(self, unused: tuple[str, ...]) -> None:
        if unused and self._parts.team.is_master:
            _log.warning(
                "the first step gave no gradient to %s: a parameter keeps its value in every step "
                "in which no sample uses it",
                ", ".join(unused),
            )

    def _say_skipped(self, batch: Batch) -> None:
        for skipped in batch.skipped:
            self._parts.recorder.note_here(
                events.SampleSkipped(
                    time=time.time(),
                    step=self.position.step,
                    epoch=self.position.epoch,
                    index=skipped.index,
                    reason=skipped.reason,
                )
            )
