"""A run that its caller takes step by step, bringing the samples, in groups that get smaller.

Everything that all ranks do together (begin, a step, going back to a checkpoint) is an operation with one
point of decision. When a rank dies, an operation may be decided on some ranks and not on others; then
`rebind` gives the others the state behind it. They come back with the operation that failed for them, find
that it is decided, and get its result without computing it: no step is lost, none is applied twice.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.checkpoint.manifest import CheckpointInfo
from paceline.checkpoint.save_whole import save_whole
from paceline.checkpoint.store import CheckpointStore
from paceline.comm.context import DistributedContext
from paceline.comm.state_transfer import receive_state, send_state
from paceline.core import events
from paceline.core.clock import MonotonicClock
from paceline.core.errors import ConfigError, PacelineError, UsageError
from paceline.data.batch_plan import DataPosition
from paceline.train.loop import process_setup
from paceline.train.loop.run import Run
from paceline.train.loop.run_builder import RunBuilder, RunSpec, SupervisedHooks
from paceline.train.loop.run_hooks import FixedGroup, MicroBatch, one_group
from paceline.train.loop.worker_jobs import new_team
from paceline.train.settings.train_config import TrainConfig
from paceline.train.state.checkpointing import TRAIN_LOSS
from paceline.train.state.resume import LoadedCheckpoint, check_same_run, resume
from paceline.train.step.given_batches import CountedSamples, GivenBatches
from paceline.train.stop_signals import StopRequest

_log = logging.getLogger(__name__)

ComputeMicroBatch = Callable[[MicroBatch], tuple[Tensor, Mapping[str, Any]]]
"""From a micro-batch to its loss, a mean, and its metrics."""

# What a saved run brings along when it continues on another number of processes.
_ADOPTED = ("shards", "threads")


@dataclass(frozen=True)
class StepResult:
    """Result of a step, the same on every rank but for the times of this one: the seconds in the exchange,
    and the share of the step that it computed. Both are 0 on a rank that was handed the step."""

    loss: float
    learning_rate: float
    metrics: dict[str, float]
    comm_time: float = 0.0
    compute_efficiency: float = 0.0


@dataclass(frozen=True)
class StepwiseSpec:
    """What the caller trains. `config` is resolved; `samples` is the size of the data."""

    module: nn.Module
    optimizer: Any
    config: TrainConfig
    samples: int
    device: torch.device


@final
class StepwiseRun:
    """One rank's share."""

    def __init__(self, context: DistributedContext, spec: StepwiseSpec) -> None:
        self._spec = spec
        self._closing = ExitStack()
        self._decided = 0  # operations
        self._operation: list[Any] = ["", 0]  # the last decided one: its kind and its number
        self._result: StepResult | None = None  # of the last step
        self._handed_over: list[Any] | None = None  # an operation that was decided without this rank
        self._asked_to_save: tuple[CheckpointStore, int, int] | None = None  # where, as what, decided by then
        self._saved: tuple[int, int] | None = None  # the last checkpoint: its number, decided by then
        self._begun = False  # a step of this run has a number
        self._open_total: tuple[int, int] | None = None  # the step that failed, and its samples
        self._build(context, spec.config)

    def _build(self, context: DistributedContext, config: TrainConfig) -> None:
        """Build all parts for these settings; talks to no other rank."""
        self._closing.close()
        spec, self._config = self._spec, config
        self._closing.enter_context(process_setup.prepared(config))
        self._team = new_team(context, config)
        self._feed = GivenBatches(config.global_batch, config.micro_samples)
        data = CountedSamples(spec.samples)
        group = FixedGroup(self._team)
        hooks = SupervisedHooks(
            steps=group,
            replicas=group,
            tell=_no_journal,
            journal_acked_at=MonotonicClock().now,
            slot=context.labels[context.rank],
        )
        builder = RunBuilder(
            self._team,
            RunSpec(spec.module, spec.optimizer, config, data, feed=self._feed),
            spec.device,
            StopRequest(),
            hooks=hooks,
        )
        self._run: Run = self._closing.enter_context(builder).run()
        self._run.parts.update.watch()

    @property
    def config(self) -> TrainConfig:
        """The settings of this run, resolved."""
        return self._config

    @property
    def next_step(self) -> int:
        """The number of the next step; 0 before the first."""
        return self._run.state.position.step

    @property
    def has_begun(self) -> bool:
        """Whether all ranks were seen to start alike."""
        return self._decided > 0

    def begin(self) -> None:
        """Check that all ranks start alike; a collective call, once in a run."""
        if self._is_handed_over("begin", 0):
            return
        if self._decided:
            raise UsageError(
                "the training was prepared twice", remedy="make another manager for another training"
            )
        resume(self._run.state, None)
        self._decide("begin", 0)

    # steps

    def deal(self, total: int) -> tuple[int, int]:
        """Return which samples of a step of `total` this rank computes: from the first to the one behind the
        last."""
        return self._feed.dealt(total, self._team.shards, self._team.block)

    def step(self, data: Any, total: int, number: int, compute: ComputeMicroBatch) -> StepResult:
        """Take step `number`, whose samples for this rank are `data`; return its result.

        A failure of the group is raised as it is; then the group is of no use, and after `rebind` the step
        is taken again.
        """
        if self._is_handed_over("step", number):
            assert self._result is not None
            return self._result
        self._check_number(number)
        if self._open_total is not None and self._open_total != (number, total):
            raise UsageError(
                f"step {number} is taken again with {total} samples, and it had {self._open_total[1]}",
                remedy="take a step that failed again with the same samples",
            )
        self._feed.give(data, total, self._team.shards, self._team.block)
        self._begun, self._open_total = True, (number, total)
        with one_group():
            for micro in self._run.one_step():
                loss, metrics = compute(micro)
                self._run.backward(loss, metrics)
        record = self._run.parts.recorder.flush()
        assert record is not None
        self._result = StepResult(
            record.loss,
            record.learning_rate,
            dict(record.metrics),
            record.comm_time or 0.0,
            record.compute_efficiency or 0.0,
        )
        self._open_total = None
        self._decide("step", number)
        return self._result

    def _check_number(self, number: int) -> None:
        if not self._begun:
            # Whether steps are counted from 0 or from 1 is the caller's affair.
            self._run.state.begin_at(DataPosition(step=number))
        elif number != self.next_step:
            raise UsageError(
                f"step {number} was asked for, and the next step is {self.next_step}",
                remedy=f"take the steps in order; manager.next_step is {self.next_step}",
            )

    # the group

    def rebind(self, context: DistributedContext) -> None:
        """Continue in another group, with the state of the rank that is farthest; a collective call."""
        mine = [self._decided, self._operation, None, self._run.state.run_id, self._begun]
        if self._result is not None:
            mine[2] = dataclasses.asdict(self._result)
        all_facts = context.all_gather([*mine, {name: getattr(self._config, name) for name in _ADOPTED}])
        most = max(facts[0] for facts in all_facts)
        source = next(rank for rank, facts in enumerate(all_facts) if facts[0] == most)
        stale = [rank for rank, facts in enumerate(all_facts) if facts[0] < most]
        decided, operation, result, run_id, begun, adopted = all_facts[source]
        config = dataclasses.replace(self._config, **adopted)
        if config != self._config:
            self._build(context, config)
        else:
            self._team.install(context, generation=self._team.generation + 1)
            self._run.state.rebind()
        self._run.state.synchronize(source, stale)
        if context.rank in stale:
            self._decided, self._operation, self._begun = decided, operation, begun
            self._result = None
            if result is not None:
                self._result = dataclasses.replace(
                    StepResult(**result), comm_time=0.0, compute_efficiency=0.0
                )
            self._handed_over, self._open_total = operation, None
            self._run.state.run_id = run_id
            self._run.parts.update.watch()
        self._save_what_was_asked_for()

    def _decide(self, kind: str, number: int) -> None:
        self._decided += 1
        self._operation, self._handed_over = [kind, number], None

    def _is_handed_over(self, kind: str, number: int) -> bool:
        """Return whether this operation, which failed here, was decided on other ranks; once."""
        handed, self._handed_over = self._handed_over, None
        return handed == [kind, number]

    # checkpoints

    def save(self, store: CheckpointStore, number: int) -> None:
        """Save the state as checkpoint `number`; no other rank is waited for. The first rank writes, all of
        them hold the same; should it die before it is done, the next one makes up for it (`rebind`)."""
        if self._saved == (number, self._decided):
            return  # the very same state
        self._asked_to_save = (store, number, self._decided)
        if self._team.is_master:
            self._write(store, number)
            self._asked_to_save = None
        self._saved = (number, self._decided)

    def save_unasked(self, store: CheckpointStore, number: int) -> None:
        """Save, and log what cannot be saved: the step is done, and older checkpoints are there."""
        try:
            self.save(store, number)
        except PacelineError as error:
            _log.error("checkpoint %d could not be saved: %s", number, str(error))

    def _save_what_was_asked_for(self) -> None:
        asked, self._asked_to_save = self._asked_to_save, None
        # Another state than the one that was to be saved: the rank that wrote it took part in a later step,
        # so it had written.
        if asked is None or asked[2] != self._decided or not self._team.is_master:
            return
        store, number, _ = asked
        try:
            newest = next((one.info for one in reversed(store.manifests())), None)
            mine = number, self._run.state.position.samples, self._run.state.run_id
            if newest is None or (newest.step, newest.samples, newest.run) != mine:
                self._write(store, number)
        except PacelineError as error:
            self._saved = None
            _log.error("checkpoint %d could not be saved: %s", number, str(error))

    def _write(self, store: CheckpointStore, number: int) -> None:
        state = self._run.state
        contents = state.export()
        info = CheckpointInfo(
            step=number,
            samples=state.position.samples,
            workers=self._team.world_size,
            metrics={} if self._result is None else {TRAIN_LOSS: self._result.loss},
            run=state.run_id,
        )
        save_whole(store, contents.tensors, contents.state, info)

    def load(self, store: CheckpointStore, number: int) -> None:
        """Go back, or forward, to checkpoint `number`; a collective call. The first rank reads and sends what
        it read, so no other one has to see the storage; what it refuses, all refuse."""
        if self._is_handed_over("load", number):
            return
        context = self._team.context
        found, refused = self._read(store, number) if context.is_master else (None, None)
        reply = None if refused is None else [refused.message, refused.remedy]
        reply = context.broadcast(reply)
        if refused is not None:
            raise refused
        if reply is not None:
            raise UsageError(reply[0], remedy=reply[1])
        others = range(1, context.world_size)
        if found is not None:
            send_state(context, others, found.tensors, {"state": found.state, "run": found.run})
            tensors, state, run = found.tensors, found.state, found.run
        else:
            tensors, plain = receive_state(context, 0)
            state, run = plain["state"], plain["run"]
        config = self._adopting(state)
        if config != self._config:
            self._build(context, config)
        self._run.state.load(state, tensors)
        self._run.state.run_id = run
        self._run.parts.update.watch()
        self._begun, self._open_total, self._result = True, None, None
        self._decide("load", number)

    def _read(
        self, store: CheckpointStore, number: int
    ) -> tuple[LoadedCheckpoint | None, PacelineError | None]:
        try:
            versions = [one.version for one in store.manifests() if one.info.step == number]
            if not versions:
                have = sorted({one.info.step for one in store.manifests()})
                raise UsageError(
                    f"there is no checkpoint {number} in {store.url}",
                    remedy=f"there are {', '.join(map(str, have))}" if have else "there is none at all",
                )
            opened = store.open(versions[-1])
            found = LoadedCheckpoint(
                opened.version, opened.manifest.info.run, opened.state, dict(opened.tensors())
            )
            check_same_run(found, self._adopting(found.state), self._spec.samples)
        except PacelineError as error:
            return None, error
        return found, None

    def _adopting(self, saved: Mapping[str, Any]) -> TrainConfig:
        """Return the settings of this run with those that the weights of the saved run were computed with,
        however many processes there were."""
        definition = saved.get("definition", {})
        known = {name: definition[name] for name in _ADOPTED if name in definition}
        if any(type(value) is not int or value < 1 for value in known.values()):
            raise ConfigError(
                f"the checkpoint says {known}, which are no counts", remedy="load another checkpoint"
            )
        return dataclasses.replace(self._config, **known)

    def close(self) -> None:
        """Release the module and the settings of this process."""
        self._closing.close()


def _no_journal(event: events.Event) -> None:
    """Keep no journal: what happened is in the metrics that the caller gets."""
