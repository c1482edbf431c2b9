"""Who is at work in a folder: the lock that the kernel gives back, and the request to leave."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.waiting import wait_for

from paceline.control import liveness_lock

AT_WORK = """
import sys, pathlib
from paceline.control import liveness_lock
with liveness_lock.held(pathlib.Path(sys.argv[1])):
    print("there", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def process_at_work(folder: Path, program: str = AT_WORK) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def no_wait(pids: list[int]) -> None:
    raise AssertionError(f"waited for {pids}")


def test_no_process_is_waited_for_where_none_is(tmp_path):
    assert not liveness_lock.was_ever_held(tmp_path)
    assert liveness_lock.wait_until_free(tmp_path, 60, no_wait) is None
    with liveness_lock.held(tmp_path):
        assert liveness_lock.was_ever_held(tmp_path)
    assert liveness_lock.wait_until_free(tmp_path, 60, no_wait) is None


def test_who_is_killed_is_not_there_any_more(tmp_path):
    with process_at_work(tmp_path) as process:
        process.kill()
        process.wait()
        assert liveness_lock.wait_until_free(tmp_path, 60, no_wait) is None


def test_all_that_are_there_are_asked_and_waited_for(tmp_path):
    with process_at_work(tmp_path) as one, process_at_work(tmp_path) as other:
        waited: list[list[int]] = []
        answer: list[list[int] | None] = []
        waits = threading.Thread(
            target=lambda: answer.append(liveness_lock.wait_until_free(tmp_path, 60, waited.append))
        )
        waits.start()
        wait_for(lambda: liveness_lock.is_leave_requested(tmp_path))
        one.kill()
        other.kill()
        waits.join(60)
        assert waited == [sorted([one.pid, other.pid])]
    assert answer == [None]
    assert not liveness_lock.is_leave_requested(tmp_path)


def test_who_does_not_leave_is_named(tmp_path):
    with process_at_work(tmp_path) as process:
        assert liveness_lock.wait_until_free(tmp_path, 0.0, no_wait) == [process.pid]
    assert not liveness_lock.is_leave_requested(tmp_path)


def test_a_request_that_a_killed_start_left_counts_no_longer(tmp_path):
    (tmp_path / liveness_lock.LEAVE_FILE).touch()
    with liveness_lock.held(tmp_path):
        pass
    assert liveness_lock.wait_until_free(tmp_path, 60, no_wait) is None
    assert not liveness_lock.is_leave_requested(tmp_path)


FORKS = """
import os, sys, pathlib
from paceline.control import liveness_lock
with liveness_lock.held(pathlib.Path(sys.argv[1])):
    if os.fork() == 0:
        print("there", flush=True)
        sys.stdin.read()
        os._exit(0)
    sys.stdin.read()
"""


def test_a_forked_child_does_not_keep_the_place_of_a_parent_that_was_killed(tmp_path):
    with process_at_work(tmp_path, FORKS) as process:
        process.kill()
        process.wait()
        assert liveness_lock.wait_until_free(tmp_path, 60, no_wait) is None
        # The child ends with its standard input, below.


def test_a_place_that_was_sent_holds_until_the_receiver_closes_it(tmp_path):
    place = liveness_lock.acquire(tmp_path)
    assert place is not None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"."], [place])
        os.close(place)
        assert liveness_lock.wait_until_free(tmp_path, 0.0, no_wait) is not None  # it is on its way
        _, (received,), _, _ = socket.recv_fds(theirs, 1, 1)
        assert liveness_lock.wait_until_free(tmp_path, 0.0, no_wait) is not None
        os.close(received)
    assert liveness_lock.wait_until_free(tmp_path, 60, no_wait) is None


def test_a_folder_that_cannot_be_locked_is_worked_in_all_the_same(tmp_path):
    with liveness_lock.held(tmp_path / "nowhere"):
        assert liveness_lock.wait_until_free(tmp_path / "nowhere", 60, no_wait) is None
