"""This process's fork server: started on first use, replaced when it died, shut down at exit.

A server belongs to the process that started it. A process that the user forks off forgets its parent's
server and starts its own. Starts no threads, installs no signal handlers. Must not know what is launched.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import final

from paceline.core.errors import ResourceError, UnavailableError
from paceline.core.system_calls import open_process
from paceline.engines.local import protocol, threads

_END_SECONDS = 5.0
_BOOT = (
    "import sys; control, parent, *sys.path[:] = sys.argv[1:]; sys.argv[1:] = []; "
    "from paceline.engines.local.server import main; main(int(control), int(parent))"
)


@final
@dataclass
class Server:
    """A running fork server; `watch` is readable once it has ended. A retired one takes no more requests."""

    pid: int
    control: socket.socket
    watch: int
    process: subprocess.Popen[bytes] | None = None
    retired: bool = False
    lent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_alive(self) -> bool:
        if self.process is not None:
            return self.process.poll() is None
        return self.watch >= 0 and not _has_ended(self.watch, 0.0)

    def how_it_ended(self) -> str:
        """In words; waits for the end."""
        if self.process is None:
            _has_ended(self.watch, _END_SECONDS)
            return "ended"
        code = self.process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"

    def lend(self) -> tuple[int, int]:
        """Control socket and watch for another process, which makes a Server of them with `borrow`. Until
        `lent` is lowered again, this process's end does not end the server."""
        with self.lock:
            self._check_open()
            self.lent += 1
            return self.control.fileno(), self.watch

    def request(self, message: protocol.Message) -> None:
        """Send one request; ConnectionError when the server is gone."""
        with self.lock:
            self._check_open()
            protocol.send(self.control, message)

    def duplicate_watch(self) -> int:
        """A descriptor like `watch` that outlives a shutdown by another thread."""
        with self.lock:
            self._check_open()
            return os.dup(self.watch)

    def end(self) -> None:
        """Close the server and wait until it and its ranks are gone."""
        with self.lock:
            self.control.close()
        if self.process is not None and not self.lent:
            try:
                self.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        elif self.process is not None:
            # Its ranks are somebody else's too; it ends after them, and nobody is left to wait for it.
            self.process.returncode = 0
        with self.lock:
            self._release()

    def forget(self) -> None:
        """In a forked copy of the owner: let go without touching the server."""
        self.control.close()
        if self.process is not None:
            # Not our child, so there is nothing to wait for, and Popen should not complain about that.
            self.process.returncode = 0
        self._release()

    def _check_open(self) -> None:
        if self.control.fileno() < 0:
            raise ConnectionResetError("the fork server was shut down")

    def _release(self) -> None:
        if self.watch >= 0:
            os.close(self.watch)
            self.watch = -1


class _Holder:
    """The one server of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.server: Server | None = None
        self.retired: list[Server] = []
        self.hooked = False


_holder = _Holder()


def server() -> Server:
    """The running server of this process, started if there is none."""
    with _holder.lock:
        held = _holder.server
        if held is not None and held.is_alive() and not held.retired:
            return held
        if held is not None:
            _holder.server = None
            _holder.retired.append(held)
        for old in [old for old in _holder.retired if not old.is_alive()]:
            _holder.retired.remove(old)
            old.end()
        if not _holder.hooked:
            _holder.hooked = True
            atexit.register(shutdown)
            os.register_at_fork(after_in_child=_after_fork)
        _holder.server = _start()
        return _holder.server


def borrow(pid: int, control: int, watch: int) -> None:
    """Take the server of another process, given its descriptors, as the server of this process."""
    with _holder.lock:
        _holder.server = Server(pid, socket.socket(fileno=control), watch)


def shutdown() -> None:
    """Stop this process's fork server and every rank it still runs; the next launch starts a new one."""
    with _holder.lock:
        held = [*_holder.retired, *([_holder.server] if _holder.server else [])]
        _holder.server, _holder.retired = None, []
        for server in held:
            server.end()


def _after_fork() -> None:
    held = [*_holder.retired, *([_holder.server] if _holder.server else [])]
    # The lock may have been held by a thread that does not exist in this copy.
    _holder.lock, _holder.server, _holder.retired = threading.Lock(), None, []
    for server in held:
        server.forget()


def _start() -> Server:
    if not sys.executable:
        raise UnavailableError(
            "this Python does not know its own executable, so no fork server can be started",
            remedy="set sys.executable to the path of a Python with Paceline installed",
        )
    os.close(open_process(os.getpid()))  # refused now, where that is not allowed, and not in the server
    ours, theirs = protocol.pair()
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    arguments = [str(theirs.fileno()), str(os.getpid()), *import_paths()]
    try:
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", _BOOT, *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if _is_open(2) else subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **threads.SINGLE_THREADED},
        )
    except OSError as error:
        ours.close()
        raise ResourceError(
            f"the fork server could not be started with {sys.executable}: {error.strerror}",
            remedy="check the interpreter, free memory, or raise the limit on processes (`ulimit -u`)",
        ) from error
    finally:
        theirs.close()
    return Server(process.pid, ours, open_process(process.pid), process)


def import_paths() -> list[str]:
    # Text only: other kinds of entry in sys.path cannot be handed over and are not used by Python's own
    # importers.
    return [entry for entry in sys.path if isinstance(entry, str)]


def _has_ended(watch: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _is_open(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return True
    return False
