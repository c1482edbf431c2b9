"""What is measured of each worker by itself, in trainings where all of them meet after every step."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.frontends.orchestrator.parts import Gate, small, small_net, train, until
from torch import Tensor, nn

import paceline
from paceline.control import supervisor_address
from paceline.frontends.orchestrator import sync_job
from paceline.frontends.orchestrator.orchestrator import DistributedTrainingOrchestrator

_SLOW_SECONDS = 0.04


class SlowNet(nn.Module):
    """Takes its time on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_net()

    def forward(self, x: Tensor) -> Any:
        if paceline.get_rank() == 1:
            select.select([], [], [], _SLOW_SECONDS)
        return self.inner(x)


@pytest.mark.parametrize("exact", [True, False])
def test_the_slow_worker_is_the_one_with_the_low_speed(tmp_path, exact):
    async def main() -> None:
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            settings = small(tmp_path / "run", epochs=500, exact=exact)
            task = asyncio.create_task(train(orchestrator, settings, model=SlowNet))

            def told_apart() -> bool:
                quick, slow = orchestrator.workers
                return 0.0 < 2.0 * slow.speed < quick.speed

            await until(told_apart)
            # 15 samples are one worker's part of a step.
            assert orchestrator.workers[1].speed < 15 / _SLOW_SECONDS
            task.cancel()
            await asyncio.wait([task])
            quick, slow = (await orchestrator.get_training_summary())["workers"]
            assert 0.0 < slow["speed"] < quick["speed"]

    asyncio.run(main())


def test_heartbeats_go_on_while_no_worker_finishes_a_step_and_with_another_supervisor(tmp_path):
    async def main() -> None:
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            gate = Gate(tmp_path / "gate")
            task = asyncio.create_task(train(orchestrator, small(tmp_path / "run"), model=gate))

            async def all_workers_are_heard() -> None:
                since = time.time()
                await until(lambda: all(node.last_heartbeat > since for node in orchestrator.workers))
                assert max(node.last_heartbeat for node in orchestrator.workers) <= time.time()

            await until(lambda: gate.reached() and all(node.speed > 0.0 for node in orchestrator.workers))
            await all_workers_are_heard()
            first = supervisor_address.read(tmp_path / "run")
            os.kill(first.pid, signal.SIGKILL)
            await until(lambda: supervisor_address.read(tmp_path / "run").attempt > first.attempt)
            await all_workers_are_heard()
            gate.open()
            assert (await task)["epochs_completed"] == 2

    asyncio.run(main())


def test_without_a_supervisor_workers_share_what_all_of_them_do(tmp_path):
    async def main() -> None:
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            await train(orchestrator, small(tmp_path / "run", fault_tolerance=False))
            first, second = orchestrator.workers
            assert first.speed == second.speed > 0.0
            assert first.last_heartbeat == second.last_heartbeat > 0.0

    asyncio.run(main())


def test_where_no_supervisor_answers_nothing_is_measured(tmp_path: Path):
    assert sync_job.measurements(tmp_path) == (0.0, ())
