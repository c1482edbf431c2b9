"""One rank among many: started without waiting, watched, handed over, outliving who asked for it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.engines.local.plain_entry import ENTRY
from tests.engines.local.processes import all_gone, watch
from tests.waiting import wait_for

from paceline.engines.local import fork_server_client, memfd_pickle, rank_call
from paceline.engines.local.engine_messages import LaunchOrder
from paceline.engines.local.forked_rank import RankTask
from paceline.engines.local.launch import order_from_caller
from paceline.engines.local.worker_handle import WorkerProcess

ROOT = Path(__file__).parents[3]


def order(**changes: Any) -> LaunchOrder:
    made = order_from_caller(ENTRY, 1, ("tests.engines.local.plain_entry",), 1, {"seat": 5})
    return dataclasses.replace(made, **changes)


@contextlib.contextmanager
def started(function: Callable[..., Any], *args: Any, **changes: Any) -> Iterator[WorkerProcess]:
    packed, _ = rank_call.pack(function, args, {})
    worker = WorkerProcess.start(order(**changes), packed)
    os.close(packed)
    try:
        yield worker
    finally:
        worker.kill()
        assert hear(worker, lambda: worker.done)
        worker.close()


def hear(worker: WorkerProcess, condition: Callable[[], Any], seconds: float = 20.0) -> bool:
    """Take in what the worker says until the condition holds."""
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        poll = select.poll()
        poll.register(worker, select.POLLIN)
        poll.poll(50)
        worker.receive()
    return bool(condition())


def environment(task: RankTask) -> dict[str, Any]:
    return {"rank": os.environ["RANK"], "world": os.environ["WORLD_SIZE"], **dict(task.options)}


def wait_for_a_signal(task: RankTask) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    _now_waiting()


def _now_waiting() -> None:
    signal.sigwait([signal.SIGUSR2])


def start_another_and_wait(task: RankTask, told: Path) -> None:
    """As a loader does: the other process holds all that this one has open."""
    child = os.fork()
    if child == 0:
        _now_waiting()
    told.write_text(str(child))
    wait_for_a_signal(task)


def test_a_rank_that_outlives_its_server_goes_on_and_takes_its_processes_along(tmp_path):
    with started(start_another_and_wait, tmp_path / "child", outlives_server=True) as worker:
        # A fork begins again with every signal, also with those that ask for a stack.
        assert hear(worker, (tmp_path / "child").exists)
        assert is_waiting(worker)
        child = int((tmp_path / "child").read_text())
        fork_server = fork_server_client.fork_server()
        with watch([fork_server.pid]) as gone, watch([worker.pid, child]) as watched:
            os.kill(fork_server.pid, signal.SIGKILL)
            assert all_gone(gone, 10.0)
            assert is_waiting(worker)
            worker.kill()
            wait_for(lambda: worker.has_ended, "the killed worker has not ended", seconds=5)
            worker.kill_orphans()
            assert all_gone(watched, 10.0)


def test_a_rank_that_does_not_outlive_its_server_ends_with_it():
    with started(wait_for_a_signal) as worker:
        assert is_waiting(worker)
        with watch([worker.pid]) as watched:
            os.kill(fork_server_client.fork_server().pid, signal.SIGKILL)
            assert all_gone(watched, 10.0)


def is_waiting(worker: WorkerProcess) -> bool:
    """Whether its stack says that it came to where a signal does not kill it; TimeoutError where it does not
    come there."""

    def asked() -> bool:
        worker.request_stack()
        with contextlib.suppress(TimeoutError):  # asked again
            wait_for(lambda: worker.stack_size() > 0, seconds=0.5)
        return worker.stack_size() > 0 and any("_now_waiting" in frame for frame in worker.frames())

    if not hear(worker, lambda: len(worker.descriptors()) == 2):
        return False
    wait_for(asked, "the worker does not come to where it waits", seconds=30)
    return True


def fail(task: RankTask) -> None:
    raise ValueError("no good")


def test_a_worker_returns_and_knows_its_place_in_something_larger():
    with started(environment, first_rank=3, world_size=7) as worker:
        assert hear(worker, lambda: worker.status is not None)
        assert worker.status == 0
        assert memfd_pickle.load(worker.returned[0]) == {"rank": "3", "world": "7", "seat": 5}


def test_a_worker_that_raises_leaves_a_report_and_its_exception():
    with started(fail) as worker:
        assert hear(worker, lambda: worker.status is not None)
        assert worker.status == 1
        report = memfd_pickle.load(worker.failed[0])
        assert report.fault == "code"
        assert "no good" in report.summary
        assert isinstance(memfd_pickle.load(worker.failed[1]), ValueError)


def test_a_worker_can_be_asked_where_it_is_and_killed():
    with started(wait_for_a_signal) as worker:
        assert is_waiting(worker)
        assert not worker.has_ended
        worker.kill()
        assert hear(worker, lambda: worker.status is not None)
        assert worker.status == -signal.SIGKILL
        assert worker.has_ended


def test_a_worker_can_be_adopted_with_what_was_kept():
    with started(wait_for_a_signal) as worker:
        assert is_waiting(worker)
        heir = WorkerProcess.adopt(worker.pid, [os.dup(file) for file in worker.descriptors()])
        # The first owner is gone; the rank does not notice.
        os.kill(worker.pid, signal.SIGUSR2)
        assert hear(heir, lambda: heir.done)
        assert heir.status == 0
        assert heir.returned
        heir.close()
        worker.done = True


def test_a_worker_can_be_adopted_before_its_pid_is_known():
    with started(wait_for_a_signal) as worker:
        heir = WorkerProcess.adopt(0, [os.dup(file) for file in worker.descriptors()])
        assert heir.pid == 0
        assert hear(heir, lambda: heir.pid)
        assert is_waiting(heir)
        heir.kill()
        assert hear(heir, lambda: heir.done)
        assert heir.status == -signal.SIGKILL
        heir.close()
        worker.done = True


def test_a_module_that_cannot_be_imported_is_a_refusal():
    with started(environment, preload=("no.such.module",)) as worker:
        assert hear(worker, lambda: worker.done)
        assert worker.refusal is not None
        assert "no.such.module" in str(worker.refusal)


def test_a_borrowed_server_starts_workers_too():
    fork_server = fork_server_client.fork_server()
    control, watched = fork_server.lend()
    code = f"""
import os, select, sys
from paceline.engines.local import fork_server_client, rank_call
from tests.engines.local.test_worker_handle import environment, order, hear
from paceline.engines.local.worker_handle import WorkerProcess
fork_server_client.adopt_server({fork_server.pid}, {control}, {watched})
packed, _ = rank_call.pack(environment, (), {{}})
worker = WorkerProcess.start(order(), packed)
assert hear(worker, lambda: worker.done)
print(worker.status, fork_server_client.fork_server().pid == {fork_server.pid})
fork_server_client.shutdown()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        pass_fds=[control, watched],
        capture_output=True,
        text=True,
        timeout=60,
    )
    fork_server.lent -= 1
    assert done.stdout.split() == ["0", "True"], done.stderr
    assert fork_server_client.fork_server() is fork_server
    assert fork_server.is_alive()


OUTLIVES = """
import os, sys
from paceline.engines.local import fork_server_client, rank_call
from paceline.engines.local.worker_handle import WorkerProcess
from tests.engines.local.test_worker_handle import is_waiting, order, wait_for_a_signal
packed, _ = rank_call.pack(wait_for_a_signal, (), {})
workers = [WorkerProcess.start(order(outlives_parent=lives), packed) for lives in (True, False)]
for worker in workers:
    assert is_waiting(worker)
print(fork_server_client.fork_server().pid, *(worker.pid for worker in workers), flush=True)
os.kill(os.getpid(), 9)
"""


def test_who_is_to_outlive_its_parent_does_and_the_server_ends_after_it():
    process = subprocess.Popen(
        [sys.executable, "-c", OUTLIVES],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        fork_server, outliving, bound = [int(pid) for pid in process.stdout.readline().split()]
    process.wait()
    with watch([bound]) as watched:
        assert all_gone(watched, 10.0)
    with watch([fork_server, outliving]) as watched:
        assert len(watched) == 2
        assert not all_gone(watched, 0.3)
        os.kill(outliving, signal.SIGUSR2)
        assert all_gone(watched, 10.0)


def wait_for_ever(task: RankTask) -> None:
    signal.pause()


def test_a_rank_that_is_killed_before_it_is_forked_is_killed_then():
    with started(wait_for_ever) as worker:
        assert worker.pid == 0
        worker.kill()
        assert hear(worker, lambda: worker.status is not None)
        assert worker.status == -signal.SIGKILL
