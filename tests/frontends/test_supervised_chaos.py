"""Faults on demand in whole runs: each comes once, in whichever life of its rank gets there, and what never
comes is said."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from tests.frontends.supervised_runs import behind_gate, check_exactly_once, of, supervised
from tests.train.small_run import fit, settings, steps_of
from tests.waiting import wait_for

import paceline
from paceline.control.messages import ToolRequest
from paceline.core import events
from paceline.elastic.supervisor import tool_client
from paceline.train.callbacks import Modifier
from paceline.train.settings.train_config import CheckpointConfig

# That of the manual, with steps that this run has.
MANUAL = (
    "kill rank=2 step=10; hang rank=1 step=14 phase=collective; slow rank=0 factor=3; "
    "partition rank=3 for=5s; corrupt rank=1 step=20; oom rank=2"
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return fit(settings(folder, 1, fault_tolerance=paceline.FaultTolerance(enabled=False))).state_hash


def injected(folder: Path) -> Counter[tuple[int, int]]:
    """How often each fault came, by its place in the text and its rank."""
    return Counter((event.index, event.rank) for event in of(events.FaultInjected, folder))


class FullHouse(Modifier):
    """In each step, waits until a replacement of every worker that was lost has come, so that the run is not
    over before it can meet its own faults."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder, self._workers = folder, workers

    def change_gradients(self, parameters):
        wait_for(self._is_full)

    def _is_full(self) -> bool:
        there = len(of(events.WorkerStarted, self._folder)) - len(of(events.WorkerFailed, self._folder))
        return there >= self._workers


def test_every_fault_of_the_manual_comes_once(tmp_path, undisturbed, caplog):
    folder = tmp_path / "run"
    history = fit(supervised(folder, 4, MANUAL), [FullHouse(folder, 4)])
    assert history.state_hash == undisturbed
    assert injected(folder) == {(0, 2): 1, (1, 1): 1, (2, 0): 1, (3, 3): 1, (4, 1): 1, (5, 2): 1}
    texts = {event.index: event.fault for event in of(events.FaultInjected, folder)}
    assert "; ".join(texts[index] for index in sorted(texts)) == MANUAL
    blamed = [(event.rank, event.cause) for event in of(events.WorkerFailed, folder)]
    # Where no memory group can be made, running out of memory is an exception.
    assert {rank for rank, cause in blamed if cause in ("memory", "raised")} == {2}
    assert {(2, "crash"), (1, "hung"), (3, "silent"), (1, "corrupt")} <= set(blamed)
    assert "chaos" not in caplog.text
    check_exactly_once(folder)


def all_are_back(folder: Path) -> bool:
    """Whether the supervisor that took over has heard both workers."""
    workers = tool_client.ask(folder, ToolRequest(what="status")).facts["workers"]
    return len(workers) == 2 and all(worker["heard"] is not None for worker in workers)


def test_a_fault_does_not_come_again_when_the_run_begins_anew_under_another_supervisor(tmp_path, undisturbed):
    folder = tmp_path / "run"

    def kill() -> None:
        wait_for(lambda: len(of(events.WorkerStarted, folder)) >= 3)
        pid = json.loads((folder / "control.json").read_text())["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: len(of(events.SupervisorStarted, folder)) >= 2)
        wait_for(lambda: all_are_back(folder))

    chaos = "kill rank=1 step=4; kill rank=all step=12"
    config = supervised(folder, 2, chaos, checkpoint=CheckpointConfig(enabled=False))
    history = behind_gate(config, tmp_path / "gate", kill)
    assert history.state_hash == undisturbed
    assert steps_of(folder).count(4) == 2  # it did come by that step again
    assert injected(folder) == {(0, 1): 1, (1, 0): 1, (1, 1): 1}


def test_what_never_came_is_said_at_the_end(tmp_path, caplog):
    chaos = "kill rank=9; kill rank=1 step=500; hang rank=0 step=3 for=1ms; corrupt rank=1 step=2 attempt=7"
    with caplog.at_level(logging.WARNING, logger="paceline"):
        fit(supervised(tmp_path / "run", 2, chaos))
    (said,) = [record.getMessage() for record in caplog.records if "never came" in record.getMessage()]
    assert "kill rank=9 (there was no rank 9)" in said
    assert "kill rank=1 step=500 (the run ended after step 30)" in said
    assert "corrupt rank=1 step=2 attempt=7" in said
    assert "hang" not in said


def test_chaos_inside_a_job_is_refused(tmp_path):
    config = settings(tmp_path / "run", 1, fault_tolerance=paceline.FaultTolerance(chaos="kill rank=0"))

    def inside(context: paceline.DistributedContext) -> str:
        try:
            fit(config)
        except paceline.PacelineError as error:
            return str(error)
        return ""

    said = paceline.spawn(inside, workers=2)
    assert all("faults are injected only into supervised workers" in one for one in said)
