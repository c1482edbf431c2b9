"""AggregationStrategy.ASYNC_SGD with real processes: it learns, and it survives what happens to them."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import torch
from tests.frontends.orchestrator.parts import (
    SAMPLES,
    Gate,
    X,
    Y,
    applied,
    every_position,
    is_alive,
    small,
    small_net,
    told,
    train,
    until,
)
from torch import nn

from paceline.aggregate.async_sgd.staleness import Staleness
from paceline.core import events
from paceline.core.errors import PacelineError, RankFailedError, UsageError
from paceline.frontends.orchestrator.observed_state import WorkerState
from paceline.frontends.orchestrator.orchestrator import DistributedTrainingOrchestrator
from paceline.frontends.orchestrator.orchestrator_config import AggregationStrategy
from paceline.train.state.model_state import state_hash

ASYNC = {"aggregation_strategy": AggregationStrategy.ASYNC_SGD}


def test_it_learns_every_sample_once_and_counts_staleness(tmp_path):
    async def main() -> None:
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            seen = orchestrator.metrics()
            result = await train(orchestrator, small(tmp_path / "run", epochs=4, **ASYNC))
            steps = [one.step async for one in seen]
            assert steps == list(range(1, len(steps) + 1))
            assert result["epochs_completed"] == 4
            assert result["losses"][-1] < 0.5 * result["losses"][0]
            assert result["samples"] == 4 * SAMPLES
            assert applied(tmp_path / "run") == every_position(SAMPLES, 4)

            found = result["staleness"]
            assert found["applied"] == result["steps"] == sum(found["histogram"].values())
            assert found["applied"] == sum(one["applied"] for one in found["workers"].values())
            assert orchestrator.model is not None
            assert state_hash(orchestrator.model) == result["state_hash"]
            assert result["model_version"] == orchestrator.checkpoints[-1].version
            summary = await orchestrator.get_training_summary()
            assert summary["staleness"] == found
            assert summary["steps"] == result["steps"]

    asyncio.run(main())


def test_a_killed_worker_is_replaced_and_nothing_is_lost(tmp_path):
    async def main() -> None:
        gate = Gate(tmp_path / "gate")
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            task = asyncio.create_task(
                train(orchestrator, small(tmp_path / "run", epochs=3, **ASYNC), model=gate)
            )
            await until(lambda: gate.reached() and all(node.speed > 0.0 for node in orchestrator.workers))
            victim, other = orchestrator.workers[1].pid, orchestrator.workers[0].pid
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            await until(lambda: orchestrator.workers[1].pid not in (None, victim))
            gate.open()
            result = await task
            assert orchestrator.workers[0].pid == other, "a worker that is well is not restarted"
            assert orchestrator.workers[1].pid != victim
            assert result["worker_failures"] == 1
            assert applied(tmp_path / "run") == every_position(SAMPLES, 3)
            assert orchestrator.shards[1].moves >= 1
            assert orchestrator.shards[1].verified >= 2, "when it moved, and at the end"

    asyncio.run(main())


def test_a_worker_that_hangs_is_killed_and_replaced(tmp_path):
    async def main() -> None:
        gate = Gate(tmp_path / "gate")
        settings = small(tmp_path / "run", worker_timeout=2.0, **ASYNC)
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            task = asyncio.create_task(train(orchestrator, settings, model=gate))
            await until(lambda: gate.reached() and orchestrator.workers[0].speed > 0.0)
            victim = orchestrator.workers[0].pid
            assert victim is not None
            # Whether it waits at the gate or for work: the gate is open, and only this one does not move.
            os.kill(victim, signal.SIGSTOP)
            gate.open()
            await task
            assert not is_alive(victim)
            failed = told(tmp_path / "run", events.WorkerFailed)
            (hung,) = [one for one in failed if one.pid == victim]
            assert (hung.rank, hung.cause) == (0, "hung")
            assert "silent for" in hung.reason
            assert applied(tmp_path / "run") == every_position(SAMPLES, 2)

    asyncio.run(main())


def test_when_the_budget_is_spent_training_goes_on_with_those_that_are_left(tmp_path):
    async def main() -> None:
        gate = Gate(tmp_path / "gate")
        settings = small(tmp_path / "run", max_worker_failures=0, **ASYNC)
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            task = asyncio.create_task(train(orchestrator, settings, model=gate))
            await until(lambda: gate.reached() and orchestrator.workers[0].speed > 0.0)
            assert orchestrator.workers[0].pid is not None
            os.kill(orchestrator.workers[0].pid, signal.SIGKILL)
            gate.open()
            result = await task
            assert result["epochs_completed"] == 2
            assert [node.state for node in orchestrator.workers] == [WorkerState.FAILED, WorkerState.STOPPED]
            assert [shard.owner for shard in orchestrator.shards] == [1, 1]

    asyncio.run(main())


def test_without_fault_tolerance_the_first_failure_ends_the_job_with_its_state_saved(tmp_path):
    async def main() -> None:
        gate = Gate(tmp_path / "gate")
        settings = small(tmp_path / "run", fault_tolerance=False, **ASYNC)
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            task = asyncio.create_task(train(orchestrator, settings, model=gate))
            await until(lambda: gate.reached() and orchestrator.workers[0].speed > 0.0)
            assert orchestrator.workers[0].pid is not None
            os.kill(orchestrator.workers[0].pid, signal.SIGKILL)
            gate.open()
            with pytest.raises(PacelineError, match="signal 9"):
                await task
            assert orchestrator.checkpoints

    asyncio.run(main())


def test_a_lost_server_is_started_again_from_the_newest_checkpoint(tmp_path):
    async def main() -> None:
        gate = Gate(tmp_path / "gate")
        settings = small(tmp_path / "run", checkpoint_every_steps=10, **ASYNC)
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            task = asyncio.create_task(train(orchestrator, settings, model=gate))
            await until(lambda: gate.reached() and bool(orchestrator.checkpoints))
            (started,) = told(tmp_path / "run", events.SupervisorStarted)
            os.kill(started.pid, signal.SIGKILL)
            gate.open()
            result = await task
            assert result["epochs_completed"] == 2
            (resumed,) = told(tmp_path / "run", events.RunResumed)
            assert resumed.step >= 10
            assert [step.step for step in told(tmp_path / "run", events.StepCommitted)][-1] == result["steps"]

    asyncio.run(main())


def test_cancelled_it_saves_and_another_goes_on_from_there(tmp_path):
    async def main() -> None:
        # What is left at the gate takes half a minute: the request to stop comes before its end.
        gate = Gate(tmp_path / "gate", pause=0.5)
        settings = small(tmp_path / "run", **ASYNC)
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            task = asyncio.create_task(train(orchestrator, settings, model=gate))
            await until(lambda: gate.reached() and orchestrator.workers[0].speed > 0.0)
            pids = [node.pid for node in orchestrator.workers if node.pid is not None]
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()
            assert not any(is_alive(pid) for pid in pids)
            assert orchestrator.checkpoints
            before = orchestrator.checkpoints[-1].step
            assert 0 < before < 2 * SAMPLES / 15
            result = await train(orchestrator, {**settings, "resume": True}, model=gate)
            assert result["epochs_completed"] == 2
            assert applied(tmp_path / "run") == every_position(SAMPLES, 2)

    asyncio.run(main())


def never_more_than_one(staleness: int) -> float:
    return 0.5


def test_waiting_instead_of_dropping_and_a_weight_of_ones_own(tmp_path):
    async def main() -> None:
        staleness = Staleness(weight=never_more_than_one, limit=1, beyond="wait")
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            result = await train(orchestrator, small(tmp_path / "run", staleness=staleness, **ASYNC))
            assert result["staleness"]["dropped"] == 0
            assert set(result["staleness"]["histogram"]) <= {"0", "1"}
            steps = told(tmp_path / "run", events.StepCommitted)
            assert {step.metrics["weight"] for step in steps} == {0.5}

    asyncio.run(main())


def wrong(model, batch):
    raise ValueError("the objective of this test is wrong")


def test_a_mistake_of_the_user_is_raised_and_not_tried_again_and_again(tmp_path):
    async def main() -> None:
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            with pytest.raises(RankFailedError, match="the objective of this test is wrong"):
                await train(orchestrator, small(tmp_path / "run", **ASYNC), objective=wrong)
            endless = (row for row in X)
            with pytest.raises(UsageError, match="an iterable dataset has no size"):
                await train(orchestrator, small(tmp_path / "other", **ASYNC), dataset=endless)
            result = await train(orchestrator, small(tmp_path / "third", **ASYNC))
            assert result["epochs_completed"] == 2

    asyncio.run(main())


def test_statistics_of_the_global_batch_are_refused(tmp_path):
    async def main() -> None:
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            with pytest.raises(UsageError, match=r"the model's 1 is a SyncBatchNorm.* asynchronous workers"):
                await train(orchestrator, small(tmp_path / "run", **ASYNC), model=with_synced_norm)

    asyncio.run(main())


def with_synced_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(X.shape[1], 4), nn.SyncBatchNorm(4), nn.Linear(4, Y.shape[1]))


def test_modules_of_ones_own_come_back_trained(tmp_path):
    async def main() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(6), small_net())
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            result = await train(
                orchestrator,
                small(tmp_path / "run", **ASYNC),
                model=model,
                optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
            )
            assert orchestrator.model is model
            assert state_hash(model) == result["state_hash"]
            assert nn.functional.mse_loss(model(X), Y) < 0.5

    asyncio.run(main())
