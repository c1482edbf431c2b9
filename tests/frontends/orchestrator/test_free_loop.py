"""The event loop is never held up for more than 50 ms, whatever the orchestrator is doing."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.frontends.orchestrator.parts import (
    MOST_SECONDS_HELD_UP,
    fewest_seconds_held_up,
    small,
    train,
)

from paceline.frontends.orchestrator.orchestrator import DistributedTrainingOrchestrator
from paceline.frontends.orchestrator.orchestrator_config import AggregationStrategy


async def initialises_and_cleans_up(folder: Path) -> None:
    orchestrator = DistributedTrainingOrchestrator(2)
    await orchestrator.initialize_workers()
    await orchestrator.cleanup()


async def trains_by_sizes(folder: Path) -> None:
    async with DistributedTrainingOrchestrator(2) as orchestrator:
        settings = {
            "size": 3_000,
            "batch_size": 32,
            "epochs": 1,
            "checkpoint_every_steps": 20,
            "run_dir": folder,
        }
        await orchestrator.train_distributed(settings, {"total_samples": 20_000})
        await orchestrator.get_training_summary()


async def trains_without_waiting_for_each_other(folder: Path) -> None:
    async with DistributedTrainingOrchestrator(2) as orchestrator:
        await train(orchestrator, small(folder, aggregation_strategy=AggregationStrategy.ASYNC_SGD))


@pytest.mark.parametrize(
    "work", [initialises_and_cleans_up, trains_by_sizes, trains_without_waiting_for_each_other]
)
def test_the_loop_is_never_held_up(work: Callable[[Path], Awaitable[None]], tmp_path: Path) -> None:
    seconds = asyncio.run(fewest_seconds_held_up(lambda number: work(tmp_path / str(number))))
    assert seconds < MOST_SECONDS_HELD_UP


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_a_blocking_call_is_seen(*, before: bool, after: bool) -> None:
    async def blocks(number: int) -> None:
        await asyncio.sleep(0.02 if before else 0.0)
        select.select([], [], [], 2.0 * MOST_SECONDS_HELD_UP)
        await asyncio.sleep(0.02 if after else 0.0)

    assert asyncio.run(fewest_seconds_held_up(blocks, rounds=1)) > MOST_SECONDS_HELD_UP
