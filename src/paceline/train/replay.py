"""Computes one shard's gradient of one step again, in this process, and compares its hash with the journal's.

The state before the step comes from the newest good checkpoint that is early enough, else from the beginning;
the steps in between are done again with all shards, which one worker does to the same bits as many. Their
losses are compared with the journal's too: a script that changed since is found out. Nothing is written to
the run's folder. Must not know how the user's parts were found.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

from paceline.checkpoint.store import CheckpointStore
from paceline.comm.context import DistributedContext
from paceline.core import journal
from paceline.core.errors import ConfigError, PlatformError, UsageError
from paceline.core.events import RunStarted
from paceline.data.generators import new_numpy, set_aside
from paceline.data.permutation import InOrder, Permutation
from paceline.data.plan import slices_of_step
from paceline.data.sources import as_source
from paceline.train import audit_record, fingerprint, run_setup
from paceline.train.assembly import Assembled
from paceline.train.audit_record import Record
from paceline.train.callbacks import Modifier
from paceline.train.config import TrainConfig, changes_of_definition, definition
from paceline.train.fault_tolerance import FaultTolerance
from paceline.train.precision import autocast
from paceline.train.run import Run
from paceline.train.run_folder import RunFolder
from paceline.train.shard_hash import shard_hash
from paceline.train.signals import StopRequest
from paceline.train.worker import Built, TrainJob, build, new_team


@final
@dataclass(frozen=True)
class Replayed:
    """What came out. `same` is None where the journal has no hash of this shard.

    rank         who computed it in the run, as far as the journal knows
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


def replay_shard(job: TrainJob, run: str | os.PathLike[str], step: int, shard: int) -> Replayed:
    """`job` is the run's own, its config resolved; `run` its folder; `step` counts from 1, `shard` from 0."""
    folder = RunFolder.open(run)
    record = audit_record.read(journal.iterate(folder.journal_file))
    check_replayable(record, job.config, job.train, step, shard)
    with alone(job, record, step) as (built, assembled, walked):
        if job.config.checkpoint.enabled:
            assembled.store = CheckpointStore(folder.checkpoint_url(job.config))
            assembled.take_up(walked, "auto", step - 1)
        walked.ended = None
        first = walked.position.step
        digest, loss = _walk(walked, built, assembled, step, shard)
        strayed = _strayed(record, assembled, step)
    told = [
        event
        for index, event in record.shard_hashes
        if (event.step, event.shard) == (step, shard) and not record.superseded(step, index)
    ]
    recorded = told[-1].hash if told else None
    return Replayed(
        step=step,
        shard=shard,
        hash=digest,
        recorded=recorded,
        same=None if recorded is None else recorded == digest,
        loss=loss,
        samples=samples_of(record, step, shard),
        rank=told[-1].rank if told else _assigned(record, step, shard),
        checkpoint=assembled.parent,
        redone=step - 1 - first,
        strayed=strayed,
    )


@contextmanager
def alone(job: TrainJob, record: Record, last: int) -> Iterator[tuple[Built, Assembled, Run]]:
    """The run in this process, at its beginning, with nothing but the numbers: it saves, evaluates and tells
    nothing. It goes no further than step `last`. The caller's own parts stay as they are."""
    config = _settings(job.config, last)
    # Optimizers hold the parameters of their model, so they are copied together.
    model, objective, optimizer, callbacks = copy.deepcopy(
        (job.model, job.objective, job.optimizer, [one for one in job.callbacks if isinstance(one, Modifier)])
    )
    alone = dataclasses.replace(
        job, model=model, objective=objective, optimizer=optimizer, config=config, callbacks=callbacks,
        validation=None, folder=None, stop_file=None, process=None,
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(set_aside(new_numpy()))
        stack.enter_context(run_setup.prepared(config))
        context = stack.enter_context(DistributedContext(1, 0))
        built = build(alone, stack, 0)
        assembled = Assembled(new_team(context, config), built.given, built.device, StopRequest())
        stack.push(assembled)
        _check_fingerprint(record, assembled)
        yield built, assembled, assembled.run()


def check_replayable(record: Record, config: TrainConfig, data: Any, step: int, shard: int) -> None:
    """Refuses what cannot be replayed, or not to the same bits, with the reason."""
    started = _started(record)
    if step not in record.steps:
        raise UsageError(
            f"step {step} is not in the run: its journal has steps {min(record.steps)} to {record.last}",
            remedy="choose one of these",
        )
    if not 0 <= shard < started.shards:
        raise UsageError(
            f"shard {shard} is not in the run: it has shards 0 to {started.shards - 1}",
            remedy="choose one of these",
        )
    check_recomputable(record, config, data)


def _started(record: Record) -> RunStarted:
    if record.started is None or not record.steps:
        raise UsageError(
            "the run's journal has no step", remedy="give the folder of a run that was trained for a while"
        )
    return record.started


def check_recomputable(record: Record, config: TrainConfig, data: Any) -> None:
    """Refuses a run that cannot be computed again here to the same bits, with the reason."""
    started = _started(record)
    source = as_source(data)
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
    changes = changes_of_definition(started.definition, json.loads(json.dumps(definition(config))))
    if source.size != started.samples:
        changes.append(f"samples: {started.samples} -> {source.size}")
    if changes:
        raise ConfigError(
            f"these are the settings of another run: {'; '.join(changes)}",
            remedy="give the script, the arguments and the data that made the run",
        )


def samples_of(record: Record, step: int, shard: int) -> tuple[int, ...]:
    """Which samples the shard took, by their numbers in the data; none where the journal does not say."""
    commit, started = record.steps[step].event, record.started
    if commit.offset < 0 or started is None or started.samples is None:
        return ()
    batch = started.definition["global_batch"]
    if started.definition.get("dynamic_batch") is not None:
        if commit.offset + commit.taken == started.samples:
            return ()  # of a step that is cut short nobody knows how long it would have been
        batch = commit.taken
    part = slices_of_step(commit.offset, commit.taken, batch, started.shards)[shard]
    order: Permutation | InOrder = InOrder(started.samples)
    if started.definition.get("shuffle", True):
        order = Permutation(started.samples, int(started.definition["seed"]), commit.epoch)
    return tuple(order.take(part.start, part.stop).tolist())


def _settings(config: TrainConfig, step: int) -> TrainConfig:
    """The run's settings for one worker that watches, saves and evaluates nothing."""
    quiet = dataclasses.replace(
        config,
        workers=1,
        progress=False,
        audit_every=0,
        evaluate_every=None,
        early_stopping=None,
        resume=None,
        run_dir=None,
        fault_tolerance=FaultTolerance(enabled=False),
    )
    if config.schedule in ("linear", "cosine"):
        return quiet
    # A run may have gone on beyond the end that its script names.
    return dataclasses.replace(quiet, epochs=None, max_steps=step)


def _check_fingerprint(record: Record, assembled: Assembled) -> None:
    assert record.started is not None
    differ = fingerprint.differences(record.started.fingerprint, assembled.fingerprint)
    if differ:
        raise PlatformError(
            f"the run was computed elsewhere, and its bits may differ here: {'; '.join(differ)}",
            remedy="compute it on a machine, with a torch and with threads like the run's",
        )


def _walk(run: Run, built: Built, assembled: Assembled, step: int, shard: int) -> tuple[str, float]:
    """Walks through the steps until the shard is computed: its hash and its mean loss."""
    trained = list(assembled.transaction.trained.values())
    digest = shard_hash([None] * len(trained))
    total, count = 0.0, 0
    steps = run.microbatches()
    for micro in steps:
        here = micro.step == step - 1 and micro.shard == shard
        if micro.step >= step or (micro.step == step - 1 and micro.shard > shard):
            break
        with autocast(assembled.config.precision, built.device):
            scored = built.objective.score(built.call, assembled.callbacks.change_batch(micro.data))
        loss = scored.loss.detach()
        run.backward(scored.loss, scored.metrics)
        if here:
            # Of several micro-batches the last one completes the gradient.
            digest = shard_hash(parameter.grad for parameter in trained)
            total, count = total + float(loss) * micro.count, count + micro.count
    steps.close()
    assembled.recorder.flush()
    return digest, total / count if count else float("nan")


def _strayed(record: Record, assembled: Assembled, step: int) -> int | None:
    for done in assembled.recorder.steps:
        known = record.steps.get(done.step)
        if done.step < step and known is not None and known.event.loss.hex() != done.loss.hex():
            return done.step
    return None


def _assigned(record: Record, step: int, shard: int) -> int | None:
    members = record.views.get(record.steps[step].view)
    dealt = members.shards if members is not None else {}
    return next((member[0] for member, shards in dealt.items() if shard in shards), None)
