"""`DistributedTrainingOrchestrator`: training on many workers from inside an event loop, which never waits.

What may take time (generating data, starting processes, reading the journal, checksums) is done in a few
threads; training itself is in other processes. The loop only takes in what the run's journal says and, now
and then, what is measured of the workers. Must not know how a job is carried out: `job` and `async_job` do.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, final

import torch
from torch import nn

from paceline.core import journal
from paceline.core.errors import PacelineError, UsageError
from paceline.core.events import Event
from paceline.data.generators import new_numpy, set_aside
from paceline.frontends.orchestrator import checksums, preparation
from paceline.frontends.orchestrator.config import TrainingConfig, read_config
from paceline.frontends.orchestrator.job import PRELOAD, Job, Outcome
from paceline.frontends.orchestrator.metrics import Broadcast
from paceline.frontends.orchestrator.nodes import (
    DataShard,
    ModelVersion,
    TrainingMetrics,
    WorkerNode,
    WorkerState,
)
from paceline.frontends.orchestrator.preparation import Prepared
from paceline.frontends.orchestrator.summary import result_of, summary_of
from paceline.frontends.orchestrator.tracker import Tracker
from paceline.frontends.spawn import spawn
from paceline.train.run_setup import build_model
from paceline.train.state import model_tensors

T = TypeVar("T")

_log = logging.getLogger(__name__)

_THREADS = 4
_TICK_SECONDS = 0.05
_PULSE_SECONDS = 0.5
_READ_BYTES = 64 * 1024


class _Phase(Enum):
    NEW = "new"
    INITIALIZING = "being initialised"
    READY = "ready"
    TRAINING = "training"
    CLOSED = "closed"


class _Asked(Enum):
    NOTHING = "nothing"
    STOP = "finish the step, save, end"
    END = "end at once"


@final
class DistributedTrainingOrchestrator:
    """Trains with `num_workers` workers of this machine.

        orchestrator = DistributedTrainingOrchestrator(num_workers=4)
        await orchestrator.initialize_workers()
        result = await orchestrator.train_distributed(
            {"size": 1_000_000, "batch_size": 32, "learning_rate": 1e-3, "epochs": 10},
            {"total_samples": 100_000},
        )
        await orchestrator.cleanup()

    As `async with`, initialising and cleaning up happen by themselves. Belongs to one event loop. Cancelling
    the task that trains finishes the step, saves, and ends every process before the task is over.
    """

    def __init__(self, num_workers: int = 4) -> None:
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
            raise UsageError(
                f"num_workers={num_workers!r} is not a whole number from 1", remedy="pass num_workers=4"
            )
        self.num_workers = num_workers
        self._phase = _Phase.NEW
        self._pool: ThreadPoolExecutor | None = None
        self._nodes = tuple(WorkerNode(number) for number in range(num_workers))
        self._broadcast = Broadcast()
        self._tracker: Tracker | None = None
        self._prepared: Prepared | None = None
        self._job: Job | None = None
        self._outcome: Outcome | None = None
        self._config: TrainingConfig | None = None
        self._started = 0.0
        self._seconds = 0.0
        self._offset = 0
        self._asked = _Asked.NOTHING
        self._task: asyncio.Task[Any] | None = None  # the one that trains
        self._trying: asyncio.Future[Any] | None = None  # whether workers can be started
        self._model: nn.Module | None = None

    # to be looked at

    @property
    def workers(self) -> tuple[WorkerNode, ...]:
        """Every worker as it is now."""
        return self._nodes if self._tracker is None else self._tracker.nodes()

    @property
    def shards(self) -> tuple[DataShard, ...]:
        """Every shard of the data as it is now; none before training."""
        return () if self._tracker is None else tuple(self._tracker.shards)

    @property
    def checkpoints(self) -> tuple[ModelVersion, ...]:
        """The versions of the model that are durable, oldest first, of the last training."""
        return () if self._tracker is None else tuple(self._tracker.checkpoints)

    @property
    def run_dir(self) -> Path | None:
        """The folder of the last training: settings, journal, checkpoints, logs."""
        return None if self._job is None else self._job.folder.path

    @property
    def model(self) -> nn.Module | None:
        """The trained module, after a training: the one that was given, or the one that was built."""
        return self._model

    def metrics(self) -> AsyncIterator[TrainingMetrics]:
        """Every step from now on; ends with the training. Any number of consumers."""
        self._refuse(_Phase.CLOSED, "metrics")
        return self._broadcast.subscribe()

    # to be called in order

    async def initialize_workers(self) -> None:
        """Warms up the process that workers are forked from, and sees that so many can be started.

        Where it fails, it can be called again.
        """
        if self._phase is not _Phase.NEW:
            raise UsageError(
                f"initialize_workers() on an orchestrator that is {self._phase.value}",
                remedy="call it once; after cleanup() make a new orchestrator",
            )
        preparation.refuse_inside_a_job()
        pool = self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="paceline-orchestrator")
        self._phase = _Phase.INITIALIZING
        try_workers = partial(spawn, _say_hello, workers=self.num_workers, threads=1, preload=PRELOAD)
        try:
            self._trying = asyncio.get_running_loop().run_in_executor(pool, try_workers)
            await _finish(self._trying)
        except BaseException:
            if self._phase is _Phase.INITIALIZING:
                self._phase, self._pool, self._trying = _Phase.NEW, None, None
                # Nobody waits for its threads: of one that was cancelled twice, one is still busy.
                pool.shutdown(wait=False)
            raise
        if self._phase is not _Phase.INITIALIZING:
            raise UsageError(
                "cleanup() was called while initialize_workers() was under way: there are no workers now",
                remedy="await initialize_workers() before cleanup(); make a new orchestrator to train",
            )
        self._phase, self._trying = _Phase.READY, None
        host = socket.gethostname()
        now = time.time()
        self._nodes = tuple(
            WorkerNode(node.id, WorkerState.IDLE, host, last_heartbeat=now) for node in self._nodes
        )

    async def train_distributed(
        self,
        config: TrainingConfig | Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        *,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        dataset: Any = None,
        objective: Callable[..., Any] | None = None,
        optimizer: Any = None,
    ) -> dict[str, Any]:
        """Trains to the end and returns what came out: epochs_completed, final_loss and more.

        With sizes alone, {"size": ..., ...} and {"total_samples": ...}, on a synthetic task; with `model`,
        `dataset` and `objective` on the user's. `optimizer` is a function from parameters to an optimizer;
        left out it is AdamW with the learning rate of the settings.
        """
        self._check_can_train()
        settings = read_config(config)
        preparation.check_given(settings, data, model, dataset, objective, optimizer)
        self._begin(settings)
        self._task = asyncio.current_task()
        try:
            given = await self._off_loop(
                partial(preparation.choose, settings, data, model, dataset, objective, optimizer)
            )
            prepared = await self._off_loop(
                partial(preparation.make_ready, settings, given, self.num_workers)
            )
            return await self._train(prepared)
        finally:
            self._seconds = time.perf_counter() - self._started
            if self._tracker is not None:
                self._tracker.end()
            self._broadcast.end()
            self._task = None
            if self._phase is _Phase.TRAINING:
                self._phase = _Phase.READY

    async def get_training_summary(self) -> dict[str, Any]:
        """What is known of the last training, or of the one under way, as plain data."""
        if self._tracker is None or self._config is None:
            raise UsageError(
                "there is no training to summarise", remedy="call it during or after train_distributed()"
            )
        running = self._phase is _Phase.TRAINING
        seconds = time.perf_counter() - self._started if running else self._seconds
        return summary_of(self._config, self._tracker, self._outcome, seconds, running, self.run_dir)

    async def cleanup(self) -> None:
        """Ends whatever is left and gives everything back. Again does no harm."""
        if self._phase is _Phase.CLOSED:
            return
        self._phase = _Phase.CLOSED
        task = self._task
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.wait([task])
        self._broadcast.end()
        if self._pool is None:
            return
        if self._trying is not None:
            # Starting workers cannot be broken off; whoever awaits it is told when it is over.
            await asyncio.wait([self._trying])
        if self._job is not None:
            await self._off_loop(self._job.close)
        pool, self._pool = self._pool, None
        await asyncio.to_thread(pool.shutdown)
        self._nodes = tuple(WorkerNode(node.id, WorkerState.STOPPED, node.host) for node in self._nodes)

    async def __aenter__(self) -> Self:
        await self.initialize_workers()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cleanup()

    # inside

    def _refuse(self, phase: _Phase, what: str) -> None:
        if self._phase is phase:
            raise UsageError(
                f"{what}() on an orchestrator that is {phase.value}", remedy="make a new orchestrator"
            )

    def _check_can_train(self) -> None:
        self._refuse(_Phase.CLOSED, "train_distributed")
        if self._phase in (_Phase.NEW, _Phase.INITIALIZING):
            raise UsageError(
                f"train_distributed() before initialize_workers() was done: it is {self._phase.value}",
                remedy="await orchestrator.initialize_workers() first, or use async with",
            )
        if self._phase is _Phase.TRAINING:
            raise UsageError(
                "train_distributed() while another training is under way",
                remedy="await the first one, or make a second orchestrator",
            )

    def _begin(self, settings: TrainingConfig) -> None:
        if self._tracker is not None:
            self._broadcast = Broadcast()
        self._phase = _Phase.TRAINING
        self._config, self._outcome, self._model = settings, None, None
        self._started, self._offset, self._asked = time.perf_counter(), 0, _Asked.NOTHING
        self._tracker = Tracker(self.num_workers, self.num_workers, None, socket.gethostname())

    async def _train(self, prepared: Prepared) -> dict[str, Any]:
        source = prepared.given.source
        tracker = Tracker(
            self.num_workers,
            prepared.shards,
            source.size,
            socket.gethostname(),
            measured=prepared.measured,
        )
        self._tracker, self._prepared = tracker, prepared
        ranges = [shard.range for shard in tracker.shards]
        tracker.checked(await self._off_loop(partial(checksums.checksums, source, ranges)))
        carried = asyncio.create_task(self._carry_out(prepared), name="paceline-orchestrator")
        try:
            await asyncio.shield(carried)
        except asyncio.CancelledError:
            await self._stop(carried)
            raise
        job = self._job
        assert job is not None
        assert self._config is not None
        outcome = self._outcome = await self._off_loop(job.result)
        await self._verify(range(len(tracker.shards)))
        self._model = await self._off_loop(partial(_with_weights, prepared, outcome))
        return result_of(self._config, tracker, outcome, job.folder.path)

    async def _stop(self, carried: asyncio.Task[None]) -> None:
        """Finish the step, save, end; told twice, end at once. Afterwards nobody is left."""
        self._asked = _Asked.STOP
        while not carried.done():
            try:
                await asyncio.wait([carried])
            except asyncio.CancelledError:
                self._asked = _Asked.END
        if not carried.cancelled() and carried.exception() is not None:
            _log.warning("while the training was stopped: %s", carried.exception())

    async def _carry_out(self, prepared: Prepared) -> None:
        """From the start of the processes to their end."""
        if self._job is not None:
            await self._off_loop(self._job.close)
        job = self._job = await self._off_loop(prepared.start)
        # Beside the journal, whose news is not to wait for a supervisor that does not answer.
        hearing = asyncio.create_task(self._hear(job)) if prepared.measured else None
        try:
            await self._follow(job)
        finally:
            if hearing is not None:
                hearing.cancel()
                await asyncio.wait([hearing])

    async def _hear(self, job: Job) -> None:
        """Takes in, now and then, what is measured of each worker."""
        tracker = self._tracker
        assert tracker is not None
        while True:
            await asyncio.sleep(_PULSE_SECONDS)
            tracker.hear(await self._off_loop(job.pulses))

    async def _follow(self, job: Job) -> None:
        """To the end of a job, taking in what its journal says."""
        failure: PacelineError | None = None
        told = _Asked.NOTHING
        over = False
        while not over:
            if told is not self._asked:
                told = self._asked
                end = partial(job.stop, "the task was cancelled") if told is _Asked.STOP else job.close
                await self._off_loop(end)
            over = await self._off_loop(partial(job.wait, _TICK_SECONDS))
            while found := await self._off_loop(partial(self._read, job.folder.journal_file)):
                moved = self._take(found)
                try:
                    await self._verify(moved)
                except PacelineError as error:
                    failure = failure or error
                    await self._off_loop(partial(job.stop, "the data changed"))
        if failure is not None:
            raise failure

    def _take(self, found: tuple[Event, ...]) -> list[int]:
        assert self._tracker is not None
        moved: set[int] = set()
        for event in found:
            metrics, shards = self._tracker.take(event)
            moved.update(shards)
            if metrics is not None:
                self._broadcast.publish(metrics)
        return sorted(moved)

    def _read(self, file: Path) -> tuple[Event, ...]:
        """In a thread; only one reads at a time."""
        if not file.exists():
            return ()
        chunk = journal.read(file, self._offset, max_bytes=_READ_BYTES)
        self._offset = chunk.offset
        return chunk.events

    async def _verify(self, indices: range | list[int]) -> None:
        tracker, prepared = self._tracker, self._prepared
        assert tracker is not None
        assert prepared is not None
        for index in indices:
            shard = tracker.shards[index]
            check = partial(checksums.verify, prepared.given.source, index, shard.range, shard.checksum)
            if await self._off_loop(check):
                tracker.verified(index)

    async def _off_loop(self, do: Callable[[], T]) -> T:
        """In a thread. Whoever is cancelled meanwhile waits for it: nothing is left half done."""
        assert self._pool is not None
        return await _finish(asyncio.get_running_loop().run_in_executor(self._pool, do))


async def _finish(future: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


def _say_hello(context: Any) -> int:
    """What a worker does to show that it can be started."""
    return int(context.rank)


def _with_weights(prepared: Prepared, outcome: Outcome) -> nn.Module:
    """The module with the trained weights; in a thread, and the caller's generators do not notice."""
    module: Any = prepared.given.model
    if not isinstance(module, nn.Module):
        with set_aside(new_numpy()):
            module = build_model(module, prepared.config.seed)
    with torch.no_grad():
        for name, tensor in model_tensors(module).items():
            tensor.copy_(outcome.weights[name])
    made: nn.Module = module
    return made
