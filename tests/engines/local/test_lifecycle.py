"""The server and its ranks over time: no process is left behind, nothing piles up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.engines.local.plain_entry import launch, pid_of, rank_of
from tests.engines.local.processes import all_gone, watch
from tests.waiting import wait_for

from paceline.core.errors import PeerLostError, RankFailedError
from paceline.engines.local import fork_server_client, shutdown
from paceline.engines.local.forked_rank import RankTask
from paceline.testing import leaks

FOREVER = 3600
# Standard streams, control socket, the parent's descriptor, both ends of the wake-up pipe.
IDLE_FILES = 7


def test_one_server_serves_many_launches():
    servers = {parent for _ in range(3) for _, parent in launch(pid_of)}
    assert servers == {fork_server_client.fork_server().pid}


def test_shutdown_ends_the_server_and_the_next_launch_starts_another():
    launch(rank_of)
    first = fork_server_client.fork_server().pid
    with watch([first]) as gone:
        shutdown()
        assert all_gone(gone, 0)
    shutdown()
    assert {parent for _, parent in launch(pid_of)} == {fork_server_client.fork_server().pid}
    assert fork_server_client.fork_server().pid != first


INTERRUPTED_AT_EXIT = """
import atexit, os, signal
from paceline.engines.local import fork_server_client
server = fork_server_client.fork_server().pid
os.kill(server, signal.SIGSTOP)  # it cannot end now
print(server, flush=True)
signal.signal(signal.SIGALRM, signal.default_int_handler)
atexit.register(signal.setitimer, signal.ITIMER_REAL, 0.2)  # before the server is waited for
"""


def test_an_interrupt_while_the_process_ends_is_silent_and_the_server_ends_too():
    command = [sys.executable, "-c", INTERRUPTED_AT_EXIT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        try:
            code = process.wait(60)
        finally:
            os.kill(server, signal.SIGCONT)
        _, said = process.communicate(timeout=60)  # the server has its output, too: it is gone
    assert (code, said) == (0, "")


def wait_until_idle(fork_server: int) -> None:
    """The server closes a group's socket just after it has said that the group is done."""
    wait_for(
        lambda: _open_files(fork_server) == IDLE_FILES, "the fork server keeps files of a group", seconds=5
    )


def test_thirty_quick_launches_leave_nothing():
    launch(rank_of)
    fork_server = fork_server_client.fork_server().pid
    wait_until_idle(fork_server)
    before = leaks.snapshot()
    for _ in range(30):
        assert launch(rank_of, workers=3) == [0, 1, 2]
    assert leaks.since(before) == []
    wait_until_idle(fork_server)
    assert fork_server_client.fork_server().pid == fork_server


def test_failures_and_timeouts_leave_nothing():
    launch(rank_of)
    fork_server = fork_server_client.fork_server().pid
    wait_until_idle(fork_server)
    before = leaks.snapshot()
    for kind in ("raise", "die") * 4:
        with contextlib.suppress(RankFailedError, PeerLostError):
            launch(_end_badly, kind, workers=2, grace=0.02)
    assert leaks.since(before) == []
    wait_until_idle(fork_server)


def _end_badly(task: RankTask, kind: str) -> None:
    if task.rank == 0:
        if kind == "die":
            os._exit(1)
        raise ValueError(kind)
    time.sleep(FOREVER)


def _open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_a_killed_server_is_an_error_and_the_next_launch_works(tmp_path):
    launch(rank_of)
    fork_server = fork_server_client.fork_server().pid
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(launch, _announce_with_child, str(gate), workers=2)
        pids = _read_pids(gate, ranks=2)
        with watch(pids) as gone:
            os.kill(fork_server, signal.SIGKILL)
            with pytest.raises(
                PeerLostError, match=rf"the fork server \(pid {fork_server}\) was killed by signal 9"
            ) as caught:
                future.result(20)
            assert all_gone(gone, 5)
    assert caught.value.ranks == (0, 1)
    assert launch(rank_of) == [0, 1]


def test_a_server_that_died_between_launches_is_replaced():
    launch(rank_of)
    with watch([fork_server_client.fork_server().pid]) as gone:
        os.kill(fork_server_client.fork_server().pid, signal.SIGKILL)
        assert all_gone(gone, 5)
    assert launch(rank_of) == [0, 1]


def test_shutdown_from_another_thread_ends_running_ranks(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(launch, _announce_with_child, str(gate), workers=1)
        pids = _read_pids(gate, ranks=1)
        with watch(pids) as gone:
            shutdown()
            assert all_gone(gone, 5)
        with pytest.raises(PeerLostError, match="fork server"):
            future.result(20)


def _announce_with_child(task: RankTask, gate: str) -> None:
    """Start subprocesses, one in this rank's group and one that left it, tell all pids, and hang."""
    command = [sys.executable, "-c", "import time; time.sleep(3600)"]
    children = [subprocess.Popen(command).pid]
    with open(gate, "w") as file:
        print(os.getpid(), *children, file=file)
    time.sleep(FOREVER)


def _read_pids(gate: Any, ranks: int) -> list[int]:
    pids: list[int] = []
    while len(pids) < 2 * ranks:
        with open(gate) as file:
            pids += map(int, file.read().split())
    return pids


@pytest.mark.parametrize("how", ["return", "raise", "kill"])
def test_subprocesses_of_ranks_end_with_them(how):
    pids: list[int] = []
    read, write = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, read)
        # Ranks write to the pipe through their standard output.
        saved = os.dup(1)
        os.dup2(write, 1)
        try:
            with contextlib.suppress(RankFailedError, PeerLostError):
                launch(_start_subprocesses, how, workers=2)
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            os.close(write)
        with os.fdopen(os.dup(read)) as file:
            pids = [int(word) for word in file.read().split()]
        assert len(pids) == 6
        with watch(pids) as gone:
            assert all_gone(gone, 5)


def _start_subprocesses(task: RankTask, how: str) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(3600)"]
    quiet: Any = {"stdout": subprocess.DEVNULL}
    in_group = subprocess.Popen(command, **quiet)
    own_session = subprocess.Popen(command, start_new_session=True, **quiet)
    # A daemon: its parent ends at once.
    script = (
        f"import subprocess, sys; print(subprocess.Popen({command}, start_new_session=True, stdout=-3).pid)"
    )
    daemon = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout
    print(in_group.pid, own_session.pid, int(daemon))
    if how == "raise":
        raise ValueError
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def test_launches_from_several_threads_at_once(tmp_path):
    names = [str(tmp_path / name) for name in ("a", "b")]
    for name in names:
        os.mkfifo(name)
    with ThreadPoolExecutor(2) as pool:
        # Each group waits for a rank of the other, so they only finish if they run side by side.
        first = pool.submit(launch, _meet, *names)
        second = pool.submit(launch, _meet, *reversed(names))
        assert first.result(30) == [0, 1]
        assert second.result(30) == [0, 1]


def _meet(task: RankTask, mine: str, other: str) -> int:
    if task.rank == 0:
        first, second = sorted((mine, other))
        for name in (first, second):
            with open(name, "w" if name == mine else "r"):
                pass
    return task.rank


def test_a_failure_in_one_group_does_not_touch_another(tmp_path):
    gates = [str(tmp_path / name) for name in "ab"]
    for gate in gates:
        os.mkfifo(gate)
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(launch, _wait_at, gates, workers=2)
        with pytest.raises(PeerLostError):
            launch(_end_badly, "die", workers=2, grace=0.02)
        for gate in gates:
            with open(gate, "w"):
                pass
        assert patient.result(30) == [0, 1]


def _wait_at(task: RankTask, gates: list[str]) -> int:
    with open(gates[task.rank]) as file:
        file.read()
    return task.rank


def test_a_process_that_the_user_forks_starts_its_own_server():
    launch(rank_of)
    mine = fork_server_client.fork_server().pid
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            parents = {parent for _, parent in launch(pid_of)}
            shutdown()
            code = 0 if parents and mine not in parents else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert {parent for _, parent in launch(pid_of)} == {mine}


def test_ranks_can_launch_ranks():
    assert launch(_nested, workers=2) == [[0, 1], [0, 1]]


def _nested(task: RankTask) -> list[Any]:
    return launch(rank_of, workers=2)


def test_a_second_interrupt_waits_until_no_rank_is_left(monkeypatch):
    """Ctrl-C while the first one is still being dealt with: the ranks are gone before it takes effect."""
    from paceline.engines.local.launch import RankGroup

    launch(rank_of)
    listen, interrupts = RankGroup.listen, iter([True, True, True])

    def interrupted(self: RankGroup, seconds: float) -> None:
        if self.all_ready and next(interrupts, False):
            raise KeyboardInterrupt
        listen(self, seconds)

    monkeypatch.setattr(RankGroup, "listen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(time_away, workers=2)
    assert _children_of(fork_server_client.fork_server().pid) == []


def time_away(task: RankTask) -> None:
    time.sleep(FOREVER)


def _children_of(pid: int) -> Sequence[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def test_launching_needs_no_threads_and_no_signal_handlers():
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    count = threading.active_count()
    launch(rank_of)
    assert threading.active_count() == count
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == handlers
