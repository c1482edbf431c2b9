"""The leak check finds each kind of leak, and nothing else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path

from paceline.testing import leaks


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
    script = "sleep 100 </dev/null >/dev/null 2>&1 & echo $!"
    orphan = int(subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout)
    try:
        assert [line.split(":")[0] for line in leaks.since(before, patience=0.0)] == [f"process {orphan}"]
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_file_in_shared_memory_is_found():
    before = leaks.snapshot()
    path = Path("/dev/shm") / f"paceline-test-{uuid.uuid4().hex}"
    path.write_bytes(b"x")
    try:
        assert leaks.since(before, patience=0.0) == [f"shared memory {path}"]
    finally:
        path.unlink()


def test_what_a_stranger_holds_in_shared_memory_is_not_ours():
    # A child without our token whose parent is gone is as good as somebody else's process.
    before = leaks.snapshot()
    path = Path("/dev/shm") / f"paceline-test-{uuid.uuid4().hex}"
    script = f"exec 3>{path}; sleep 100 </dev/null >/dev/null 2>&1 & echo $!"
    clean = {name: value for name, value in os.environ.items() if name != leaks.TOKEN}
    pid = int(subprocess.run(["bash", "-c", script], env=clean, capture_output=True, check=True).stdout)
    try:
        assert leaks.since(before, patience=0.0) == []
    finally:
        os.kill(pid, signal.SIGKILL)
        path.unlink()


def test_what_may_be_kept_is_kept():
    before = leaks.snapshot()
    with socket.socket() as sock:
        assert leaks.since(before, kept=leaks.Kept(descriptors=frozenset({sock.fileno()}))) == []
