"""Compute steps of a run again, in this process, and compare the results with what the run recorded.

`replay_shard` computes one shard's gradient of one step and compares its hash. The state before the step
comes from the newest good checkpoint that is early enough, else from the beginning; the steps in between are
done again with all shards, which one worker does to the same bits as many. Their losses are compared too: a
script that changed since is found out. `verify_run` computes all steps from the beginning, or some from the
beginning and from each kept version, and compares

    loss         of every step, bit for bit
    sample       of the weights that the step began with: replica_agreement.py
    hash         of the whole state, where the run was audited
    checkpoint   every kept version that the walk comes to: all of its tensors
    end          the hash that the run ended with

What is computed from a version takes that version for right; only a walk from the beginning to the end proves
the result. Nothing is written to the run's folder.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from paceline.checkpoint.digests import digest_of
from paceline.checkpoint.store import CheckpointStore
from paceline.comm.context import DistributedContext
from paceline.core.errors import ConfigError, PlatformError, UsageError
from paceline.core.events import RunEnded, RunStarted, ShardHashed, StepCommitted
from paceline.data.batch_plan import slices_of_step
from paceline.data.orders import epoch_order, facts_of
from paceline.data.seeding import set_aside
from paceline.data.sources import Source, as_source
from paceline.train import host_fingerprint
from paceline.train.callbacks import Modifier
from paceline.train.loop import process_setup
from paceline.train.loop.run import Run
from paceline.train.loop.run_builder import RunBuilder
from paceline.train.loop.run_hooks import one_group
from paceline.train.loop.worker_jobs import BuiltModel, TrainJob, build, compute, new_team
from paceline.train.settings.fault_tolerance import FaultTolerance
from paceline.train.settings.run_length import asked_for
from paceline.train.settings.train_config import TrainConfig, changes_of_definition, definition
from paceline.train.state.best_weights import BEST
from paceline.train.state.resume import resume
from paceline.train.state.run_folder import RunFolder
from paceline.train.step import replica_agreement
from paceline.train.step.step_hashes import shard_hash
from paceline.train.step_info import StepInfo
from paceline.train.stop_signals import StopRequest


@final
@dataclass(frozen=True)
class ReplayedShard:
    """Result of a replay. `same` is None where the journal has no hash of this shard.

    rank         of the worker that computed it in the run, as far as the journal knows
    loss         the mean over the shard's samples; NaN where it has none
    samples      their numbers in the data
    checkpoint   the version that the replay began with; None: the beginning of the run
    redone       steps that were done again to get there
    strayed      the first of them whose loss is not the journal's
    """

    step: int
    shard: int
    hash: str
    recorded: str | None
    same: bool | None
    loss: float
    samples: tuple[int, ...]
    rank: int | None = None
    checkpoint: int | None = None
    redone: int = 0
    strayed: int | None = None


class RecordedRun(Protocol):
    """Facts from the journal of a run; `monitor.journal_index.AuditRecord` is one."""

    started: RunStarted | None
    ended: RunEnded | None
    evaluations: dict[int, dict[str, float]]  # metrics by step

    @property
    def first(self) -> int:
        """The first step of the journal; 0 where it has none."""

    @property
    def last(self) -> int: ...

    def commit(self, step: int) -> StepCommitted | None:
        """Return the commit of a step that counts: not one that was done again later."""

    def shard_hash(self, step: int, shard: int) -> ShardHashed | None: ...

    def computed_by(self, step: int, shard: int) -> int | None:
        """Return the rank that the shard was assigned to, as far as the journal knows."""


def replay_shard(
    job: TrainJob, run: str | os.PathLike[str], record: RecordedRun, step: int, shard: int
) -> ReplayedShard:
    """Compute a shard again. `job` is the run's own, its config resolved; `run` is its folder, `record` its
    journal; `step` counts from 1, `shard` from 0."""
    shards = check_recomputable(record, job.config, job.train).shards
    if record.commit(step) is None:
        raise UsageError(
            f"step {step} is not in the run: its journal has steps {record.first} to {record.last}",
            remedy="choose one of these",
        )
    if not 0 <= shard < shards:
        raise UsageError(
            f"shard {shard} is not in the run: it has shards 0 to {shards - 1}", remedy="choose one of these"
        )
    with alone(job, record, step) as (built, replayed):
        state, store = replayed.state, kept_versions(job, run)
        if store is not None:
            resume(state, "auto", step - 1, store=store)
        state.ended = None
        first = state.position.step
        digest, loss = _walk(replayed, built, step, shard)
        commits = [
            (done, record.commit(done.step)) for done in replayed.parts.recorder.steps if done.step < step
        ]
        strayed = [done.step for done, known in commits if known and known.loss.hex() != done.loss.hex()]
    hashed = record.shard_hash(step, shard)
    recorded = None if hashed is None else hashed.hash
    return ReplayedShard(
        step=step,
        shard=shard,
        hash=digest,
        recorded=recorded,
        same=None if recorded is None else recorded == digest,
        loss=loss,
        samples=samples_of(record, step, shard, as_source(job.train)),
        rank=record.computed_by(step, shard) if hashed is None else hashed.rank,
        checkpoint=state.parent,
        redone=step - 1 - first,
        strayed=next(iter(strayed), None),
    )


def kept_versions(job: TrainJob, run: str | os.PathLike[str]) -> CheckpointStore | None:
    """Return the checkpoints of the run in this folder; None where it writes none."""
    if not job.config.checkpoint.enabled:
        return None
    return CheckpointStore(RunFolder.open(run).checkpoint_url(job.config))


@contextmanager
def alone(job: TrainJob, record: RecordedRun, last: int) -> Iterator[tuple[BuiltModel, Run]]:
    """Build the run in this process, at its beginning; it saves, evaluates and records nothing, and ends with
    step `last` at the latest. The caller's own parts stay as they are."""
    config = _settings(job, last)
    modifiers = [callback for callback in job.callbacks if isinstance(callback, Modifier)]
    # Optimizers hold the parameters of their model, so they are copied together.
    model, objective, optimizer, callbacks = copy.deepcopy(
        (job.model, job.objective, job.optimizer, modifiers)
    )
    alone = dataclasses.replace(
        job, model=model, objective=objective, optimizer=optimizer, config=config, callbacks=callbacks,
        validation=None, folder=None, stop_file=None, process=None,
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(one_group())
        stack.enter_context(set_aside())
        stack.enter_context(process_setup.prepared(config))
        context = stack.enter_context(DistributedContext(1, 0))
        built = build(alone, stack, 0)
        builder = RunBuilder(new_team(context, config), built.spec, built.device, StopRequest())

        def recorded(info: StepInfo) -> tuple[dict[str, float], int]:
            """Return what the run's own evaluation gave: a scheduler may follow it."""
            return dict(record.evaluations.get(info.step, {})), 0

        run = stack.enter_context(builder).run(None if job.scheduler is None else recorded)
        assert record.started is not None
        differ = host_fingerprint.differences(record.started.fingerprint, run.parts.fingerprint)
        if differ:
            raise PlatformError(
                f"the run was computed elsewhere, and its bits may differ here: {'; '.join(differ)}",
                remedy="compute it on a machine, with a torch and with threads like the run's",
            )
        yield built, run


def check_recomputable(record: RecordedRun, config: TrainConfig, data: Any) -> RunStarted:
    """Refuse a run that cannot be computed again here to the same bits, with the reason."""
    started, source = record.started, as_source(data)
    if started is None or not record.last:
        raise UsageError(
            "the run's journal has no step", remedy="give the folder of a run that was trained for a while"
        )
    if started.samples is None or source.size is None:
        raise UsageError(
            "the run trained on a stream, and a stream cannot be read again from the middle of a step",
            remedy="give a run that was trained on data with a length and samples by number",
        )
    if config.mode != "exact":
        raise UsageError(
            f"the run has mode={config.mode!r}, where a gradient depends on the number of workers",
            remedy='give a run of mode="exact"',
        )
    # Through JSON, as the journal has it: tuples are lists there.
    now = json.loads(json.dumps(definition(config, facts_of(source))))
    changes = changes_of_definition(started.definition, now)
    if source.size != started.samples:
        changes.append(f"samples: {started.samples} -> {source.size}")
    if changes:
        raise ConfigError(
            f"these are the settings of another run: {'; '.join(changes)}",
            remedy="give the script, the arguments and the data that made the run",
        )
    return started


def samples_of(record: RecordedRun, step: int, shard: int, source: Source) -> tuple[int, ...]:
    """Return the samples of the shard, by their numbers in the data; none where the journal does not have
    them."""
    commit, started = record.commit(step), record.started
    if commit is None or commit.offset < 0 or started is None or started.samples is None:
        return ()
    batch = started.definition["global_batch"]
    if started.definition.get("dynamic_batch") is not None:
        if commit.offset + commit.taken == started.samples:
            return ()  # how long a step that was cut short would have been is not recorded
        batch = commit.taken
    part = slices_of_step(commit.offset, commit.taken, batch, started.shards)[shard]
    order = epoch_order(
        source,
        seed=int(started.definition["seed"]),
        epoch=commit.epoch,
        batch=started.definition["global_batch"],
        shuffle=bool(started.definition.get("shuffle", True)),
    )
    return tuple(order.take(part.start, part.stop).tolist())


def _settings(job: TrainJob, step: int) -> TrainConfig:
    """Return the run's settings for one worker that watches, saves and evaluates nothing."""
    config = job.config
    quiet = dataclasses.replace(
        config,
        workers=1,
        progress=False,
        audit_every=0,
        evaluate_every=None if job.scheduler is None else config.evaluate_every,
        early_stopping=None,
        resume=None,
        run_dir=None,
        fault_tolerance=FaultTolerance(enabled=False),
    )
    several = job.scheduler if isinstance(job.scheduler, Sequence) else [job.scheduler]
    if "max_steps" in definition(config) or any(one and asked_for(one, "scheduler") for one in several):
        return quiet  # the learning rate is a function of the end
    # A run may have continued beyond the end that its script names.
    return dataclasses.replace(quiet, epochs=None, max_steps=step)


def _walk(run: Run, built: BuiltModel, step: int, shard: int) -> tuple[str, float]:
    """Train until the shard is computed; return its hash and its mean loss."""
    trained = list(run.parts.transaction.trained.values())
    digest = shard_hash([None] * len(trained))
    total, count = 0.0, 0
    steps = run.microbatches()
    for micro in steps:
        here = micro.step == step - 1 and micro.shard == shard
        if micro.step >= step or (micro.step == step - 1 and micro.shard > shard):
            break
        loss = compute(run, built, micro)
        if here:
            # Of several micro-batches the last one completes the gradient.
            digest = shard_hash(parameter.grad for parameter in trained)
            total, count = total + float(loss) * micro.count, count + micro.count
    steps.close()
    run.parts.recorder.flush()
    return digest, total / count if count else float("nan")


@final
@dataclass(frozen=True)
class StepInterval:
    """Steps that were computed again in a row, from a version (None: the beginning) of the step before."""

    version: int | None
    first: int
    last: int


@final
@dataclass(frozen=True)
class StepDifference:
    """The first thing that came out otherwise: after, or in, `step`, within `interval`."""

    step: int
    what: str
    recorded: str
    computed: str
    interval: StepInterval


@final
@dataclass(frozen=True)
class VerifiedRun:
    """Result of computing steps again. `compared`: how often each kind of evidence was the same; `complete`:
    every step of the run was computed again, from its beginning."""

    steps: int
    complete: bool
    intervals: tuple[StepInterval, ...]
    compared: Mapping[str, int] = field(default_factory=dict)
    different: StepDifference | None = None

    @property
    def same(self) -> bool:
        return self.different is None


def verify_run(
    job: TrainJob, run: str | os.PathLike[str], record: RecordedRun, steps: int | None = None
) -> VerifiedRun:
    """Compute steps again. `job` is the run's own, its config resolved; `run` is its folder, `record` its
    journal. `steps`: this number, spread over the beginning and the kept versions; None: all, from the
    beginning."""
    check_recomputable(record, job.config, job.train)
    store = kept_versions(job, run)
    manifests = () if store is None else store.manifests()
    versions = {manifest.info.step: manifest.version for manifest in manifests}
    plan = _planned(record.last, versions, steps)
    with alone(job, record, record.last) as (built, run_again):
        walk = _Walk(record, built, run_again, store, versions)
        for interval in plan:
            walk.go(interval)
            if walk.different is not None:
                break
    return VerifiedRun(
        steps=walk.steps,
        complete=steps is None and walk.different is None,
        intervals=tuple(walk.walked),
        compared=dict(walk.compared),
        different=walk.different,
    )


def _planned(last: int, versions: Mapping[int, int], steps: int | None) -> list[StepInterval]:
    """Return which steps are computed from where."""
    if steps is None or steps >= last:
        return [StepInterval(None, 1, last)]
    starts: list[tuple[int, int | None]] = [(0, None)]
    starts += [(step, version) for step, version in sorted(versions.items()) if 0 < step < last]
    if steps < len(starts):
        # Spread over the run: the first, the last, and what lies evenly between.
        gaps = max(1, steps - 1)
        starts = [starts[number * (len(starts) - 1) // gaps] for number in range(steps)]
    share, more = divmod(steps, len(starts))
    return [
        StepInterval(version, step + 1, min(last, step + share + (number < more)))
        for number, (step, version) in enumerate(starts)
    ]


@final
@dataclass
class _Walk:
    """One process that walks through intervals, and looks at what it has after each step."""

    record: RecordedRun
    built: BuiltModel
    run: Run
    store: CheckpointStore | None
    versions: Mapping[int, int]
    compared: Counter[str] = field(default_factory=Counter)
    walked: list[StepInterval] = field(default_factory=list)
    steps: int = 0
    different: StepDifference | None = None

    def __post_init__(self) -> None:
        self._sample = replica_agreement.WeightSample(self.built.module.parameters())

    def go(self, interval: StepInterval) -> None:
        """Compute the steps of an interval again, to its end or to the first difference."""
        self.walked.append(interval)
        run = self.run
        if interval.version is not None:
            resume(run.state, interval.version, store=self.store)
        run.state.ended = None
        after = before = interval.first - 1  # steps whose results, and whose weights, were looked at
        steps = run.microbatches()
        for micro in steps:
            if micro.step > after:
                after = micro.step
                self._check_after(after)
            if after < interval.last and before <= micro.step:
                before = micro.step + 1
                self._check_before(before)
            if after >= interval.last or self.different is not None:
                break
            compute(run, self.built, micro)
        steps.close()
        if self.different is None and run.state.position.step > after:
            self._check_after(run.state.position.step)  # the run's last step: none follows it

    def _check_before(self, step: int) -> None:
        """Check the weights that this step is computed with."""
        commit = self.record.commit(step)
        if commit is not None and commit.sample is not None:
            self._same(step, "sample", commit.sample, replica_agreement.to_hex(self._sample.of(step - 1)))

    def _check_after(self, step: int) -> None:
        """Check the weights that this step has left."""
        self.steps += 1
        commit = self.record.commit(step)
        newest = self.run.parts.recorder.flush()
        if commit is not None and newest is not None and newest.step == step:
            self._same(step, "loss", commit.loss.hex(), newest.loss.hex())
        if commit is not None and commit.hash is not None:
            self._same(step, "hash", commit.hash, self.run.state.weights_hash())
        version = self.versions.get(step)
        if version is not None and self.store is not None:
            # Nothing is evaluated again: the weights of the best evaluation are not known here.
            saved = {
                name: tensor
                for name, tensor in self.store.open(version).tensors().items()
                if not name.startswith(BEST)
            }
            self._same(step, "checkpoint", digest_of(saved), digest_of(self.run.state.export().tensors))
        ended = self.record.ended
        if ended is not None and step == (ended.step if ended.restored is None else ended.restored):
            self._same(step, "end", ended.hash, self.run.state.weights_hash())

    def _same(self, step: int, what: str, recorded: str, computed: str) -> None:
        if recorded == computed:
            self.compared[what] += 1
        elif self.different is None:
            self.different = StepDifference(step, what, recorded, computed, self.walked[-1])
