"""Entry points of the processes of asynchronous SGD: build the parts, then run the server or a worker.

The fork server imports this module once, before it forks any of them.
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, final

from torch import nn

from paceline.aggregate.async_sgd.async_checkpointer import AsyncCheckpointer
from paceline.aggregate.async_sgd.gradient_exchange import work
from paceline.aggregate.async_sgd.gradient_server import GradientServer
from paceline.aggregate.async_sgd.range_allocator import RangeAllocator, SampleRange
from paceline.aggregate.async_sgd.staleness import GradientLedger, Staleness
from paceline.checkpoint.loader import Checkpoint
from paceline.checkpoint.store import CheckpointStore
from paceline.comm import tensor_pickling
from paceline.core import events
from paceline.core.errors import ConfigError
from paceline.core.journal import Journal, PatientJournal
from paceline.core.plain_options import PlainOptions
from paceline.data.orders import EpochOrder, epoch_order, facts_of
from paceline.data.seeding import seed_everything
from paceline.engines.local import rank_call
from paceline.engines.local.forked_rank import RankTask
from paceline.train.history import EpochRecord, History, StepRecord, earlier_steps
from paceline.train.loop import process_setup
from paceline.train.loop.training_thread import TrainingOutcome
from paceline.train.loop.worker_jobs import TrainJob
from paceline.train.objective import Objective
from paceline.train.settings.train_config import CheckpointConfig, definition
from paceline.train.state import model_state, optimizers
from paceline.train.state.model_state import state_hash
from paceline.train.state.recorder import EpochSums
from paceline.train.state.run_folder import RunFolder
from paceline.train.step.batch_feed import to_device
from paceline.train.step.lockstep_limits import refuse_synced_layers
from paceline.train.step_info import StepInfo

_FORMAT = 1
_NEVER = 1 << 62


@dataclass(frozen=True)
class AsyncTraining:
    """An asynchronous training as it is sent to its processes; `patience` is the time for one range."""

    job: TrainJob
    staleness: Staleness
    patience: float


@final
@dataclass(frozen=True)
class ServerOptions(PlainOptions):
    """Options of a server process: `attempt` counts the servers of a training from 1; `resume`: begin with
    the newest checkpoint."""

    attempt: int
    resume: bool


@final
@dataclass(frozen=True)
class AsyncWorkerOptions(PlainOptions):
    """Options of a worker process: the number of its slot."""

    worker: int


def server_main(task: RankTask) -> int:
    """Run the server of asynchronous SGD."""
    options = ServerOptions.from_plain(task.options)
    return _run_entry(task, lambda training, sock: _serve(training, sock, options))


def worker_main(task: RankTask) -> int:
    """Run a worker; its second descriptor is the memory that it shares with the server."""
    slot = AsyncWorkerOptions.from_plain(task.options).worker
    return _run_entry(task, lambda training, sock: _work(training, sock, task.descriptors[1], slot))


def _run_entry(task: RankTask, do: Callable[[AsyncTraining, socket.socket], Any]) -> int:
    __tracebackhide__ = True
    packed = rank_call.unpack(task.payload)
    task.shared = packed.classes
    training: AsyncTraining = packed.args[0]
    assert training.job.process is not None
    try:
        training.job.process.apply()
        with socket.socket(fileno=task.descriptors[0]) as sock:
            result = do(training, sock)
        return rank_call.pack_result(result, packed, task.rank, tensor_pickling.reducers())
    except BaseException as error:
        task.fail(error)
        raise


def _serve(training: AsyncTraining, control: socket.socket, options: ServerOptions) -> TrainingOutcome:
    started = time.perf_counter()
    job, config = training.job, training.job.config
    assert job.folder is not None
    folder = RunFolder(job.folder)
    module = process_setup.build_model(job.model, config.seed).train()
    refuse_synced_layers(module, "asynchronous workers do not wait for each other's batches")
    made = optimizers.build(job.optimizer, module)
    ranges = RangeAllocator(job.train.size, config.epochs or 1, config.global_batch // config.workers)
    ledger = GradientLedger(ranges, training.staleness, config.workers)
    with ExitStack() as stack:
        journal = PatientJournal(Journal(folder.journal_file))
        stack.callback(journal.close)
        emit = journal.append
        store = CheckpointStore(folder.checkpoint_url(config))
        checkpointer = AsyncCheckpointer(
            store,
            lambda: _contents(job, module, made, ledger),
            emit,
            every=_steps_between_versions(config.checkpoint, ranges),
            keep_last=config.checkpoint.keep_last,
        )
        stack.callback(checkpointer.close)
        checkpoint = store.newest_good() if options.resume else None
        if checkpoint is not None:
            _load(job, checkpoint, module, made, ledger)
            checkpointer.resume_from(
                checkpoint.version, checkpoint.manifest.info.step, checkpoint.manifest.info.run
            )
        emit(events.SupervisorStarted(time=time.time(), pid=os.getpid(), attempt=options.attempt, address=""))
        emit(_opening_event(job, checkpoint, ledger))
        earlier = earlier_steps(folder.journal_file, ledger.version) if ledger.version else ()
        server = GradientServer(
            module,
            made,
            ledger,
            control,
            emit,
            checkpointer=checkpointer,
            clip_norm=config.clip_norm,
            patience=training.patience,
        )
        server.serve()
        digest = state_hash(module)
        reason = server.stopped if not ledger.allocator.done else None
        emit(
            events.RunEnded(
                time=time.time(),
                step=ledger.version,
                epoch=ledger.allocator.completed,
                reason=reason or "finished",
                hash=digest,
            )
        )
        steps = (*earlier, *map(StepRecord.of, server.steps))
        history = History(
            total_time=time.perf_counter() - started,
            state_hash=digest,
            steps=steps,
            epochs=_epochs(steps),
            workers=config.workers,
            shards=config.workers,
            run_dir=str(folder.path),
            stopped=reason,
        )
        weights = {name: tensor.cpu() for name, tensor in model_state.model_tensors(module).items()}
        return TrainingOutcome(history, weights, ledger.allocator.completed, reason, ledger.statistics())


def _steps_between_versions(settings: CheckpointConfig, ranges: RangeAllocator) -> int:
    """Return the steps between two versions; an epoch is as many steps as it has ranges, though the last of
    them may still be in progress when the next epoch begins."""
    if settings.every_steps is not None:
        return settings.every_steps
    if settings.every_epochs is None:
        return _NEVER
    epochs = 1 if settings.every_epochs == "auto" else settings.every_epochs
    return epochs * -(-ranges.samples // ranges.batch)


def _epochs(steps: Sequence[StepRecord]) -> tuple[EpochRecord, ...]:
    sums: dict[int, EpochSums] = defaultdict(EpochSums)
    for step in steps:
        sums[step.epoch].add(step)
    # Without means of the metrics, which are about single workers here.
    return tuple(replace(found.record(epoch, {}), metrics={}) for epoch, found in sorted(sums.items()))


def _work(training: AsyncTraining, sock: socket.socket, memory: int, slot: int) -> None:
    job, config = training.job, training.job.config
    with process_setup.prepared(config):
        device = process_setup.choose_device(config, slot)
        module = process_setup.build_model(job.model, config.seed).to(device).train()
        objective = Objective(job.objective)
        objective.to(device)
        orders: dict[int, EpochOrder] = {}
        each = config.global_batch // config.workers
        ranges = -(-job.train.size // each)
        course = StepInfo(steps_per_epoch=ranges, total_steps=ranges * (config.epochs or 1))

        def compute(part: SampleRange) -> tuple[float, int]:
            if part.epoch not in orders:
                orders.clear()
                orders[part.epoch] = epoch_order(
                    job.train, seed=config.seed, epoch=part.epoch, batch=each, shuffle=True
                )
            ids = orders[part.epoch].take(part.start, part.stop)
            # Seeded by the range, so that it does not matter which worker computes it.
            seed_everything(config.seed, part.epoch, part.start)
            batch = job.train.fetch(ids)
            if batch.count == 0:
                return 0.0, 0
            # By the range's place in the data: which updates come before its own is not known here.
            info = course.at(part.epoch * ranges + part.start // each, part.epoch)
            scored = objective.score(module, to_device(batch.data, device), info)
            scored.loss.backward()  # type: ignore[no-untyped-call]
            return float(scored.loss.detach()), batch.count

        work(sock, memory, module, compute)
        objective.check_unchanged()
    os.close(memory)


def _contents(
    job: TrainJob, module: nn.Module, made: list[Any], ledger: GradientLedger
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lay the state out as checkpoints of synchronous training do, so that the same tools read it."""
    tensors = {model_state.MODEL + name: t for name, t in model_state.model_tensors(module).items()}
    tensors |= optimizers.tensors_of(made, module)
    tensors, pairs = model_state.as_pairs(tensors)
    plain = {
        "format": _FORMAT,
        "model": model_state.model_names(module),
        "optimizers": optimizers.plain_state_of(made, module),
        "definition": _definition(job),
        "dealer": ledger.allocator.state_dict(),
        "version": ledger.version,
        "pairs": pairs,
    }
    return tensors, plain


def _definition(job: TrainJob) -> dict[str, Any]:
    return {**definition(job.config, facts_of(job.train)), "shards": None, "mode": "asynchronous"}


def _load(
    job: TrainJob, found: Checkpoint, module: nn.Module, made: list[Any], ledger: GradientLedger
) -> None:
    saved = found.state
    mine = {
        "mode": saved.get("definition", {}).get("mode"),
        "samples": saved.get("dealer", {}).get("samples"),
    }
    wanted = {"mode": "asynchronous", "samples": job.train.size}
    if mine != wanted:
        raise ConfigError(
            f"version {found.version} belongs to another run: {mine} instead of {wanted}",
            remedy="resume with the strategy and the data of the run, or choose another run_dir",
        )
    tensors = model_state.from_pairs(found.tensors(), saved["pairs"])
    model_state.load_model(module, tensors)
    optimizers.load(made, module, saved["optimizers"], tensors)
    ledger.allocator.load_state_dict(saved["dealer"])
    ledger.version = saved["version"]


def _opening_event(job: TrainJob, found: Checkpoint | None, ledger: GradientLedger) -> events.Event:
    if found is not None:
        return events.RunResumed(
            time=time.time(),
            version=found.version,
            step=ledger.version,
            epoch=ledger.allocator.completed,
            workers=job.config.workers,
        )
    return events.RunStarted(
        time=time.time(),
        workers=job.config.workers,
        shards=job.config.workers,
        samples=job.train.size,
        definition=_definition(job),
        fingerprint={},
    )
