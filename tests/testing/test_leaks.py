"""The leak check finds each kind of leak, and nothing else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from tests.waiting import wait_for

from paceline.testing import leaks


def orphan(command: str = "sleep 100", env: Mapping[str, str] = os.environ) -> int:
    """The number of a process whose parent is gone; perhaps it is still about to run its program."""
    script = f"{command} </dev/null >/dev/null 2>&1 & echo $!"
    return int(subprocess.run(["bash", "-c", script], env=env, capture_output=True, check=True).stdout)


def test_nothing_is_reported_when_everything_was_closed():
    before = leaks.snapshot()
    with socket.socket():
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
    assert leaks.since(before) == []


def test_a_thread_a_socket_and_a_child_are_named():
    before = leaks.snapshot()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="straggler")
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with socket.socket() as sock:
        left = leaks.since(before, patience=0.0)
        assert f"file descriptor {sock.fileno()}: socket:" in "\n".join(left)
    assert "thread 'straggler'" in left
    assert any(line.startswith(f"process {child.pid}: ") for line in left)
    done.set()
    thread.join()
    child.communicate(b"\n")


def test_an_orphan_is_found_by_its_token():
    before = leaks.snapshot()
    pid = orphan()
    try:
        assert [line.split(":")[0] for line in leaks.since(before, patience=0.0)] == [f"process {pid}"]
    finally:
        os.kill(pid, signal.SIGKILL)


SLOW_START = """
import os, resource
# Half a million words: the kernel has to count them all before the new program has an environment.
words = ["sleep", "100", *["0"] * 500_000]
resource.setrlimit(resource.RLIMIT_STACK, (64 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
pid = os.fork()
if pid == 0:
    os.closerange(0, 3)
    os.execvp("sleep", words)
print(pid)
"""


def test_an_orphan_is_found_also_while_it_is_being_started():
    before = leaks.snapshot()
    pid = int(subprocess.run([sys.executable, "-c", SLOW_START], stdout=subprocess.PIPE, check=True).stdout)
    try:
        wait_for(
            lambda: b"python" not in Path(f"/proc/{pid}/cmdline").read_bytes(), "the fork is still there"
        )
        assert pid in {process.pid for process in leaks.snapshot().processes - before.processes}
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_process_without_an_environment_is_a_stranger_at_once():
    before = leaks.snapshot()
    pid = orphan("env -i sleep 100")
    wait_for(lambda: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep"), "sleep runs")
    began = time.monotonic()
    try:
        assert leaks.since(before, patience=0.0) == []
        assert time.monotonic() - began < 4.0
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_file_in_shared_memory_is_found():
    before = leaks.snapshot()
    path = Path("/dev/shm") / f"paceline-test-{uuid.uuid4().hex}"
    path.write_bytes(b"x")
    try:
        assert leaks.since(before, patience=0.0) == [f"shared memory {path}"]
    finally:
        path.unlink()


def test_what_a_stranger_holds_in_shared_memory_is_not_ours():
    # A child without our token whose parent is gone is as good as another program's process.
    before = leaks.snapshot()
    path = Path("/dev/shm") / f"paceline-test-{uuid.uuid4().hex}"
    clean = {name: value for name, value in os.environ.items() if name != leaks.TOKEN}
    pid = orphan(f"exec 3>{path}; sleep 100", clean)
    try:
        assert leaks.since(before, patience=0.0) == []
    finally:
        os.kill(pid, signal.SIGKILL)
        path.unlink()


def test_what_may_be_kept_is_kept():
    before = leaks.snapshot()
    with socket.socket() as sock:
        assert leaks.since(before, kept=leaks.Allowed(descriptors=frozenset({sock.fileno()}))) == []


def test_data_files_of_libraries_may_stay_open_in_an_environment_that_is_a_link(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "link"))
    before = leaks.snapshot()
    with open(tmp_path / "link" / "a.ttf", "w"), open(tmp_path / "of a run", "w"):
        (left,) = leaks.since(before, patience=0.0)
    assert left.endswith("of a run")
