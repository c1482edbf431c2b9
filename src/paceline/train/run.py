"""A run on one rank: all its parts, and the steps they take together.

    while the run is not over:
        a step's position says which samples it takes              feed
        for each shard of this rank, each of its micro-batches:    handed out, `backward` comes back
        the shards of all ranks become one gradient                step
        the gradient changes the model; the step is committed      update
        what happened is recorded; evaluate, save, stop when due   recorder, evaluation, saving

Both the trainer and a loop of the user's own (`session`) walk through `microbatches`. Must not know how
workers start, nor where a loss comes from.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import xxhash
from torch import Tensor, nn

from paceline.comm.context import DistributedContext
from paceline.core import events
from paceline.core.errors import UsageError
from paceline.data.plan import Position, slices_of_step
from paceline.data.randomness import seed_everything
from paceline.data.sources import Batch
from paceline.train.callbacks import Callbacks
from paceline.train.config import TrainConfig
from paceline.train.dynamic_batch import GradientNoise
from paceline.train.early_stop import EarlyStopper
from paceline.train.feed import Feed, to_device
from paceline.train.history import Evaluation
from paceline.train.objective import split_pair
from paceline.train.recorder import CommittedStep, Recorder
from paceline.train.saving import Contents, Saver
from paceline.train.schedule import Schedule
from paceline.train.signals import StopRequest
from paceline.train.state import state_hash
from paceline.train.step import Reduced, StepTransaction, Wishes
from paceline.train.update import Applied, Update

_log = logging.getLogger(__name__)

Evaluate = Callable[[], tuple[dict[str, float], int]]


@final
@dataclass(frozen=True)
class Micro:
    """A micro-batch to compute: `x` and `y` of a pair, or all of it as `data`; `count` samples."""

    data: Any
    count: int
    shard: int
    epoch: int
    step: int

    @property
    def x(self) -> Any:
        return split_pair(self.data)[0]

    @property
    def y(self) -> Any:
        return split_pair(self.data)[1]


@dataclass
class Parts:
    """What a run is put together from; see worker.py and session.py."""

    context: DistributedContext
    config: TrainConfig
    device: torch.device
    module: nn.Module
    transaction: StepTransaction
    update: Update
    schedule: Schedule
    feed: Feed
    recorder: Recorder
    callbacks: Callbacks
    stop: StopRequest
    noise: GradientNoise | None = None
    early: EarlyStopper | None = None
    saver: Saver | None = None
    evaluate: Evaluate | None = None
    contents: Callable[[Run], Contents] | None = None
    draws_after_exchange: bool = True  # modifiers, or optimizers that may use randomness


def _digest(state: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(state, sort_keys=True, default=repr).encode())


def _different(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(name.partition(":")[2] for name in {**one, **other} if one.get(name) != other.get(name))


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
        self._compare_modifiers()

    def _steps(self) -> Iterator[Micro]:
        parts = self._parts
        feed, transaction = parts.feed, parts.transaction
        while not self.finished:
            position = self.position
            self._planned = feed.step(position, self.batch)
            if self._planned == 0:
                self._end_epoch()
                continue
            scaler = parts.update.scaler
            slices = slices_of_step(position.offset, self._planned, self.batch, transaction.shards)
            self._counts = [part.count for part in slices]
            transaction.open(position.epoch, position.step, self._counts, scaler.scale if scaler else 1.0)
            modifiers = self._modifiers() if self._first else {}
            for shard in transaction.block:
                transaction.start_shard(shard)
                for batch in feed.batches(shard):
                    if batch.skipped:
                        self._say_skipped(batch)
                    if not batch.count:
                        continue
                    self._pending = batch.count
                    data = to_device(batch.data, parts.device)
                    yield Micro(data, batch.count, shard, position.epoch, position.step)
                    if self._pending:
                        raise UsageError(
                            f"step {position.step}: a micro-batch of {batch.count} samples was handed out "
                            "and no backward came back",
                            remedy="call run.backward(loss) exactly once for every micro-batch",
                        )
                transaction.finish_shard(shard)
            if self._first:
                self._first = False
                self._check_batch_changers(modifiers)
            self._commit()

    def backward(self, loss: Tensor, metrics: Mapping[str, Any] | None = None) -> None:
        """The loss (a mean) of the micro-batch that was handed out last."""
        if not self._pending:
            raise UsageError(
                "backward was called without a micro-batch, or twice for one",
                remedy="call run.backward(loss) exactly once for every micro-batch",
            )
        count, self._pending = self._pending, 0
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
        started = time.perf_counter()
        metrics, samples = parts.evaluate()
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
        parts.recorder.flush()
        self._compare_modifiers()
        parts.saver.begin(self.position, parts.contents(self), self._metrics())

    # inside

    def _commit(self) -> None:
        parts, config = self._parts, self._parts.config
        wrote, failed = parts.saver.wrote if parts.saver is not None else (False, False)
        reduced = parts.transaction.reduce(Wishes(parts.stop.asked(), wrote, failed))
        step, epoch, batch = self.position.step, self.position.epoch, self.batch
        if parts.draws_after_exchange:
            # What draws numbers from here on does so on every rank, and must draw the same ones.
            seed_everything(config.seed, epoch, step, parts.transaction.shards)
        applied = parts.update.apply(parts.schedule.factor(step, batch), need_norm=parts.noise is not None)
        if parts.noise is not None:
            self._observe_noise(reduced, applied)
        self.position = self.position.after(self._planned, reduced.applied)
        self._record(reduced, applied, epoch)
        if parts.saver is not None:
            if not self._prepared and parts.contents is not None:
                # Now, after a first step, optimizers have all the state that they will have.
                self._prepared = True
                parts.saver.prepare(parts.contents(self))
            parts.saver.settle(reduced.saved, reduced.saves_failed)
        if config.evaluate_every is not None and self.position.step % config.evaluate_every == 0:
            self.evaluate()
        if reduced.stops and self.ended is None:
            self.stopped_on_request = True
            self.ended = parts.stop.reason or "a signal to another worker"
        if self.ended is None and parts.saver is not None and parts.saver.due_after_step(self.position.step):
            self.save()

    def _record(self, reduced: Reduced, applied: Applied, epoch: int) -> None:
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
            epoch=epoch,
            samples=reduced.applied,
            learning_rate=applied.learning_rate,
            skipped=applied.skipped,
            hash=state_hash(parts.module) if audit and step % audit == 0 else None,
            names=reduced.metrics,
            has_norm=applied.norm is not None,
            numbers=numbers,
        )
        record = parts.recorder.commit(committed)
        if parts.callbacks.may_stop:
            record = record or parts.recorder.flush()
            assert record is not None
            # Asked every time, also when the run ends anyway: modifiers keep equal states on every rank.
            reason = parts.callbacks.stop(record)
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
        validation = self.evaluate() if parts.config.evaluate_every is None else {}
        parts.recorder.end_epoch(position.epoch, validation)
        self.position = position.next_epoch()
        if (
            parts.saver is not None
            and self.ended is None
            and parts.saver.due_after_epoch(self.position.epoch)
        ):
            parts.saver.forget_step()
            self.save()
        parts.recorder.start_clock()

    def _metrics(self) -> dict[str, float]:
        """What a version is judged by: what these very weights were evaluated to, else the last step's loss,
        under a name of its own: it is that of a few samples, before the step."""
        recorder = self._parts.recorder
        if recorder.evaluations and recorder.evaluations[-1].step == self.position.step:
            return dict(recorder.evaluations[-1].metrics)
        return {"train_loss": recorder.steps[-1].loss} if recorder.steps else {}

    def _modifiers(self) -> dict[str, str]:
        """The modifiers' states, each as a short digest."""
        states = self._parts.callbacks.state_dict() if self._parts.callbacks.modifiers else {}
        return {name: _digest(state) for name, state in states.items()}

    def _check_batch_changers(self, before: Mapping[str, str]) -> None:
        changed = _different(before, self._modifiers())
        if changed:
            raise UsageError(
                f"the state of the modifier {', '.join(changed)} changed in change_batch: that is called for "
                "the micro-batches of one worker, so the state would depend on how many workers there are",
                remedy="change state in change_gradients or stop, which are called once a step on every "
                "worker; randomness needs no state, it is seeded for every shard",
            )

    def _compare_modifiers(self) -> None:
        """Where all ranks meet anyway: modifiers that did not do the same on each are found out."""
        context = self._parts.context
        if context.world_size == 1:
            return
        told = context.all_gather(self._modifiers())
        for rank, theirs in enumerate(told):
            odd = _different(told[0], theirs)
            if odd:
                raise UsageError(
                    f"the modifier {', '.join(odd)} has another state on rank {rank} than on rank 0 after "
                    f"step {self.position.step}",
                    remedy="a modifier must do the same on every rank: use nothing that depends on the rank, "
                    "on time or on this rank's samples",
                )

    def _say_unused(self, unused: tuple[str, ...]) -> None:
        if unused and self._parts.context.is_master:
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
