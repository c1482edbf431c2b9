"""From events to what a run looks like now, and what is handed to those who watch."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from paceline.control.run_status import WorkerFacts
from paceline.core import events
from paceline.core.errors import PlatformError
from paceline.data.sources import as_source
from paceline.frontends.orchestrator.metric_publisher import MetricPublisher
from paceline.frontends.orchestrator.observed_state import (
    DataShard,
    TrainingMetrics,
    WorkerState,
    checksum,
    verify,
)
from paceline.frontends.orchestrator.run_tracker import RunTracker

NOW = 64.0


def started(rank: int, pid: int, when: float = 1.0) -> events.WorkerStarted:
    return events.WorkerStarted(time=when, rank=rank, pid=pid, host="here")


def view(generation: int, members: dict[int, tuple[int, list[int]]], when: float = 2.0) -> events.ViewChanged:
    return events.ViewChanged(
        time=when,
        generation=generation,
        reason="a test",
        members=list(members),
        shards=[shards for _, shards in members.values()],
        pids=[pid for pid, _ in members.values()],
        hosts=["here"] * len(members),
        step=0,
    )


def step(number: int, when: float, samples: int = 8, seconds: float = 0.5, **metrics: float) -> events.Event:
    return events.StepCommitted(
        time=when, step=number, epoch=0, loss=1.0 / number, samples=samples, seconds=seconds, metrics=metrics
    )


def said(rank: int, pid: int, heard: float | None, shard_seconds: float) -> WorkerFacts:
    """What a supervisor says at the time NOW of a worker that it heard at the time `heard`."""
    ago = None if heard is None else NOW - heard
    return WorkerFacts(
        rank=rank, member=rank, pid=pid, host="", place=0, phase="data", step=1,
        heard=ago, shard_seconds=shard_seconds,
    )  # fmt: skip


def test_workers_and_shards_through_a_failure_and_a_replacement():
    tracker = RunTracker(2, 4, 100)
    assert [len(shard) for shard in tracker.shards] == [25, 25, 25, 25]
    assert {node.state for node in tracker.nodes()} == {WorkerState.STARTING}
    for event in (started(0, 10), started(1, 11), view(1, {0: (10, [0, 1]), 1: (11, [2, 3])})):
        assert tracker.take(event) == (None, [])
    metrics, _ = tracker.take(step(1, 3.0))
    assert metrics is not None
    assert (metrics.step, metrics.workers, metrics.loss) == (1, 2, 1.0)
    first, second = tracker.nodes()
    assert (first.pid, first.state, first.shards) == (10, WorkerState.TRAINING, (0, 1))
    assert second.last_heartbeat == 3.0
    assert second.speed == pytest.approx(8 / 0.5 / 2)

    tracker.take(events.WorkerFailed(time=4.0, rank=1, pid=11, phase="forward", reason="killed by signal 9"))
    assert tracker.nodes()[1].state is WorkerState.FAILED
    _, moved = tracker.take(view(2, {0: (10, [0, 1, 2, 3])}))
    assert moved == [2, 3]
    assert [shard.owner for shard in tracker.shards] == [0, 0, 0, 0]
    assert [shard.moves for shard in tracker.shards] == [0, 0, 1, 1]
    tracker.take(events.Repaired(time=4.1, generation=2, seconds=0.1, lost=[1]))

    tracker.take(started(1, 12, 5.0))
    _, moved = tracker.take(view(3, {0: (10, [0, 1]), 1: (12, [2, 3])}))
    assert moved == [2, 3]
    node = tracker.nodes()[1]
    assert (node.pid, node.failures, node.state, node.shards) == (12, 1, WorkerState.TRAINING, (2, 3))
    assert [shard.moves for shard in tracker.shards] == [0, 0, 2, 2]
    assert len(tracker.repairs) == 1
    tracker.end()
    assert {node.state for node in tracker.nodes()} == {WorkerState.STOPPED}


def test_measured_workers_have_a_speed_and_a_heartbeat_of_their_own():
    tracker = RunTracker(2, 4, 100, measured=True)
    tracker.take(view(1, {0: (10, [0, 1]), 1: (11, [2, 3])}, when=2.0))
    # No step yet: it is not known how many samples a shard has.
    tracker.measure(NOW, [said(0, 10, 2.5, 0.1)])
    tracker.take(step(1, 3.0, samples=8))
    assert [(node.last_heartbeat, node.speed) for node in tracker.nodes()] == [(2.5, 0.0), (2.0, 0.0)]
    tracker.measure(NOW, [said(0, 10, 4.0, 0.1), said(1, 11, 3.5, 1.0)])
    assert [(node.last_heartbeat, node.speed) for node in tracker.nodes()] == [(4.0, 20.0), (3.5, 2.0)]
    # A beat without a measurement, an older one, and one of an unknown worker.
    tracker.measure(
        NOW,
        [
            said(0, 10, 5.0, 0.0),
            said(1, 11, 3.0, 0.5),
            said(7, 12, 5.0, 1.0),
            said(1, 11, None, 0.0),
        ],
    )
    assert [(node.last_heartbeat, node.speed) for node in tracker.nodes()] == [(5.0, 20.0), (3.5, 4.0)]

    # Where shards are workers, fewer workers have larger ones.
    tracker.take(view(2, {0: (10, [0]), 1: (11, [1])}, when=6.0))
    tracker.measure(NOW, [said(0, 10, 6.5, 0.1)])
    assert tracker.nodes()[0].speed == pytest.approx(40.0)


def test_what_was_measured_of_a_process_that_is_gone_is_void():
    tracker = RunTracker(2, 2, 100, measured=True)
    tracker.take(view(1, {0: (10, [0]), 1: (11, [1])}))
    tracker.take(step(1, 3.0))
    tracker.measure(NOW, [said(1, 11, 3.5, 1.0)])
    tracker.take(events.WorkerFailed(time=4.0, rank=1, pid=11, phase="forward", reason="killed by signal 9"))
    tracker.measure(NOW, [said(1, 11, 9.0, 1.0)])
    assert (tracker.nodes()[1].last_heartbeat, tracker.nodes()[1].speed) == (3.5, 0.0)
    tracker.take(started(1, 12, 5.0))
    tracker.measure(NOW, [said(1, 11, 9.0, 1.0)])
    assert (tracker.nodes()[1].last_heartbeat, tracker.nodes()[1].speed) == (5.0, 0.0)
    tracker.measure(NOW, [said(1, 12, 6.0, 0.0)])
    assert tracker.nodes()[1].last_heartbeat == 6.0

    # One that is replaced without having failed.
    tracker.measure(NOW, [said(0, 10, 6.0, 1.0)])
    assert tracker.nodes()[0].speed > 0.0
    tracker.take(view(2, {0: (13, [0]), 1: (12, [1])}, when=7.0))
    assert tracker.nodes()[0].speed == 0.0
    tracker.end()
    tracker.measure(NOW, [said(0, 13, 8.0, 1.0)])
    assert tracker.nodes()[0].last_heartbeat == 7.0


def test_a_worker_that_left_and_one_that_came_later():
    tracker = RunTracker(2, 2, 10)
    tracker.take(view(1, {0: (1, [0]), 1: (2, [1])}))
    tracker.take(view(2, {1: (2, [0]), 2: (3, [1])}))
    assert [(node.id, node.state) for node in tracker.nodes()] == [
        (0, WorkerState.STOPPED),
        (1, WorkerState.TRAINING),
        (2, WorkerState.TRAINING),
    ]
    tracker.take(view(3, {}))
    assert [shard.owner for shard in tracker.shards] == [None, None]


def test_a_run_without_views_deals_evenly():
    tracker = RunTracker(2, 3, 9)
    tracker.take(started(0, 1))
    tracker.take(events.RunStarted(time=1.0, workers=2, shards=3, samples=9, definition={}, fingerprint={}))
    assert [node.shards for node in tracker.nodes()] == [(0, 1), (2,)]
    assert tracker.training == 2


def test_asynchronous_steps_are_the_work_of_one():
    tracker = RunTracker(2, 2, 10)
    tracker.take(view(1, {0: (1, [0]), 1: (2, [1])}, when=1.0))
    tracker.take(step(1, 7.0, samples=4, worker=1.0, staleness=0.0, worker_seconds=0.5))
    first, second = tracker.nodes()
    assert (first.last_heartbeat, second.last_heartbeat) == (1.0, 7.0)
    assert (first.speed, second.speed) == (0.0, 8.0)


def test_versions_and_verdicts_are_kept():
    tracker = RunTracker(1, 1, 4)
    tracker.take(events.CheckpointSaved(time=1.0, version=3, step=10, bytes=5, stall=0.1, seconds=0.2))
    assert [(one.version, one.step) for one in tracker.checkpoints] == [(3, 10)]
    tracker.take(events.Note(time=1.0, text="nothing that matters here"))


def metrics(number: int) -> TrainingMetrics:
    return TrainingMetrics(time=0.0, step=number, epoch=0, loss=0.0, samples=1, seconds=0.0, workers=1)


def test_the_end_takes_no_metrics_away(monkeypatch):
    monkeypatch.setattr("paceline.frontends.orchestrator.metric_publisher._MAX_UNREAD", 3)

    async def main() -> list[int]:
        broadcast = MetricPublisher()
        slow = broadcast.subscribe()
        for number in range(4):
            broadcast.publish(metrics(number))
        broadcast.end()
        return [one.step async for one in slow]

    assert asyncio.run(main()) == [1, 2, 3]


def test_every_consumer_sees_everything_from_its_call_on():
    async def main() -> None:
        broadcast = MetricPublisher()
        early = broadcast.subscribe()
        broadcast.publish(metrics(1))
        late = broadcast.subscribe()
        broadcast.publish(metrics(2))
        waiting = asyncio.create_task(collect(broadcast.subscribe()))
        await asyncio.sleep(0)
        broadcast.publish(metrics(3))
        broadcast.end()
        assert [one.step async for one in early] == [1, 2, 3]
        assert [one.step async for one in late] == [2, 3]
        assert await waiting == [3]
        assert await collect(broadcast.subscribe()) == []

    async def collect(source) -> list[int]:
        return [one.step async for one in source]

    asyncio.run(main())


def test_checksums_tell_changed_samples():
    x = torch.arange(40.0).reshape(10, 4)
    source = as_source((x, np.arange(10)))
    expected = checksum(source, range(5))
    other = checksum(source, range(5, 10))
    assert expected != other
    assert verify(source, DataShard(0, range(5), expected))
    x[7, 1] += 1.0
    assert verify(source, DataShard(0, range(5), expected))
    with pytest.raises(PlatformError, match=r"shard 1, samples 5 to 9, changed"):
        verify(source, DataShard(1, range(5, 10), other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_every_kind_of_column_has_one(dtype):
    source = as_source(torch.ones(6, 2).to(dtype))
    assert checksum(source, range(3)) == checksum(source, range(3, 6))
    assert checksum(source, range(3)) != checksum(source, range(2))


def test_data_that_is_made_while_it_is_read_has_none():
    class Made:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, number: int) -> float:
            raise AssertionError("it is not read for a checksum")

    source = as_source(Made())
    assert checksum(source, range(4)) is None
    assert not verify(source, DataShard(0, range(4), None))
