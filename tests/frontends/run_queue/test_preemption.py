"""Runs that train, in a queue whose server and processes are killed: the same bits as undisturbed."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal

import psutil
import pytest
from tests.frontends.run_queue.training_queue import check_undisturbed, members, training, undisturbed_hash
from tests.train.small_run import steps_of
from tests.waiting import wait_for

from paceline.frontends.run_queue import run_observation


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The hash of the same run in one process, with nothing in its way."""
    return undisturbed_hash(tmp_path_factory.mktemp("undisturbed"), 5, 12)


@pytest.mark.timeout(600)
def test_preempted_and_killed_runs_leave_no_trace(tmp_path, expected):
    with training(tmp_path, capacity=2) as queue:
        low = queue.add("low", "1-2", 5, 12)
        queue.at_gate(low, 5)
        # Both workers are needed: the run is stopped at the end of its step, and nothing is lost.
        high = queue.add("high", "2", 5, 12, priority=5)
        queue.until_state(low, "stopping")
        queue.open_gate(low, 5)
        queue.until_state(low, "waiting")
        assert queue.run(low).code == 75
        stopped = steps_of(queue.run_dir(low))
        assert stopped == list(range(1, len(stopped) + 1))
        assert queue.run(low).reason == f"saved after step {len(stopped)}: run 2 of priority 5 gets workers"

        # The server is killed; the run that trains does not notice, and ends while there is none.
        queue.at_gate(high, 5)
        queue.kill_server()
        assert not queue.folder.is_served
        queue.open_gate(high, 5)
        queue.open_gate(high, 12)
        queue.until(lambda: run_observation.exit_code(queue.folder, queue.run(high)) == 0, "high has no end")
        assert queue.run(high).state == "running"
        queue.serve()
        queue.until_state(high, "finished")
        assert queue.run(high).attempt == 1
        check_undisturbed(queue.run_dir(high), expected)

        # The run continues; its process is killed, and it continues again.
        queue.at_gate(low, 12)
        assert queue.run(low).workers == 2
        assert steps_of(queue.run_dir(low))[: len(stopped) + 1] == list(range(1, len(stopped) + 2))
        os.kill(queue.process(low), signal.SIGKILL)
        queue.open_gate(low, 12)
        queue.until_state(low, "finished")
        assert queue.run(low).attempt == 3
        check_undisturbed(queue.run_dir(low), expected)


@pytest.mark.timeout(600)
def test_everything_is_killed_at_once_and_the_next_server_continues_the_run(tmp_path, expected, monkeypatch):
    mark = secrets.token_hex(8)
    monkeypatch.setenv("PACELINE_TEST_QUEUE", mark)
    with training(tmp_path, capacity=2) as queue:
        name = queue.add("run", "2", 5, 12)
        queue.open_gate(name, 5)
        queue.at_gate(name, 12)
        there = marked(mark)
        words = [" ".join(process.cmdline()) for process in there]
        for part in ("queue serve", "run_host", "paceline train"):
            assert any(part in line for line in words)
        assert len(there) >= 6  # and its supervisor, and two workers
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none sees the end of another
            for process in there:
                # The end of one may have ended another: workers end with their fork server.
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        assert queue.server is not None
        queue.server.wait()
        wait_for(lambda: not marked(mark), "all are gone")
        assert queue.run(name).state == "running"
        queue.open_gate(name, 12)
        queue.serve()
        queue.until_state(name, "finished")
        assert queue.run(name).attempt == 2
        check_undisturbed(queue.run_dir(name), expected)


def marked(mark: str) -> list[psutil.Process]:
    """Processes that were started with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("PACELINE_TEST_QUEUE") == mark:
                found.append(process)
    return found


@pytest.mark.timeout(600)
def test_runs_shrink_and_grow_at_step_boundaries(tmp_path, expected):
    with training(tmp_path, capacity=2) as queue:
        first = queue.add("first", "1-2", 5, 12)
        queue.at_gate(first, 5)
        assert members(queue.run_dir(first)) == [2]
        second = queue.add("second", "1", 5, 12, priority=5)
        queue.until(lambda: queue.run(first).workers == 1, "it was not told to shrink")
        assert queue.run(second).state == "waiting"  # its worker is not free yet
        queue.open_gate(first, 5)
        queue.until_state(second, "running")
        queue.at_gate(first, 12)
        assert members(queue.run_dir(first)) == [2, 1]
        for step in (5, 12):
            queue.open_gate(second, step)
        queue.until_state(second, "finished")
        queue.until(lambda: queue.run(first).workers == 2, "it was not told to grow")
        queue.until(
            lambda: run_observation.workers_now(queue.run_dir(first)) == 2, "the second worker did not come"
        )
        queue.open_gate(first, 12)
        queue.until_state(first, "finished")
        assert queue.run(first).attempt == queue.run(second).attempt == 1
        for name in (first, second):
            check_undisturbed(queue.run_dir(name), expected)
