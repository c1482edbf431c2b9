"""Things that run out: each limit is really reached in a child process, and the error names it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from paceline.core import limit_errors
from paceline.core.errors import PlatformError, ResourceError

PROGRAM = """
import errno, mmap, os, resource, signal, socket, sys, threading
from paceline.core import limit_errors
from paceline.core.errors import ResourceError

def run():
{body}

try:
    run()
except OSError as error:
    explained = limit_errors.explain_os_error(error, "no room for worker 3")
    assert isinstance(explained, ResourceError), explained
    print(explained)
else:
    sys.exit("nothing ran out")
"""


def ran_out(body: str, *before: str) -> str:
    """What the child said after its limit was reached."""
    program = PROGRAM.replace("{body}", textwrap.indent(textwrap.dedent(body), "    "))
    done = subprocess.run(
        [*before, sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_too_many_open_files():
    said = ran_out(
        """
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 40))
        held = [os.pipe() for _ in range(30)]
        """
    )
    assert "no room for worker 3: too many open files in this process (limit 20, at most 40)" in said
    assert "`ulimit -n 40`" in said


def test_too_many_open_files_at_the_hard_limit():
    said = ran_out(
        """
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
        held = [os.pipe() for _ in range(30)]
        """
    )
    assert "(limit 20, at most 20)" in said
    assert "as root" in said


def test_too_many_open_files_on_the_machine():
    error = limit_errors.explain_os_error(OSError(errno.ENFILE, os.strerror(errno.ENFILE)), "no pipe")
    assert isinstance(error, ResourceError)
    assert "fs.file-max=" in error.message
    assert "sysctl fs.file-max" in error.remedy


def test_a_port_that_is_taken():
    said = ran_out(
        """
        first, second = socket.socket(), socket.socket()
        first.bind(("127.0.0.1", 0))
        second.bind(first.getsockname())
        """
    )
    assert "Address already in use" in said
    assert "ss -tlnp" in said


def test_an_address_of_another_machine():
    said = ran_out('socket.socket().bind(("192.0.2.1", 0))')
    assert "the address is not of this machine" in said
    assert "ip addr" in said


def in_namespaces(kind: str) -> list[str]:
    """What to put before a command so that it has a network or mounts of its own; skips where that is not
    allowed."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    unshare = ["unshare", *(() if os.geteuid() == 0 else ("--map-root-user",)), kind]
    probe = subprocess.run([*unshare, "true"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no namespaces here: {probe.stderr.strip()}")
    return unshare


def test_no_port_is_left():
    said = ran_out(
        """
        with open("/proc/sys/net/ipv4/ip_local_port_range", "w") as file:
            file.write("40000 40003")
        held = []
        for _ in range(9):
            held.append(socket.socket())
            held[-1].bind(("0.0.0.0", 0))
        """,
        *in_namespaces("--net"),
    )
    assert "ip_local_port_range=40000-40003" in said
    assert 'sysctl net.ipv4.ip_local_port_range="1024 65535"' in said


def test_no_address_space():
    said = ran_out(
        """
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        mmap.mmap(-1, 2 << 30)
        """
    )
    assert "this process may use 1.0 GiB of address space" in said
    assert "ulimit -v unlimited" in said


def test_shared_memory_beyond_what_files_may_have():
    said = ran_out(
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        os.ftruncate(os.memfd_create("x"), 2 << 20)
        """
    )
    assert "may have 1.0 MiB" in said
    assert "ulimit -f unlimited" in said


def test_shared_memory_that_is_full(tmp_path):
    """A small file system in memory of its own: filling the real one would disturb all other tests."""
    said = ran_out(
        f"""
        import subprocess
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", {str(tmp_path)!r}], check=True)
        with open({str(tmp_path / "file")!r}, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 2 << 20)
        """,
        *in_namespaces("--mount"),
    )
    assert "No space left on device" in said
    assert "memory left" in said
    assert "/dev/shm" in said
    assert "fewer workers" in said


def test_no_more_processes():
    # The limit is one of ordinary users, and counts all that one has.
    become = "os.setresuid(65533, 65533, 65533)" if os.geteuid() == 0 else ""
    said = ran_out(
        f"""
        {become}
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        """
    )
    assert "no more processes or threads (`ulimit -u` 1" in said
    assert "fewer workers" in said


def test_other_errors_stay_what_they_are():
    error = limit_errors.explain_os_error(OSError(errno.EACCES, "Permission denied"), "no file")
    assert type(error) is PlatformError
    assert error.message == "no file: Permission denied"
