"""From the events of a run's journal to what it looks like now: workers, shards, metrics, versions.

Pure: one event in, state changed. Must not know files, tasks or where a run runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from paceline.core import events
from paceline.core.events import Event
from paceline.data.plan import cut, deal
from paceline.frontends.orchestrator.nodes import (
    DataShard,
    ModelVersion,
    Pulse,
    TrainingMetrics,
    WorkerNode,
    WorkerState,
)

_SMOOTH = 0.1  # share of a new speed in the running mean
_SAMPLES_SMOOTH = 0.2  # as that of the workers' seconds per shard: the two are divided by each other
_PRESENT = (WorkerState.STARTING, WorkerState.TRAINING)


@final
class Tracker:
    """What is known about one run. Every property is a value of the moment.

    With `measured`, `hear` is told what each worker does. Without, synchronous steps are all there is: then
    one that was committed is a sign of life of everybody, and everybody's speed is a share of the whole.
    """

    def __init__(
        self, workers: int, shards: int, samples: int | None, host: str = "", *, measured: bool = False
    ) -> None:
        self.workers = {i: WorkerNode(i, WorkerState.STARTING, host) for i in range(workers)}
        self.shards = [
            DataShard(index, range(start, stop))
            for index, (start, stop) in enumerate(cut(samples or 0, shards))
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
        # Of everybody together: steps come often, and workers are looked at now and then.
        self._committed_at = 0.0
        self._rate = 0.0
        self._step_samples = 0.0
        self._dealt = shards

    def take(self, event: Event) -> tuple[TrainingMetrics | None, list[int]]:
        """Takes one event in; the metrics of a step, and the shards that moved."""
        moved: list[int] = []
        match event:
            case events.WorkerStarted():
                self._started(event)
            case events.WorkerFailed():
                moved = self._failed(event)
            case events.ViewChanged():
                moved = self._view(event)
            case events.StepsReceived():
                self._seen(event.rank, event.time)
            case events.StepCommitted():
                return self._step(event), []
            case events.RunStarted() | events.RunResumed():
                moved = self._begun(event)
            case events.CheckpointSaved():
                self.checkpoints.append(
                    ModelVersion(event.version, event.step, event.bytes, event.stall, event.seconds)
                )
            case events.Repaired():
                self.repairs.append(event)
            case events.Verdict():
                self.verdicts.append(event)
            case events.RunEnded():
                self.ended = event
        return None, moved

    def hear(self, pulses: Sequence[Pulse]) -> None:
        """Takes in what was measured of the workers; of processes that are not theirs any more it is void."""
        for pulse in pulses:
            node = self.workers.get(pulse.worker)
            if node is None or node.pid != pulse.pid or node.state not in _PRESENT:
                continue
            speed = node.speed
            if pulse.shard_seconds > 0.0 and self._step_samples > 0.0:
                speed = self._step_samples / self._dealt / pulse.shard_seconds
            heard = max(node.last_heartbeat, pulse.heard)
            self.workers[pulse.worker] = replace(node, last_heartbeat=heard, speed=speed)

    def end(self) -> None:
        """The run is over: nobody trains any more."""
        for number, node in self.workers.items():
            if node.state is not WorkerState.FAILED:
                self.workers[number] = replace(self._as_of_now(node), state=WorkerState.STOPPED)

    def nodes(self) -> tuple[WorkerNode, ...]:
        return tuple(self._as_of_now(self.workers[number]) for number in sorted(self.workers))

    def _as_of_now(self, node: WorkerNode) -> WorkerNode:
        """Where nobody measures, a committed step is the work and the heartbeat of everybody in the view."""
        if self._measured or node.state is not WorkerState.TRAINING:
            return node
        if self._committed_at <= node.last_heartbeat:
            return node
        speed = self._rate * len(node.shards) / max(self._dealt, 1)
        return replace(node, last_heartbeat=self._committed_at, speed=speed)

    @property
    def training(self) -> int:
        return sum(node.state is WorkerState.TRAINING for node in self.workers.values())

    def verified(self, index: int) -> None:
        shard = self.shards[index]
        self.shards[index] = replace(shard, verified=shard.verified + 1)

    def checked(self, checksums: Sequence[str | None]) -> None:
        """The checksums of all shards as they are at the start."""
        self.shards = [
            replace(shard, checksum=sum_) for shard, sum_ in zip(self.shards, checksums, strict=True)
        ]

    # events

    def _started(self, event: events.WorkerStarted) -> None:
        node = self.workers.get(event.rank, WorkerNode(event.rank))
        state = WorkerState.TRAINING if self._training and self.generation == 0 else WorkerState.STARTING
        self.workers[event.rank] = replace(
            _of_process(node, event.pid), state=state, host=event.host, last_heartbeat=event.time
        )

    def _failed(self, event: events.WorkerFailed) -> list[int]:
        self.failures.append(event)
        node = self.workers.get(event.rank, WorkerNode(event.rank))
        self.workers[event.rank] = replace(
            node, state=WorkerState.FAILED, failures=node.failures + 1, shards=(), speed=0.0
        )
        return []

    def _begun(self, event: events.RunStarted | events.RunResumed) -> list[int]:
        """Until a view says otherwise, shards are dealt evenly."""
        self._training = True
        if isinstance(event, events.RunResumed):
            self.steps = event.step
        if self.generation:
            return []
        for number, block in enumerate(deal(len(self.shards), event.workers)):
            node = self.workers.get(number, WorkerNode(number))
            self.workers[number] = replace(node, state=WorkerState.TRAINING)
            self._own(number, block)
        return []

    def _view(self, event: events.ViewChanged) -> list[int]:
        self.generation = event.generation
        moved: list[int] = []
        for number, node in self.workers.items():
            if number not in event.members and node.state is WorkerState.TRAINING:
                self.workers[number] = replace(node, state=WorkerState.STOPPED, shards=(), speed=0.0)
        parts = zip(event.members, event.pids, event.hosts, event.shards, strict=True)
        for number, pid, host, block in parts:
            node = self.workers.get(number, WorkerNode(number))
            self.workers[number] = replace(
                _of_process(node, pid), state=WorkerState.TRAINING, host=host, last_heartbeat=event.time
            )
            moved += self._own(number, block)
        held = {shard for block in event.shards for shard in block}
        self._dealt = max(len(held), 1)
        self.shards = [shard if shard.index in held else replace(shard, owner=None) for shard in self.shards]
        return sorted(moved)

    def _own(self, worker: int, block: Sequence[int]) -> list[int]:
        moved = []
        for index in block:
            if index >= len(self.shards):
                continue  # where bits may differ, who joins is one more slice of the batch, not of the data
            shard = self.shards[index]
            moves = shard.moves + (shard.owner not in (None, worker))
            if moves > shard.moves:
                moved.append(index)
            self.shards[index] = replace(shard, owner=worker, moves=moves)
        self.workers[worker] = replace(self.workers[worker], shards=tuple(block))
        return moved

    def _step(self, event: events.StepCommitted) -> TrainingMetrics:
        worker = event.metrics.get("worker")
        if worker is not None:
            self._asynchronous(int(worker), event)
        else:
            self._everybody(event)
        self.steps = event.step
        self.samples += event.samples
        self.last_loss = event.loss
        return TrainingMetrics(
            step=event.step,
            epoch=event.epoch,
            loss=event.loss,
            samples=event.samples,
            seconds=event.seconds,
            workers=max(self.training, 1),
            learning_rate=event.learning_rate,
            values=dict(event.metrics),
        )

    def _asynchronous(self, worker: int, event: events.StepCommitted) -> None:
        seconds = event.metrics.get("worker_seconds", 0.0)
        self._seen(worker, event.time, event.samples / seconds if seconds > 0.0 else None)

    def _everybody(self, event: events.StepCommitted) -> None:
        self._committed_at = max(self._committed_at, event.time)
        samples = self._step_samples or event.samples
        self._step_samples = samples + _SAMPLES_SMOOTH * (event.samples - samples)
        if event.seconds > 0.0:
            rate = event.samples / event.seconds
            self._rate = rate if self._rate == 0.0 else self._rate + _SMOOTH * (rate - self._rate)

    def _seen(self, worker: int, when: float, speed: float | None = None) -> None:
        node = self.workers.get(worker)
        if node is None:
            return
        if speed is not None:
            speed = speed if node.speed == 0.0 else node.speed + _SMOOTH * (speed - node.speed)
        self.workers[worker] = replace(
            node,
            last_heartbeat=max(node.last_heartbeat, when),
            speed=node.speed if speed is None else speed,
        )


def _of_process(node: WorkerNode, pid: int) -> WorkerNode:
    """With this process in the seat: how fast another one was says nothing about it."""
    return node if node.pid == pid else replace(node, pid=pid, speed=0.0)
