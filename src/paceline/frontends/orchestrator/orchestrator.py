"""`DistributedTrainingOrchestrator`: train on many workers from inside an event loop, without blocking it.

What may block (generating data, starting processes, reading the journal, checksums) runs in a few threads;
training itself runs in other processes. The loop only applies the events of the run's journal and, now and
then, what the supervisor has measured of the workers.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Self, TypeVar, final

from torch import nn

from paceline.core import journal
from paceline.core.errors import PacelineError, UsageError
from paceline.core.events import Event
from paceline.elastic.supervisor.tool_client import NotRunningError
from paceline.frontends import fit_drivers, overrides
from paceline.frontends.error_folding import folding_errors
from paceline.frontends.orchestrator import job_preparation, mpi_training
from paceline.frontends.orchestrator.job_preparation import PreparedTraining
from paceline.frontends.orchestrator.lifecycle import EndRequest, OrchestratorState, ThreadCalls, finished
from paceline.frontends.orchestrator.metric_publisher import MetricPublisher
from paceline.frontends.orchestrator.observed_state import (
    DataShard,
    ModelVersion,
    TrainingMetrics,
    WorkerNode,
    WorkerState,
    checksum,
    verify,
)
from paceline.frontends.orchestrator.orchestrator_config import TrainingConfig, read_config, worker_count
from paceline.frontends.orchestrator.run_tracker import RunTracker, result_of, summary_of
from paceline.frontends.orchestrator.sync_job import measurements, request_workers
from paceline.frontends.spawn import spawn
from paceline.train.loop.training_thread import PRELOAD, TrainingJob, TrainingOutcome

T = TypeVar("T")

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.05
_START_SECONDS = 10.0  # until a supervisor that was started answers
_MEASURE_SECONDS = 0.5
_READ_BYTES = 64 * 1024


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

    @folding_errors
    def __init__(self, num_workers: int = 4) -> None:
        job_preparation.refuse_engine_of_options()
        chosen = overrides.current().workers  # of `paceline train --num-gpus`
        self.num_workers = worker_count("num_workers", num_workers if chosen is None else chosen)
        self._phase = OrchestratorState.NEW
        self._pool: ThreadCalls | None = None
        self._nodes = tuple(WorkerNode(number) for number in range(self.num_workers))
        self._publisher = MetricPublisher()
        self._tracker: RunTracker | None = None
        self._source: Any = None
        self._job: TrainingJob | None = None
        self._running: TrainingJob | None = None  # the job, while its processes run
        self._outcome: TrainingOutcome | None = None
        self._config: TrainingConfig | None = None
        self._started = 0.0
        self._seconds = 0.0
        self._offset = 0
        self._end_request = EndRequest.NONE
        self._task: asyncio.Task[Any] | None = None  # the one that trains
        self._trying: asyncio.Future[Any] | None = None  # whether workers can be started
        self._model: nn.Module | None = None

    # observing

    @property
    def workers(self) -> tuple[WorkerNode, ...]:
        """Every worker in its present state."""
        return self._nodes if self._tracker is None else self._tracker.nodes()

    @property
    def shards(self) -> tuple[DataShard, ...]:
        """Every shard of the data in its present state; none before training."""
        return () if self._tracker is None else tuple(self._tracker.shards)

    @property
    def checkpoints(self) -> tuple[ModelVersion, ...]:
        """The durable versions of the model of the last training, oldest first."""
        return () if self._tracker is None else tuple(self._tracker.checkpoints)

    @property
    def run_dir(self) -> Path | None:
        """The folder of the last training: settings, journal, checkpoints, logs."""
        return None if self._job is None else self._job.folder.path

    @property
    def model(self) -> nn.Module | None:
        """The trained module after a training: the caller's, or the one that was built."""
        return self._model

    def metrics(self) -> AsyncIterator[TrainingMetrics]:
        """Iterate over every step from now on, to the end of the training. Any number of consumers."""
        self._refuse_closed("metrics")
        return self._publisher.subscribe()

    # the life of an orchestrator

    @folding_errors
    async def initialize_workers(self) -> None:
        """Warm up the process that workers are forked from, and check that this many can be started.

        After a failure it can be called again.
        """
        if self._phase is not OrchestratorState.NEW:
            raise UsageError(
                f"initialize_workers() on an orchestrator that is {self._phase.value}",
                remedy="call it once; after cleanup() make a new orchestrator",
            )
        if (ranks := mpi_training.own_ranks()) is not None:
            self._ready_on(ranks.world_size)
            return
        job_preparation.refuse_inside_a_job()
        pool = self._pool = ThreadCalls()
        self._phase = OrchestratorState.INITIALIZING
        try_workers = partial(spawn, attrgetter("rank"), workers=self.num_workers, threads=1, preload=PRELOAD)
        try:
            self._trying = pool.start(try_workers)
            await finished(self._trying)
        except BaseException:
            if self._phase is OrchestratorState.INITIALIZING:
                self._phase, self._pool, self._trying = OrchestratorState.NEW, None, None
                # Without waiting for its threads: after a second cancellation one is still busy.
                pool.shutdown(wait=False)
            raise
        if self._phase is not OrchestratorState.INITIALIZING:
            raise UsageError(
                "cleanup() was called while initialize_workers() was under way: there are no workers now",
                remedy="await initialize_workers() before cleanup(); make a new orchestrator to train",
            )
        self._trying = None
        self._set_ready()

    @folding_errors
    async def train_distributed(
        self,
        model_config: TrainingConfig | Mapping[str, Any] | None = None,
        data_config: Mapping[str, Any] | None = None,
        *,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        dataset: Any = None,
        objective: Callable[..., Any] | None = None,
        optimizer: Any = None,
    ) -> dict[str, Any]:
        """Train to the end and return the result: epochs_completed, final_loss and more.

        With sizes alone, {"size": ..., ...} and {"total_samples": ...}, on a synthetic task; with `model`,
        `dataset` and `objective` on the user's. `optimizer` is a function from parameters to an optimizer;
        left out it is AdamW with the learning rate of the settings.
        """
        self._check_can_train()
        settings = read_config(model_config)
        given = job_preparation.TrainingArguments(data_config, model, dataset, objective, optimizer)
        job_preparation.check_arguments(settings, given)
        self._begin(settings)
        self._task = asyncio.current_task()
        try:
            return await self._train_on_ranks(settings, given)
        finally:
            self._seconds = time.perf_counter() - self._started
            if self._tracker is not None:
                self._tracker.end()
            self._publisher.end()
            self._task = None
            if self._phase is OrchestratorState.TRAINING:
                self._phase = OrchestratorState.READY

    @folding_errors
    async def get_training_summary(self) -> dict[str, Any]:
        """Return the state of the present or the last training as plain data."""
        if self._tracker is None or self._config is None:
            raise UsageError(
                "there is no training to summarise", remedy="call it during or after train_distributed()"
            )
        running = self._phase is OrchestratorState.TRAINING
        seconds = time.perf_counter() - self._started if running else self._seconds
        return summary_of(self._config, self._tracker, self._outcome, seconds, running, self.run_dir)

    @folding_errors
    async def scale(self, workers: int) -> None:
        """Give the training more or fewer workers while it trains, or the next training that many.

        The result does not depend on the number of workers. The supervisor starts or ends the difference in
        the background: `workers` shows them when they come and go.
        """
        self._refuse_closed("scale")
        count = worker_count("workers", workers)
        if self._phase is OrchestratorState.TRAINING:
            await self._scale_training(count)
        elif self._phase is OrchestratorState.INITIALIZING:
            raise UsageError(
                "scale() while initialize_workers() is under way", remedy="await initialize_workers() first"
            )
        self.num_workers = count
        if self._phase is not OrchestratorState.TRAINING:
            self._nodes = tuple(
                self._nodes[number] if number < len(self._nodes) else WorkerNode(number)
                for number in range(count)
            )

    async def _scale_training(self, workers: int) -> None:
        assert self._config is not None
        if not self._config.supervised:
            why = "of ASYNC_SGD" if self._config.asynchronous else "without fault_tolerance"
            raise UsageError(
                f"scale({workers}) during a training {why}: no supervisor can start or end workers there",
                remedy="train synchronously with fault_tolerance=True, or scale before the training",
            )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                if self._running is not None:
                    return await self._off_loop(partial(request_workers, self._running.folder.path, workers))
            except NotRunningError:
                # The supervisor of this training starts, or is started again.
                if time.monotonic() > deadline:
                    raise
            if self._phase is not OrchestratorState.TRAINING:
                raise UsageError(
                    f"scale({workers}): the training ended meanwhile", remedy="scale while it trains"
                )
            await asyncio.sleep(_TICK_SECONDS)

    async def cleanup(self) -> None:
        """End every process and release everything; may be called again."""
        if self._phase is OrchestratorState.CLOSED:
            return
        self._phase = OrchestratorState.CLOSED
        task = self._task
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.wait([task])
        self._publisher.end()
        if self._pool is None:
            return
        if self._trying is not None:
            # Starting workers cannot be interrupted; the task that awaits it sees its end.
            await asyncio.wait([self._trying])
        if self._job is not None:
            await self._off_loop(self._job.close)
        pool, self._pool = self._pool, None
        await asyncio.to_thread(pool.shutdown)
        self._nodes = tuple(WorkerNode(node.id, WorkerState.STOPPED, node.host) for node in self._nodes)

    async def __aenter__(self) -> Self:
        await self.initialize_workers()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cleanup()

    # inside

    def _ready_on(self, ranks: int) -> None:
        """Be ready to train with the ranks of an mpirun, which start a worker each when a training begins."""
        self.num_workers, self._pool = ranks, ThreadCalls()
        self._nodes = tuple(WorkerNode(number) for number in range(ranks))
        self._set_ready()

    def _set_ready(self) -> None:
        self._phase, host, now = OrchestratorState.READY, socket.gethostname(), time.time()
        self._nodes = tuple(
            WorkerNode(node.id, WorkerState.IDLE, host, last_heartbeat=now) for node in self._nodes
        )

    def _refuse_closed(self, what: str) -> None:
        if self._phase is OrchestratorState.CLOSED:
            raise UsageError(f"{what}() on an orchestrator that is closed", remedy="make a new orchestrator")

    def _check_can_train(self) -> None:
        self._refuse_closed("train_distributed")
        if self._phase in (OrchestratorState.NEW, OrchestratorState.INITIALIZING):
            raise UsageError(
                f"train_distributed() before initialize_workers() was done: it is {self._phase.value}",
                remedy="await orchestrator.initialize_workers() first, or use async with",
            )
        if self._phase is OrchestratorState.TRAINING:
            raise UsageError(
                "train_distributed() while another training is under way",
                remedy="await the first one, or make a second orchestrator",
            )

    def _begin(self, settings: TrainingConfig) -> None:
        if self._tracker is not None:
            self._publisher = MetricPublisher()
        self._phase = OrchestratorState.TRAINING
        self._config, self._outcome, self._model = settings, None, None
        self._started, self._offset, self._end_request = time.perf_counter(), 0, EndRequest.NONE
        self._tracker = RunTracker(self.num_workers, self.num_workers, None, socket.gethostname())

    async def _train_on_ranks(
        self, settings: TrainingConfig, given: job_preparation.TrainingArguments
    ) -> dict[str, Any]:
        """Train; under mpirun, once for all of its ranks."""
        prepare = partial(job_preparation.prepare_training, settings, given, self.num_workers)

        async def train() -> tuple[dict[str, Any], TrainingOutcome | None]:
            return await self._train(await self._off_loop(prepare)), self._outcome

        if (ranks := mpi_training.own_ranks()) is None:
            return (await train())[0]
        mpi_training.check_settings(settings)
        config = job_preparation.train_config(settings, self.num_workers)
        result, outcome = await mpi_training.train_together(ranks, config, train, self._off_loop)
        if self._outcome is None and outcome is not None:  # another rank led
            self._outcome = outcome
            await self._load(job_preparation.model_of(settings, given), settings.seed, outcome)
        return result

    async def _load(self, model: Any, seed: int, outcome: TrainingOutcome) -> None:
        built = partial(fit_drivers.built, model, seed)
        if outcome.weights:
            self._model = await self._off_loop(lambda: fit_drivers.load_weights(built(), outcome.weights))

    async def _train(self, prepared: PreparedTraining) -> dict[str, Any]:
        job, source, host = prepared.job, prepared.job.train, socket.gethostname()
        tracker = RunTracker(self.num_workers, prepared.shards, source.size, host, measured=prepared.measured)
        self._tracker, self._source = tracker, source
        ranges = [shard.range for shard in tracker.shards]
        tracker.checked(await self._off_loop(lambda: [checksum(source, samples) for samples in ranges]))
        carried = asyncio.create_task(self._carry_out(prepared), name="paceline-orchestrator")
        try:
            await asyncio.shield(carried)
        except asyncio.CancelledError:
            await self._stop(carried)
            raise
        assert self._job is not None
        assert self._config is not None
        outcome = self._outcome = await self._off_loop(self._job.result)
        await self._verify(range(len(tracker.shards)))
        await self._load(job.model, job.config.seed, outcome)
        return result_of(self._config, tracker, outcome, self._job.folder.path)

    async def _stop(self, carried: asyncio.Task[None]) -> None:
        """Stop the training and wait for its end; a second cancellation kills its processes."""
        self._end_request = EndRequest.STOP
        while not carried.done():
            try:
                await asyncio.wait([carried])
            except asyncio.CancelledError:
                self._end_request = EndRequest.KILL
        if not carried.cancelled() and carried.exception() is not None:
            _log.warning("while the training was stopped: %s", carried.exception())

    async def _carry_out(self, prepared: PreparedTraining) -> None:
        """Run the job from the start of its processes to their end."""
        if self._job is not None:
            await self._off_loop(self._job.close)
        job = self._job = self._running = await self._off_loop(prepared.start)
        # In another task: events of the journal must not wait for a supervisor that does not answer.
        measuring = asyncio.create_task(self._measure(job)) if prepared.measured else None
        try:
            await self._follow(job)
        finally:
            self._running = None
            if measuring is not None:
                measuring.cancel()
                await asyncio.wait([measuring])

    async def _measure(self, job: TrainingJob) -> None:
        """Ask the supervisor regularly what it has measured of each worker."""
        tracker = self._tracker
        assert tracker is not None
        while True:
            await asyncio.sleep(_MEASURE_SECONDS)
            tracker.measure(*await self._off_loop(partial(measurements, job.folder.path)))

    async def _follow(self, job: TrainingJob) -> None:
        """Apply the events of the job's journal until the job ends."""
        failure: PacelineError | None = None
        requested = EndRequest.NONE
        over = False
        while not over:
            if requested is not self._end_request:
                requested = self._end_request
                stop = requested is EndRequest.STOP
                end = partial(job.stop, "the task was cancelled") if stop else job.close
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
                self._publisher.publish(metrics)
        return sorted(moved)

    def _read(self, file: Path) -> tuple[Event, ...]:
        """Read new events, in a thread; one read at a time."""
        if not file.exists():
            return ()
        chunk = journal.read(file, self._offset, max_bytes=_READ_BYTES)
        self._offset = chunk.offset
        return chunk.events

    async def _verify(self, indices: range | list[int]) -> None:
        tracker, source = self._tracker, self._source
        assert tracker is not None
        for index in indices:
            if await self._off_loop(partial(verify, source, tracker.shards[index])):
                tracker.verified(index)

    async def _off_loop(self, do: Callable[[], T]) -> T:
        """Run in a thread. A cancelled task waits for it, so that nothing is left half done."""
        assert self._pool is not None
        return await finished(self._pool.start(do))
