"""This process's fork server: started on first use, replaced when it died, shut down at exit.

A server belongs to the process that started it. A process that the user forks off forgets its parent's server
and starts its own. Starts no threads, installs no signal handlers.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, final

from paceline.core import fd_messages
from paceline.core.errors import PeerLostError, ResourceError, UnavailableError
from paceline.core.sandbox_fallbacks import open_process
from paceline.engines.local import engine_messages, thread_counts
from paceline.engines.local.engine_messages import EngineMessage, LaunchOrder

T = TypeVar("T")

_END_SECONDS = 5.0
_BOOT = (
    "import sys; control, parent, *sys.path[:] = sys.argv[1:]; sys.argv[1:] = []; "
    "from paceline.engines.local.fork_server import main; main(int(control), int(parent))"
)


@final
@dataclass
class ForkServer:
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
        return self.watch >= 0 and not has_ended(self.watch, 0.0)

    def how_it_ended(self) -> str:
        """Wait for the fork server to exit; describe its exit status."""
        if self.process is None:
            has_ended(self.watch, _END_SECONDS)
            return "ended"
        code = self.process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"

    def lend(self) -> tuple[int, int]:
        """Return control socket and watch for another process, which makes a ForkServer of them with
        `adopt_server`. Until `lent` is lowered again, this process's end does not end the server."""
        with self.lock:
            self._check_open()
            self.lent += 1
            return self.control.fileno(), self.watch

    def start_ranks(
        self, order: LaunchOrder, call: int, jobs: Sequence[socket.socket], files: Sequence[int]
    ) -> None:
        """Request ranks, one for each job socket; they write to what is standard output and error here and
        now. ConnectionError when the server is gone."""
        own: list[int] = []
        try:
            own.append(engine_messages.write_order(order))
            own += (_duplicate(stream) for stream in (1, 2))
            everything = (own[0], call, *own[1:], *(job.fileno() for job in jobs), *files)
            with self.lock:
                self._check_open()
                engine_messages.send(
                    self.control, EngineMessage(engine_messages.START, descriptors=everything)
                )
        finally:
            fd_messages.close_all(own)

    def duplicate_watch(self) -> int:
        """Return a descriptor like `watch` that outlives a shutdown by another thread."""
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
            # Another process has its ranks too: it ends after them, and this process does not wait for that.
            self.process.returncode = 0
        with self.lock:
            self._release()

    def forget(self) -> None:
        """Release the server in a forked copy of the owner, without touching it."""
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


class _ServerHolder:
    """The servers of this process: the last one is in use, unless it is retired; earlier ones still run."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.servers: list[ForkServer] = []
        self.hooked = False


_holder = _ServerHolder()


def fork_server() -> ForkServer:
    """Return the running server of this process, started if there is none."""
    with _holder.lock:
        for ended in [server for server in _holder.servers if not server.is_alive()]:
            _holder.servers.remove(ended)
            ended.end()
        if not _holder.servers or _holder.servers[-1].retired:
            if not _holder.hooked:
                _holder.hooked = True
                atexit.register(_shutdown_at_exit)
                os.register_at_fork(after_in_child=_after_fork)
            _holder.servers.append(_start())
        return _holder.servers[-1]


def on_server(use: Callable[[ForkServer], T]) -> T:
    """Call `use` with the running server, and once more with a new one where it has ended in between."""
    for _ in range(2):
        server = fork_server()
        try:
            return use(server)
        except ConnectionError:
            server.retired = True
    raise PeerLostError(
        "the fork server ends as soon as it is started",
        remedy="its own output above says why; `python -c 'import torch'` shows if the installation is sound",
    )


def adopt_server(pid: int, control: int, watch: int) -> None:
    """Take the server of another process, given its descriptors, as the server of this process."""
    with _holder.lock:
        _holder.servers.append(ForkServer(pid, socket.socket(fileno=control), watch))


def shutdown() -> None:
    """Stop this process's fork server and every rank it still runs; the next launch starts a new one."""
    with _holder.lock:
        while _holder.servers:
            _holder.servers.pop(0).end()


def _shutdown_at_exit() -> None:
    # A second Ctrl-C: the server ends by itself once its control socket is closed; no wait for it.
    with contextlib.suppress(KeyboardInterrupt):
        shutdown()


def _after_fork() -> None:
    # The lock may have been held by a thread that does not exist in this copy.
    servers, _holder.lock, _holder.servers = _holder.servers, threading.Lock(), []
    for server in servers:
        server.forget()


def _start() -> ForkServer:
    if not sys.executable:
        raise UnavailableError(
            "this Python does not know its own executable, so no fork server can be started",
            remedy="set sys.executable to the path of a Python with Paceline installed",
        )
    os.close(open_process(os.getpid()))  # refused now, where that is not allowed, and not in the server
    ours, theirs = fd_messages.pair()
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    arguments = [str(theirs.fileno()), str(os.getpid()), *import_paths()]
    try:
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", _BOOT, *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if is_open(2) else subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **thread_counts.SINGLE_THREADED},
        )
    except OSError as error:
        ours.close()
        raise ResourceError(
            f"the fork server could not be started with {sys.executable}: {error.strerror}",
            remedy="check the interpreter, free memory, or raise the limit on processes (`ulimit -u`)",
        ) from error
    finally:
        theirs.close()
    return ForkServer(process.pid, ours, open_process(process.pid), process)


def import_paths() -> list[str]:
    # Text only: other kinds of entry in sys.path cannot be handed over and are not used by Python's own
    # importers.
    return [entry for entry in sys.path if isinstance(entry, str)]


def has_ended(watch: int, seconds: float) -> bool:
    """Return whether the process behind a descriptor of `open_process` ends within `seconds`."""
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def is_open(descriptor: int) -> bool:
    """Return whether a descriptor of this process refers to anything."""
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return True
    return False


def _duplicate(number: int) -> int:
    """Return a descriptor for what `number` refers to, or for nothing where it is closed."""
    try:
        return os.dup(number)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)
