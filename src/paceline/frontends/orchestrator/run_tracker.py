"""Fold the events of a run's journal into its present state: workers, shards, metrics, versions.

Pure: one event in, state changed. The orchestrator's results are dicts made from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, final

from paceline.control.run_status import WorkerFacts
from paceline.core import events
from paceline.core.events import Event
from paceline.data.batch_plan import assign, split_evenly
from paceline.frontends.orchestrator.observed_state import (
    DataShard,
    ModelVersion,
    TrainingMetrics,
    WorkerNode,
    WorkerState,
)
from paceline.frontends.orchestrator.orchestrator_config import TrainingConfig
from paceline.train.loop.training_thread import TrainingOutcome

_SMOOTH = 0.1  # share of a new speed in the running mean
_SAMPLES_SMOOTH = 0.2  # as that of the workers' seconds per shard: the two are divided by each other
_PRESENT = (WorkerState.STARTING, WorkerState.TRAINING)


@final
class RunTracker:
    """The present state of one run.

    With `measured`, `measure` receives what the supervisor knows of each worker. Without, only committed
    steps are known: each is a heartbeat of every worker, and a worker's speed is its share of the total.
    """

    def __init__(
        self, workers: int, shards: int, samples: int | None, host: str = "", *, measured: bool = False
    ) -> None:
        self.workers = {i: WorkerNode(i, WorkerState.STARTING, host) for i in range(workers)}
        self.shards = [
            DataShard(index, range(start, stop))
            for index, (start, stop) in enumerate(split_evenly(samples or 0, shards))
        ]
        self.checkpoints: list[ModelVersion] = []
        self.failures: list[events.WorkerFailed] = []
        self.repairs: list[events.Repaired] = []
        self.verdicts: list[events.Verdict] = []
        self.generation = 0
        self.steps = 0
        self.samples = 0
        self.epochs_completed = 0
        self.last_loss = math.nan
        self.ended: events.RunEnded | None = None
        self._training = False
        self._measured = measured
        # Of all workers together: steps are frequent, and worker records are made on demand.
        self._committed_at = 0.0
        self._rate = 0.0
        self._step_samples = 0.0
        self._assigned = shards

    def take(self, event: Event) -> tuple[TrainingMetrics | None, list[int]]:
        """Apply one event; return the metrics of a step, and the shards that moved."""
        moved: list[int] = []
        match event:
            case events.WorkerStarted():
                self._started(event)
            case events.WorkerFailed():
                self._failed(event)
            case events.ViewChanged():
                moved = self._view(event)
            case events.StepsReceived():
                self._seen(event.rank, event.time)
            case events.StepCommitted():
                return self._step(event), []
            case events.RunStarted() | events.RunResumed():
                self._begun(event)
            case events.CheckpointSaved():
                self.checkpoints.append(event)
            case events.Repaired():
                self.repairs.append(event)
            case events.Verdict():
                self.verdicts.append(event)
            case events.RunEnded():
                self.ended = event
        return None, moved

    def measure(self, now: float, workers: Sequence[WorkerFacts]) -> None:
        """Apply what the supervisor said of its workers at the time `now`: how long ago each was heard, and
        its mean time per shard (0: none yet). Ignored for processes that were replaced since."""
        for measured in workers:
            node = self.workers.get(measured.rank)
            if node is None or node.pid != measured.pid or node.state not in _PRESENT:
                continue
            if measured.heard is None:
                continue
            speed = node.speed
            if measured.shard_seconds > 0.0 and self._step_samples > 0.0:
                speed = self._step_samples / self._assigned / measured.shard_seconds
            heard = max(node.last_heartbeat, now - measured.heard)
            self.workers[node.id] = replace(node, last_heartbeat=heard, speed=speed)

    def end(self) -> None:
        """Mark every worker as stopped: the run is over."""
        for number, node in self.workers.items():
            if node.state is not WorkerState.FAILED:
                self.workers[number] = replace(self._as_of_now(node), state=WorkerState.STOPPED)

    def nodes(self) -> tuple[WorkerNode, ...]:
        return tuple(self._as_of_now(self.workers[number]) for number in sorted(self.workers))

    def _as_of_now(self, node: WorkerNode) -> WorkerNode:
        """Return a worker as of now: without measurements, a committed step is the heartbeat of every worker
        in the view."""
        if self._measured or node.state is not WorkerState.TRAINING:
            return node
        if self._committed_at <= node.last_heartbeat:
            return node
        speed = self._rate * len(node.shards) / max(self._assigned, 1)
        return replace(node, last_heartbeat=self._committed_at, speed=speed)

    @property
    def training(self) -> int:
        return sum(node.state is WorkerState.TRAINING for node in self.workers.values())

    def verified(self, index: int) -> None:
        shard = self.shards[index]
        self.shards[index] = replace(shard, verified=shard.verified + 1)

    def checked(self, checksums: Sequence[str | None]) -> None:
        """Set the checksums of all shards, computed at the start."""
        self.shards = [
            replace(shard, checksum=sum_) for shard, sum_ in zip(self.shards, checksums, strict=True)
        ]

    # events

    def _started(self, event: events.WorkerStarted) -> None:
        state = WorkerState.TRAINING if self._training and self.generation == 0 else WorkerState.STARTING
        self._occupy(event.rank, event.pid, state=state, host=event.host, last_heartbeat=event.time)

    def _failed(self, event: events.WorkerFailed) -> None:
        self.failures.append(event)
        node = self.workers.get(event.rank, WorkerNode(event.rank))
        self.workers[event.rank] = replace(
            node, state=WorkerState.FAILED, failures=node.failures + 1, shards=(), speed=0.0
        )

    def _occupy(self, worker: int, pid: int, **changes: Any) -> None:
        """Put a process into its slot; the speed of another process does not apply to it."""
        node = self.workers.get(worker, WorkerNode(worker))
        speed = node.speed if node.pid == pid else 0.0
        self.workers[worker] = replace(node, pid=pid, speed=speed, **changes)

    def _begun(self, event: events.RunStarted | events.RunResumed) -> None:
        """Begin a run: until its first view, assign the shards evenly."""
        self._training = True
        if isinstance(event, events.RunResumed):
            self.steps = event.step
        if self.generation:
            return
        for number, block in enumerate(assign(len(self.shards), event.workers)):
            node = self.workers.get(number, WorkerNode(number))
            self.workers[number] = replace(node, state=WorkerState.TRAINING)
            self._own(number, block)

    def _view(self, event: events.ViewChanged) -> list[int]:
        self.generation = event.generation
        moved: list[int] = []
        for number, node in self.workers.items():
            if number not in event.members and node.state is WorkerState.TRAINING:
                self.workers[number] = replace(node, state=WorkerState.STOPPED, shards=(), speed=0.0)
        parts = zip(event.members, event.pids, event.hosts, event.shards, strict=True)
        for number, pid, host, block in parts:
            self._occupy(number, pid, state=WorkerState.TRAINING, host=host, last_heartbeat=event.time)
            moved += self._own(number, block)
        held = {shard for block in event.shards for shard in block}
        self._assigned = max(len(held), 1)
        self.shards = [shard if shard.index in held else replace(shard, owner=None) for shard in self.shards]
        return sorted(moved)

    def _own(self, worker: int, block: Sequence[int]) -> list[int]:
        moved = []
        for index in block:
            if index >= len(self.shards):
                continue  # in fast mode a joining worker is one more slice of the batch, not of the data
            shard = self.shards[index]
            moves = shard.moves + (shard.owner not in (None, worker))
            if moves > shard.moves:
                moved.append(index)
            self.shards[index] = replace(shard, owner=worker, moves=moves)
        self.workers[worker] = replace(self.workers[worker], shards=tuple(block))
        return moved

    def _step(self, event: events.StepCommitted) -> TrainingMetrics:
        worker = event.metrics.get("worker")
        if worker is not None:  # of asynchronous SGD, where each step is the work of one worker
            seconds = event.metrics.get("worker_seconds", 0.0)
            self._seen(int(worker), event.time, event.samples / seconds if seconds > 0.0 else None)
        else:
            self._committed_at = max(self._committed_at, event.time)
            samples = self._step_samples or event.samples
            self._step_samples = samples + _SAMPLES_SMOOTH * (event.samples - samples)
            if event.seconds > 0.0:
                self._rate = _smoothed(self._rate, event.samples / event.seconds)
        self.steps = event.step
        self.samples += event.samples
        self.last_loss = event.loss
        return TrainingMetrics(**vars(event), workers=max(self.training, 1))

    def _seen(self, worker: int, when: float, speed: float | None = None) -> None:
        node = self.workers.get(worker)
        if node is not None:
            heard = max(node.last_heartbeat, when)
            mean = node.speed if speed is None else _smoothed(node.speed, speed)
            self.workers[worker] = replace(node, last_heartbeat=heard, speed=mean)


def _smoothed(mean: float, value: float) -> float:
    return value if mean == 0.0 else mean + _SMOOTH * (value - mean)


def result_of(
    config: TrainingConfig, tracker: RunTracker, outcome: TrainingOutcome, folder: Path
) -> dict[str, Any]:
    """Return the result of `train_distributed`."""
    history = outcome.history
    found: dict[str, Any] = {
        "epochs_completed": outcome.epochs_completed,
        "final_loss": history.final_loss,
        "losses": [record.loss for record in history.epochs],
        "steps": len(history.steps),
        "samples": sum(record.samples for record in history.steps),
        "seconds": history.total_time,
        "samples_per_second": history.samples_per_second,
        "workers": history.workers,
        "strategy": config.strategy_name,
        "exact": config.sums_exactly,
        "worker_failures": len(tracker.failures),
        "model_version": tracker.checkpoints[-1].version if tracker.checkpoints else None,
        "state_hash": history.state_hash,
        "stopped": outcome.stopped,
        "run_dir": str(folder),
    }
    if config.asynchronous:
        found["staleness"] = outcome.staleness
    return found


def summary_of(
    config: TrainingConfig,
    tracker: RunTracker,
    outcome: TrainingOutcome | None,
    seconds: float,
    running: bool,
    folder: Path | None,
) -> dict[str, Any]:
    """Return the result of `get_training_summary`, during a training and after it."""
    history = None if outcome is None else outcome.history
    rate = tracker.samples / seconds if seconds > 0.0 else math.nan
    found: dict[str, Any] = {
        "running": running,
        "strategy": config.strategy_name,
        "exact": config.sums_exactly,
        "epochs": config.epochs,
        "epochs_completed": None if outcome is None else outcome.epochs_completed,
        "steps": tracker.steps,
        "samples": tracker.samples,
        "last_loss": tracker.last_loss,
        "final_loss": None if history is None else history.final_loss,
        "total_time": seconds,
        "samples_per_second": rate if history is None else history.samples_per_second,
        "workers": [{**asdict(node), "state": node.state.value} for node in tracker.nodes()],
        "shards": [
            {**asdict(shard), "range": [shard.range.start, shard.range.stop]} for shard in tracker.shards
        ],
        "worker_failures": [
            {"worker": failed.rank, "pid": failed.pid, "phase": failed.phase, "reason": failed.reason}
            for failed in tracker.failures
        ],
        "repairs": [
            {"generation": one.generation, "seconds": one.seconds, "lost": list(one.lost)}
            for one in tracker.repairs
        ],
        "verdicts": [verdict.text for verdict in tracker.verdicts],
        "model_versions": [asdict(version) for version in tracker.checkpoints],
        "stopped": None if outcome is None else outcome.stopped,
        "state_hash": None if history is None else history.state_hash,
        "run_dir": None if folder is None else str(folder),
    }
    if config.asynchronous:
        found["staleness"] = {} if outcome is None else outcome.staleness
    return found
