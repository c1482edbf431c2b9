"""Restarts of the server of asynchronous SGD, without a process: budget and back-off are those of a slot."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.aggregate.async_sgd.async_job import AsyncJob
from paceline.aggregate.async_sgd.process_entries import AsyncTraining, ServerOptions
from paceline.aggregate.async_sgd.staleness import Staleness
from paceline.core.errors import PeerLostError
from paceline.elastic.machine.budgets import wait_before_start
from paceline.elastic.machine.settings import MachineSettings
from paceline.train.loop.worker_jobs import TrainJob
from paceline.train.settings.fault_tolerance import FaultTolerance
from paceline.train.settings.train_config import TrainConfig


class Servers:
    """Stands for the server processes of a job. All are lost at once, until `outcome` is set; `first_lost`:
    one was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[ServerOptions] = []
        self.first_lost = threading.Event()
        self.outcome: Any = None
        monkeypatch.setattr(AsyncJob, "_attempt", self._attempt)

    def _attempt(self, packed: int, call: object, options: ServerOptions) -> Any:
        self.started.append(options)
        if self.first_lost.is_set() and self.outcome is not None:
            return self.outcome
        self.first_lost.set()
        return None


def job_of(folder: Path, **care: Any) -> AsyncJob:
    config = TrainConfig(workers=2, fault_tolerance=FaultTolerance(**care))
    job = TrainJob(None, None, None, config, None, folder=folder)  # type: ignore[arg-type]
    return AsyncJob(AsyncTraining(job, Staleness(), 10.0))


def test_a_lost_server_has_the_budget_and_the_back_off_of_a_slot(tmp_path, monkeypatch):
    servers, waits = Servers(monkeypatch), list[float]()
    monkeypatch.setattr(AsyncJob, "_wait_until", lambda job, at: waits.append(at - time.monotonic()))
    job = job_of(tmp_path, max_worker_failures=3, backoff=10.0).start()
    assert job.wait(30.0)
    with pytest.raises(PeerLostError, match="was lost"):
        job.result()
    job.close()
    assert servers.started == [
        ServerOptions(1, resume=False),
        ServerOptions(2, resume=True),
        ServerOptions(3, resume=True),
        ServerOptions(4, resume=True),
    ]
    settings = MachineSettings(workers=2, shards=2, backoff=10.0)
    expected = [wait_before_start(settings, 2, failures, failures) for failures in (1, 2, 3)]
    assert expected[0] == 0.0 < 7.5 <= expected[1] < expected[2]
    assert waits == pytest.approx(expected, abs=2.0)


def test_without_fault_tolerance_a_lost_server_is_not_started_again(tmp_path, monkeypatch):
    servers = Servers(monkeypatch)
    job = job_of(tmp_path, enabled=False).start()
    assert job.wait(30.0)
    with pytest.raises(PeerLostError):
        job.result()
    job.close()
    assert len(servers.started) == 1


@pytest.mark.parametrize("how", ["stop", "close"])
def test_a_request_to_stop_and_the_end_of_the_job_do_not_wait_for_the_back_off(tmp_path, monkeypatch, how):
    servers = Servers(monkeypatch)
    monkeypatch.setattr(
        "paceline.aggregate.async_sgd.async_job.after_failure",
        lambda settings, slot, kind, worked, now: type(slot)(
            slot.number, total_failures=slot.total_failures + 1, start_at=now + 600.0
        ),
    )
    job = job_of(tmp_path).start()
    assert servers.first_lost.wait(30.0)
    servers.outcome = "saved"
    if how == "stop":
        job.stop("enough")
        assert job.wait(30.0)
    job.close()
    assert job.result() is servers.outcome
    assert len(servers.started) == 2
