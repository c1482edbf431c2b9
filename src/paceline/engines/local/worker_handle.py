"""One rank that its parent watches while it lives, among many others and without ever blocking.

`launch` is for ranks that start and end together; others come and go. The socket to the rank
can be handed to another process (`descriptors`) and taken up there (`WorkerProcess.adopt`): the rank notices
nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from typing import Self, final

from paceline.core import fd_messages
from paceline.core.errors import PacelineError
from paceline.core.sandbox_fallbacks import open_process
from paceline.engines.local import (
    engine_messages,
    fork_server_client,
    forked_rank,
    linux,
    memfd_pickle,
    stack_display,
)
from paceline.engines.local.engine_messages import EngineMessage, LaunchOrder


@final
class WorkerProcess:
    """A rank as its parent sees it.

    pid       0 until it was forked
    status    how it ended: an exit code, or a signal's number negated; None: it runs, or its status is lost
    returned  file of its result; failed: files of its report and, where it can travel, its exception
    refusal   why it was not started
    done      no further message will come

    `reported_at` and `ended_at` are when it returned or failed, and when its end was noticed.
    """

    def __init__(self, sock: socket.socket, server: fork_server_client.ForkServer | None = None) -> None:
        self._socket = sock
        self._server = server
        self._socket.setblocking(False)
        self._descriptor = sock.fileno()
        self._watch = -1
        self._stack_file = -1
        self._stack_seen = 0
        self._kill_requested = False
        self.pid = 0
        self.status: int | None = None
        self.returned: tuple[int, ...] = ()
        self.failed: tuple[int, ...] = ()
        self.refusal: PacelineError | None = None
        self.reported_at = self.ended_at = 0.0
        self.done = False

    @classmethod
    def start(cls, order: LaunchOrder, call: int, files: Sequence[int] = ()) -> Self:
        """Ask this process's fork server for one rank; returns at once."""

        def request(server: fork_server_client.ForkServer) -> Self:
            ours, theirs = fd_messages.pair()
            with theirs:
                try:
                    server.start_ranks(order, call, [theirs], files)
                except BaseException:
                    ours.close()
                    raise
            return cls(ours, server)

        return fork_server_client.on_server(request)

    @classmethod
    def adopt(cls, pid: int, files: Sequence[int]) -> Self:
        """Return the handle of an adopted rank. `files`: what `descriptors` gave, the socket and, where there
        was one, the stack file. A pid of 0: it was not forked yet, as far as was known."""
        worker = cls(socket.socket(fileno=files[0]))
        if len(files) > 1:
            worker._stack_file = files[1]
        if pid:
            worker.set_pid(pid)
        return worker

    def set_pid(self, pid: int) -> None:
        """Record the pid of the forked rank; later calls change nothing."""
        if self.pid:
            return
        self.pid = pid
        # Signals go by this descriptor from now on: a number may be given to another process, it cannot.
        with contextlib.suppress(ProcessLookupError):
            self._watch = open_process(pid)
        # A kill that came before the fork: the server forks on request only, and cannot take it back.
        if self._kill_requested:
            self.signal(signal.SIGKILL)

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors, still ours, with which another process can adopt this rank."""
        return (self._descriptor, self._stack_file) if self._stack_file >= 0 else (self._descriptor,)

    def fileno(self) -> int:
        return self._descriptor

    def receive(self) -> None:
        """Handle the messages that have arrived."""
        while not self.done:
            try:
                message = engine_messages.receive(self._socket)
            except BlockingIOError:
                return
            except ConnectionError:
                message = None
            if message is None:
                # Server and rank are gone, and all that the rank had forked.
                self.done = True
                self.kill()
            else:
                self._handle(message)

    @property
    def watch(self) -> int:
        """A descriptor that is readable once the process has ended; -1: it was not forked yet."""
        return self._watch

    @property
    def is_ready(self) -> bool:
        """Return whether the rank itself runs, or has run."""
        return self._stack_file >= 0 or self.status is not None

    @property
    def has_failed(self) -> bool:
        """Return whether the rank raised, or ended in another way than one that has returned."""
        return bool(self.failed) or (self.status is not None and (not self.returned or self.status != 0))

    def kill_orphans(self) -> None:
        """Kill what the process left behind, where its server, which would have done so, is gone too."""
        if self.pid and self.has_ended:
            linux.kill_orphans_of(self.pid)

    @property
    def has_ended(self) -> bool:
        """Return whether the process is gone, also where its status is lost."""
        if self.status is not None or self._watch < 0:
            # One that could not even be opened was gone before it was adopted.
            return self.status is not None or self.done or self.pid > 0
        return fork_server_client.has_ended(self._watch, 0.0)

    def kill(self) -> None:
        """End the process now, or as soon as it is forked. The server takes all that it started along."""
        self._kill_requested = True
        # Not by way of the server, which may be busy importing something for others.
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal, if the process is still there."""
        if self._watch >= 0 and self.status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._watch, number)

    def request_stack(self) -> None:
        """Have the rank write its stack; `frames` reads it a moment later."""
        if self._stack_file >= 0:
            self._stack_seen = os.fstat(self._stack_file).st_size
            self.signal(forked_rank.STACK_SIGNAL)

    def stack_size(self) -> int:
        """Return bytes written since `request_stack`: a stack that no longer grows is complete."""
        return os.fstat(self._stack_file).st_size - self._stack_seen if self._stack_file >= 0 else 0

    def frames(self) -> list[str]:
        """Return what was written since `request_stack` (or by a crash), innermost frame first."""
        size = self.stack_size()
        if not size:
            return []
        text = os.pread(self._stack_file, size, self._stack_seen)
        return stack_display.frames(text.decode(errors="replace"))

    def close(self) -> None:
        """Give back every descriptor. The rank, if it still runs, is not touched."""
        self.done = True
        self._socket.close()
        files = [self._watch, self._stack_file, *self.returned, *self.failed]
        self._watch = self._stack_file = -1
        self.returned = self.failed = ()
        fd_messages.close_all([file for file in files if file >= 0])

    def release(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the files of its result and of its failure, which belong to the caller from now on."""
        files = self.returned, self.failed
        self.returned = self.failed = ()
        return files

    def _handle(self, message: EngineMessage) -> None:
        match message.kind:
            case engine_messages.STARTED:
                self.set_pid(message.pid)
            case engine_messages.READY:
                (self._stack_file,) = message.descriptors
            case engine_messages.EXITED:
                self.status, self.ended_at = message.status, message.when
            case engine_messages.RETURNED if not self.returned:
                self.returned, self.reported_at = message.descriptors, message.when
            case engine_messages.FAILED if not self.failed:
                self.failed, self.reported_at = message.descriptors, message.when
            case engine_messages.REFUSED:
                self.refusal = memfd_pickle.load(message.descriptors[0])
                fd_messages.close_all(message.descriptors)
                if self._server is not None and self.refusal and self.refusal.facts.get("spoils_server"):
                    # It finishes what it runs; the next launch starts another.
                    self._server.retired = True
            case engine_messages.DONE:
                self.done = True
            case _:
                fd_messages.close_all(message.descriptors)
