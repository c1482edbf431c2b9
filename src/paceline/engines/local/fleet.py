"""The ranks of a fork server: forks them, reaps them, kills them and all that they started.

Each rank leads a session of its own, so a rank's subprocesses go with it. What left that session is adopted
by the server (a subreaper) and killed once no rank is left. Must not know why ranks are started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from paceline.core.errors import PacelineError, ResourceError
from paceline.engines.local import child, payload, protocol, system
from paceline.engines.local.protocol import Message, Order


@final
@dataclass
class _Group:
    job: socket.socket
    living: dict[int, int] = field(default_factory=dict)  # pid -> rank
    outlives: bool = False


@final
class Fleet:
    """All groups of ranks that are alive. `private` descriptors are the server's own and closed in ranks."""

    def __init__(self, private: Sequence[int]) -> None:
        self._private = tuple(private)
        self._groups: dict[int, _Group] = {}
        # Of groups that outlive their parent and lost it: nobody hears how their ranks end.
        self._orphans: set[int] = set()

    @property
    def outlives_parent(self) -> bool:
        """Whether there are ranks that may go on without the parent."""
        return bool(self._orphans) or any(group.outlives and group.living for group in self._groups.values())

    def sockets(self) -> set[int]:
        """Job sockets on which the parent may speak."""
        return set(self._groups)

    def start(self, order: Order, job: socket.socket, descriptors: Sequence[int]) -> None:
        """Fork the ranks of one group."""
        group = _Group(job, outlives=order.outlives_parent)
        self._groups[job.fileno()] = group
        server = os.getpid()
        for rank in range(order.workers):
            try:
                pid = os.fork()
            except OSError as error:
                self._kill(group)
                self._refuse(group, _no_more_processes(rank, order.workers, error))
                return
            if pid == 0:
                self._leave_server(job)
                child.run(order, rank, server, job, descriptors)
            group.living[pid] = rank
            self._tell(group, Message(protocol.STARTED, rank, pid=pid))

    def refuse(self, job: socket.socket, error: PacelineError) -> None:
        """Tell the parent why no rank of this group was started."""
        group = _Group(job)
        self._groups[job.fileno()] = group
        self._refuse(group, error)

    def listen(self, descriptor: int) -> None:
        """Hear the parent on a job socket; a closed one means that nobody wants the group any more."""
        group = self._groups.get(descriptor)
        if group is None:
            return
        try:
            message = protocol.receive(group.job)
        except ConnectionError:
            message = None
        if message is not None and message.kind == protocol.STACKS:
            for pid in group.living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, child.STACK_SIGNAL)
            return
        if message is None and group.outlives:
            self._orphans.update(group.living)
        else:
            self._kill(group)
        if message is None:
            # Nothing more can be told; reaping goes on without the socket.
            self._forget(group)

    def reap(self) -> None:
        """Collect every child that has ended, then close groups that are complete."""
        while (ended := _next_zombie()) is not None:
            # While the zombie is unreaped its id cannot be given to another group of processes.
            system.kill_family(ended)
            _, status = os.waitpid(ended, 0)
            self._orphans.discard(ended)
            for group in self._groups.values():
                rank = group.living.pop(ended, None)
                if rank is not None:
                    code = os.waitstatus_to_exitcode(status)
                    when = time.monotonic()
                    self._tell(group, Message(protocol.EXITED, rank, pid=ended, status=code, when=when))
        self._settle()

    def kill_bound(self) -> None:
        """The parent is gone: kill the ranks that do not outlive it."""
        for group in self._groups.values():
            if not group.outlives:
                self._kill(group)

    def kill_everything(self) -> None:
        """Leave nobody behind; returns when all are gone."""
        while children := system.own_children():
            for pid in children:
                system.kill_family(pid)
            for pid in children:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _refuse(self, group: _Group, error: PacelineError) -> None:
        reason = payload.dump(error)
        self._tell(group, Message(protocol.REFUSED, descriptors=(reason,)))
        os.close(reason)
        self._settle()

    def _settle(self) -> None:
        busy = bool(self._orphans) or any(group.living for group in self._groups.values())
        if not busy and (strays := system.own_children()):
            for pid in strays:
                system.kill_family(pid)
            # Their end wakes the server again.
            return
        for group in [group for group in self._groups.values() if not group.living]:
            self._tell(group, Message(protocol.DONE))
            self._forget(group)

    def _forget(self, group: _Group) -> None:
        self._groups.pop(group.job.fileno(), None)
        group.job.close()

    def _leave_server(self, job: socket.socket) -> None:
        """In a fresh child: close what belongs to the server and to other groups."""
        signal.set_wakeup_fd(-1)
        for descriptor in self._private:
            os.close(descriptor)
        for group in self._groups.values():
            if group.job is not job:
                group.job.close()

    @staticmethod
    def _kill(group: _Group) -> None:
        for pid in group.living:
            system.kill_family(pid)

    @staticmethod
    def _tell(group: _Group, message: Message) -> None:
        # A parent that is gone does not listen; the loop hears of that by itself.
        with contextlib.suppress(OSError):
            protocol.send(group.job, message)


def _no_more_processes(rank: int, workers: int, error: OSError) -> ResourceError:
    return ResourceError(
        f"the operating system refused to start rank {rank} of {workers}: {error.strerror}",
        remedy="use fewer workers, free memory, or raise the limit on processes (`ulimit -u`)",
    )


def _next_zombie() -> int | None:
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid
