"""Synchronous training of the orchestrator: stops, and losses without a supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.frontends.orchestrator.parts import Gate, X, Y, small, small_net, told, train, until
from torch import nn

from paceline.core import events
from paceline.core.errors import PeerLostError
from paceline.frontends.orchestrator.job_preparation import TrainingArguments, prepare_training
from paceline.frontends.orchestrator.orchestrator import DistributedTrainingOrchestrator
from paceline.frontends.orchestrator.orchestrator_config import read_config
from paceline.frontends.orchestrator.sync_job import SyncJob


def test_a_killed_rank_is_in_the_journal(tmp_path: Path):
    """It could not record its failure itself, and there is no supervisor to do it."""
    folder = tmp_path / "run"

    async def main() -> None:
        async with DistributedTrainingOrchestrator(2) as orchestrator:
            gate = Gate(tmp_path / "gate")
            task = asyncio.create_task(train(orchestrator, small(folder, fault_tolerance=False), model=gate))
            await until(gate.reached)
            started = {event.rank: event.pid for event in told(folder, events.WorkerStarted)}
            os.kill(started[1], signal.SIGKILL)
            gate.open()
            with pytest.raises(PeerLostError):
                await task
            failed = [(event.rank, event.pid) for event in told(folder, events.WorkerFailed)]
            assert failed == [(1, started[1])]

    asyncio.run(main())


@pytest.mark.parametrize("supervised", [False, True])
def test_a_stop_before_a_worker_has_a_result_is_obeyed(tmp_path: Path, supervised: bool):
    """Taking the lock removes the stop file, which could be an earlier run's. Under a supervisor no worker
    returns anything: the outcome is a stop all the same."""
    given = TrainingArguments(None, small_net, (X, Y), nn.MSELoss(), None)
    prepared = prepare_training(read_config(small(tmp_path / "run", fault_tolerance=supervised)), given, 1)
    job = SyncJob(prepared.job)
    job.stop("early")
    job.start()
    assert job.wait(60.0)
    outcome = job.result()
    assert outcome.stopped is not None
    assert "early" in outcome.stopped
    assert outcome.epochs_completed == 0
