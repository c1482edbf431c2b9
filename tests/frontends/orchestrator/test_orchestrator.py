"""The orchestrator with real workers: what it returns, what can be seen meanwhile, how it ends."""

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

from paceline.core import events
from paceline.core.errors import ConfigError, PacelineError, PlatformError, RankFailedError, UsageError
from paceline.frontends.orchestrator.observed_state import WorkerState
from paceline.frontends.orchestrator.orchestrator import DistributedTrainingOrchestrator
from paceline.frontends.orchestrator.orchestrator_config import (
    AggregationStrategy,
    TrainingConfig,
    register_aggregation,
)
from paceline.frontends.spawn import spawn
from paceline.train.state.model_state import state_hash
from paceline.train.step.aggregation_registry import Aggregation


def test_sizes_alone_are_enough(tmp_path):
    async def main() -> None:
        orchestrator = DistributedTrainingOrchestrator(num_workers=2)
        assert [node.state for node in orchestrator.workers] == [WorkerState.CREATED] * 2
        await orchestrator.initialize_workers()
        assert [node.state for node in orchestrator.workers] == [WorkerState.IDLE] * 2
        settings = {
            "size": 3_000,
            "batch_size": 32,
            "learning_rate": 1e-2,
            "epochs": 3,
            "run_dir": tmp_path / "run",
        }
        seen: list[list[int]] = [[], []]

        async def watch(number: int) -> None:
            async for metrics in orchestrator.metrics():
                seen[number].append(metrics.step)

        watchers = [asyncio.create_task(watch(number)) for number in range(2)]
        await asyncio.sleep(0)
        result = await orchestrator.train_distributed(settings, {"total_samples": 20_000})
        await asyncio.gather(*watchers)
        assert result["epochs_completed"] == 3
        assert result["final_loss"] < 0.6 * result["losses"][0]
        assert seen[0] == seen[1] == list(range(1, result["steps"] + 1))
        assert result["samples"] == 60_000
        assert result["exact"] is True
        assert orchestrator.model is not None
        assert state_hash(orchestrator.model) == result["state_hash"]

        versions = orchestrator.checkpoints
        assert [one.version for one in versions] == list(range(1, len(versions) + 1))
        assert versions[-1].step == result["steps"]
        assert result["model_version"] == versions[-1].version
        summary = await orchestrator.get_training_summary()
        assert summary["running"] is False
        assert summary["steps"] == result["steps"]
        assert summary["final_loss"] == result["final_loss"]
        assert [worker["state"] for worker in summary["workers"]] == ["stopped", "stopped"]
        assert all(shard["checksum"] and shard["verified"] >= 1 for shard in summary["shards"])
        # Slices for 4 workers and more, so that the training can grow.
        assert [shard.range for shard in orchestrator.shards] == [
            range(2_500 * number, 2_500 * (number + 1)) for number in range(8)
        ]
        await orchestrator.cleanup()
        await orchestrator.cleanup()

    asyncio.run(main())


def test_workers_and_shards_can_be_looked_at_while_it_trains(tmp_path):
    async def main() -> None:
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            assert not orchestrator.shards
            gate = Gate(tmp_path / "gate")
            task = asyncio.create_task(train(orchestrator, small(tmp_path / "run"), model=gate))
            await until(lambda: gate.reached() and all(node.speed > 0.0 for node in orchestrator.workers))
            nodes = orchestrator.workers
            assert [node.state for node in nodes] == [WorkerState.TRAINING] * 2
            assert all(node.pid is not None and is_alive(node.pid) for node in nodes)
            assert all(node.host and node.last_heartbeat > 0.0 for node in nodes)
            assert [node.shards for node in nodes] == [(0, 1), (2, 3)]
            assert [shard.owner for shard in orchestrator.shards] == [0, 0, 1, 1]
            summary = await orchestrator.get_training_summary()
            assert summary["running"] is True
            assert summary["final_loss"] is None
            with pytest.raises(UsageError, match="another training is under way"):
                await train(orchestrator, small(tmp_path / "second"))
            gate.open()
            result = await task
            assert result["stopped"] is None

    asyncio.run(main())


def test_the_synchronous_strategies_give_the_same_bits_where_the_sum_is_exact(tmp_path):
    async def main() -> None:
        hashes = set()
        losses = []
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            for strategy in ("ALL_REDUCE", "RING_ALL_REDUCE", "HIERARCHICAL"):
                config = TrainingConfig(
                    **small(tmp_path / strategy, aggregation_strategy=AggregationStrategy[strategy])
                )
                result = await train(orchestrator, config)
                assert result["strategy"] == AggregationStrategy[strategy].value
                hashes.add(result["state_hash"])
                losses.append(result["final_loss"])
        assert len(hashes) == 1
        # And the number of workers does not matter either, for the same slices of the same batch.
        async with DistributedTrainingOrchestrator(1) as alone:
            result = await train(alone, small(tmp_path / "alone", batch_size=30))
            assert result["state_hash"] in hashes

    asyncio.run(main())


@pytest.mark.parametrize("strategy", ["all_reduce", "ring_all_reduce", "hierarchical"])
def test_without_the_exact_sum_the_named_algorithm_learns_the_same(tmp_path, strategy):
    async def main() -> None:
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            fast = small(tmp_path / "fast", aggregation_strategy=strategy, exact=False)
            result = await train(orchestrator, fast)
            exact = await train(orchestrator, small(tmp_path / "exact"))
            assert result["exact"] is False
            assert result["final_loss"] == pytest.approx(exact["final_loss"], rel=1e-3)

    asyncio.run(main())


class Median:
    """The middle of what the workers have, in every element."""

    def combine(self, context, tensor):
        everyone = torch.stack(context.all_gather(tensor))
        tensor.copy_(everyone.median(0).values * context.world_size)


def test_a_strategy_of_ones_own(tmp_path):
    assert isinstance(Median(), Aggregation)
    register_aggregation("median_of_this_test", Median())

    async def main() -> None:
        async with DistributedTrainingOrchestrator(3) as orchestrator:
            result = await train(
                orchestrator,
                small(tmp_path / "run", batch_size=10, aggregation_strategy="median_of_this_test"),
            )
            assert result["strategy"] == "median_of_this_test"
            assert result["losses"][-1] < result["losses"][0]
            plain = await train(orchestrator, small(tmp_path / "plain", batch_size=10, exact=False))
            assert plain["state_hash"] != result["state_hash"]

    asyncio.run(main())


def test_a_killed_worker_leaves_no_trace_and_its_shard_moves(tmp_path):
    async def main() -> None:
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            calm = Gate(tmp_path / "calm gate", is_open=True)
            undisturbed = await train(orchestrator, small(tmp_path / "calm"), model=calm)
            gate = Gate(tmp_path / "gate")
            task = asyncio.create_task(train(orchestrator, small(tmp_path / "run"), model=gate))
            await until(lambda: gate.reached() and orchestrator.workers[1].speed > 0.0)
            victim, other = orchestrator.workers[1].pid, orchestrator.workers[0].pid
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            gate.open()
            result = await task
            assert result["state_hash"] == undisturbed["state_hash"]
            assert result["worker_failures"] == 1
            assert orchestrator.workers[1].failures == 1
            assert orchestrator.workers[0].pid == other
            assert orchestrator.shards[3].moves >= 1
            assert orchestrator.shards[3].verified >= 2
            assert (await orchestrator.get_training_summary())["repairs"]

    asyncio.run(main())


def test_cancelling_saves_the_state_ends_every_process_and_a_resumed_run_has_the_same_bits(tmp_path):
    async def main() -> None:
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            calm = Gate(tmp_path / "calm gate", is_open=True)
            undisturbed = await train(orchestrator, small(tmp_path / "calm"), model=calm)
            settings = small(tmp_path / "run")
            gate = Gate(tmp_path / "gate")
            task = asyncio.create_task(train(orchestrator, settings, model=gate))
            await until(lambda: gate.reached() and orchestrator.workers[1].speed > 0.0)
            watching = asyncio.create_task(last_step(orchestrator))
            pids = [node.pid for node in orchestrator.workers if node.pid is not None]
            task.cancel()
            # One turn of the loop: the job is asked to stop before it can go on.
            await until(lambda: orchestrator._end_request.name == "STOP")
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(pids) == 2
            assert not any(is_alive(pid) for pid in pids)
            step = await watching
            assert orchestrator.checkpoints[-1].step == step
            result = await train(orchestrator, {**settings, "resume": True}, model=gate)
            assert result["state_hash"] == undisturbed["state_hash"]
            assert len(told(tmp_path / "run", events.RunResumed)) == 1

    async def last_step(orchestrator: DistributedTrainingOrchestrator) -> int:
        step = 0
        async for metrics in orchestrator.metrics():
            step = metrics.step
        return step

    asyncio.run(main())


def test_cleaning_up_ends_a_training_that_is_under_way(tmp_path):
    async def main() -> None:
        orchestrator = DistributedTrainingOrchestrator(2)
        await orchestrator.initialize_workers()
        gate = Gate(tmp_path / "gate")
        task = asyncio.create_task(train(orchestrator, small(tmp_path / "run", epochs=50), model=gate))
        await until(lambda: gate.reached() and orchestrator.workers[1].speed > 0.0)
        gate.open()
        pids = [node.pid for node in orchestrator.workers if node.pid is not None]
        await orchestrator.cleanup()
        assert task.cancelled()
        assert not any(is_alive(pid) for pid in pids)
        assert orchestrator.checkpoints

    asyncio.run(main())


@pytest.mark.parametrize("strategy", ["all_reduce", "async_sgd"])
def test_cancelled_twice_it_ends_at_once(tmp_path, strategy):
    async def main() -> None:
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            settings = small(tmp_path / "run", epochs=50, aggregation_strategy=strategy)
            gate = Gate(tmp_path / "gate")
            task = asyncio.create_task(train(orchestrator, settings, model=gate))
            await until(lambda: gate.reached() and orchestrator.workers[1].speed > 0.0)
            pids = [node.pid for node in orchestrator.workers if node.pid is not None]
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not any(is_alive(pid) for pid in pids)

    asyncio.run(main())


def test_cancelled_while_it_is_being_prepared_nothing_starts(tmp_path):
    async def main() -> None:
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            task = asyncio.create_task(train(orchestrator, small(tmp_path / "run")))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            result = await train(orchestrator, small(tmp_path / "other"))
            assert result["epochs_completed"] == 2

    asyncio.run(main())


def test_modules_data_and_optimizers_of_ones_own(tmp_path):
    async def main() -> None:
        torch.manual_seed(0)
        model = small_net()
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            result = await train(
                orchestrator,
                small(tmp_path / "run", shards=4, gradient_clip=None),
                model=model,
                optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05),
            )
            assert orchestrator.model is model
            assert state_hash(model) == result["state_hash"]
            assert len(orchestrator.shards) == 4
            with pytest.raises(ConfigError, match="total_samples=7, and the dataset has 1200"):
                await orchestrator.train_distributed(
                    small(tmp_path / "x"),
                    {"total_samples": 7},
                    model=model,
                    dataset=(X, Y),
                    objective=nn.MSELoss(),
                )

    asyncio.run(main())


def wrong(model, batch):
    raise ValueError("the objective of this test is wrong")


def test_mistakes_are_raised_and_the_orchestrator_can_be_used_again(tmp_path):
    async def main() -> None:
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            with pytest.raises(RankFailedError, match="the objective of this test is wrong"):
                await train(orchestrator, small(tmp_path / "run"), objective=wrong)
            with pytest.raises(ConfigError, match="have no 'epoch'"):
                await train(orchestrator, {"epoch": 3})
            assert (await train(orchestrator, small(tmp_path / "other")))["epochs_completed"] == 2

    asyncio.run(main())


def test_data_that_changes_meanwhile_is_found_out(tmp_path):
    async def main() -> None:
        x, y = X.clone(), Y.clone()
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            gate = Gate(tmp_path / "gate")
            task = asyncio.create_task(
                train(orchestrator, small(tmp_path / "run"), model=gate, dataset=(x, y))
            )
            await until(gate.reached)
            x[SAMPLES - 1, 0] += 1.0
            gate.open()
            with pytest.raises(PlatformError, match="shard 3, samples 900 to 1199, changed"):
                await task

    asyncio.run(main())


def test_things_in_the_wrong_order_are_clear_errors(tmp_path):
    async def main() -> None:
        with pytest.raises(UsageError, match="num_workers=0"):
            DistributedTrainingOrchestrator(0)
        orchestrator = DistributedTrainingOrchestrator(1)
        with pytest.raises(UsageError, match="before initialize_workers"):
            await train(orchestrator, small(tmp_path / "run"))
        with pytest.raises(UsageError, match="no training to summarise"):
            await orchestrator.get_training_summary()
        await orchestrator.initialize_workers()
        with pytest.raises(UsageError, match="that is ready"):
            await orchestrator.initialize_workers()
        await orchestrator.cleanup()
        with pytest.raises(UsageError, match="that is closed"):
            await train(orchestrator, small(tmp_path / "run"))
        with pytest.raises(UsageError, match="that is closed"):
            orchestrator.metrics()
        await DistributedTrainingOrchestrator(1).cleanup()

    asyncio.run(main())


def inside(ctx) -> str:
    async def main() -> None:
        await DistributedTrainingOrchestrator(1).initialize_workers()

    try:
        asyncio.run(main())
    except PacelineError as error:
        return str(error)
    return "nothing"


def test_inside_a_job_it_is_refused():
    assert "is a rank of a job already" in spawn(inside, workers=1, timeout=60)[0]


def test_every_sample_is_applied_once_by_the_journal(tmp_path):
    async def main() -> None:
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            await train(orchestrator, small(tmp_path / "run", batch_size=7))
            assert applied(tmp_path / "run") == every_position(SAMPLES, 2)

    asyncio.run(main())


def test_a_training_is_scaled_while_it_trains_and_has_the_same_bits(tmp_path):
    async def main() -> None:
        # Long enough for the newcomers to be gathered: they are let in together, at one step.
        settings = small(tmp_path / "run", shards=4, batch_size=60, epochs=60)
        gate = Gate(tmp_path / "gate")
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            task = asyncio.create_task(
                orchestrator.train_distributed(
                    model_config=settings, model=gate, dataset=(X, Y), objective=nn.MSELoss()
                )
            )
            await until(gate.reached)
            await orchestrator.scale(4)
            await until(lambda: len(told(tmp_path / "run", events.WorkerStarted)) >= 4)
            gate.open()
            result = await task
            assert orchestrator.num_workers == 4
            views = [event.members for event in told(tmp_path / "run", events.ViewChanged)]
            await orchestrator.scale(1)
            plain = {**settings, "run_dir": tmp_path / "alone", "batch_size": 120}
            alone = await train(orchestrator, plain, model=gate)
        assert max(map(len, views)) == 4
        assert result["state_hash"] == alone["state_hash"]
        assert applied(tmp_path / "run") == every_position(SAMPLES, 60)

    asyncio.run(main())


def test_what_cannot_be_scaled_says_so(tmp_path):
    async def main() -> None:
        gate = Gate(tmp_path / "gate")
        settings = small(tmp_path / "run", fault_tolerance=False)
        async with DistributedTrainingOrchestrator(1) as orchestrator:
            with pytest.raises(UsageError, match="workers=0 is not a whole number from 1"):
                await orchestrator.scale(0)
            task = asyncio.create_task(train(orchestrator, settings, model=gate))
            await until(gate.reached)
            with pytest.raises(UsageError, match="without fault_tolerance: no supervisor"):
                await orchestrator.scale(2)
            gate.open()
            await task
            assert orchestrator.num_workers == 1
        with pytest.raises(UsageError, match="closed"):
            await orchestrator.scale(2)

    asyncio.run(main())
