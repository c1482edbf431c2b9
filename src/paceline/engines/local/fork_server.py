"""The fork server: a process with one thread that has imported what ranks need and forks them on request.

Started by `fork_server_client` as a child of the user's process, which may lend it to a supervisor. It ends
when that process closes the control socket or is gone, and kills everything that it started. Ranks that were
ordered to outlive their parent get an hour to end by themselves while the control socket is open in another
process, and ten minutes once it is closed; while another process holds their job sockets there is no limit.
Ranks that were ordered to outlive this server do.

Each rank leads a session, so a rank's subprocesses are killed with it. What left that session is adopted by
the server (a subreaper) and killed once no rank is left.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, final

from paceline.core import fd_messages
from paceline.core.errors import PacelineError, ResourceError, UsageError
from paceline.core.sandbox_fallbacks import open_process
from paceline.core.wording import counted
from paceline.engines.local import engine_messages, forked_rank, linux, memfd_pickle
from paceline.engines.local.engine_messages import EngineMessage, LaunchOrder

_ORPHAN_SECONDS = 3600.0  # the parent is gone, and a supervisor has the control socket
_ALONE_SECONDS = 600.0  # both are gone: ranks save and end, and those that hang never would


def main(control_descriptor: int, parent_pid: int) -> NoReturn:
    """Serve until the parent is gone."""
    code = 1
    try:
        with socket.socket(fileno=control_descriptor) as control:
            _serve(control, parent_pid)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Torch's own shutdown takes longer than everything here and has nothing to do.
        os._exit(code)


def _serve(control: socket.socket, parent_pid: int) -> None:
    # First of all: a descendant whose parent has ended becomes this process's child, not init's, and so none
    # of what ranks start can escape from `kill_everything`.
    linux.adopt_orphans()
    wake_read, wake_write = _wake_on_child_exit()
    try:
        parent = open_process(parent_pid)
    except ProcessLookupError:
        return
    # Two masters, because each can vanish alone: the process by a crash, while a supervisor holds a copy of
    # its socket; the socket by a shutdown, while the process lives on.
    fleet = ForkedRanks(private=(control.fileno(), parent, wake_read, wake_write))
    masters = {control.fileno(), parent}
    limit = float("inf")
    # With a second thread in the process no further rank can be forked; those that run may finish.
    while fleet.sockets() or fleet.outlives_parent or linux.own_thread_count() == 1:
        poll = select.poll()
        for descriptor in (*masters, wake_read, *fleet.sockets()):
            poll.register(descriptor, select.POLLIN)
        left = None if limit == float("inf") else max(0.0, limit - time.monotonic()) * 1000
        ready = {descriptor for descriptor, _ in poll.poll(left)}
        if wake_read in ready:
            # Emptied before reaping: a child that ends in between wakes the loop once more.
            os.read(wake_read, 4096)
            fleet.reap()
        for descriptor in ready & fleet.sockets():
            fleet.listen(descriptor)
        # The descriptor catches what the socket cannot: a copy of the parent's end held by a process it
        # forked.
        gone = {
            descriptor
            for descriptor in masters & ready
            if descriptor == parent or not _accept(control, fleet)
        }
        if gone:
            masters -= gone
            fleet.kill_bound()
        if len(masters) < 2:
            limit = _patience(masters, fleet, limit, first=bool(gone))
        if len(masters) < 2 and (not fleet.outlives_parent or time.monotonic() >= limit):
            break
    fleet.kill_everything()


def _patience(masters: set[int], fleet: ForkedRanks, limit: float, *, first: bool) -> float:
    """Return until when ranks may run without the parent; `first`: its process or its socket went just
    now."""
    # A limit is set when a master vanishes, and kept: ranks that come and go do not prolong it.
    if not masters and fleet.sockets():
        # The next supervisor has the job sockets, or the caller keeps them for it.
        return float("inf")
    if first or limit == float("inf"):
        return time.monotonic() + (_ORPHAN_SECONDS if masters else _ALONE_SECONDS)
    return limit


def _accept(control: socket.socket, fleet: ForkedRanks) -> bool:
    """Carry out one request; False when the parent has closed the socket."""
    request = engine_messages.receive(control)
    if request is None:
        return False
    order_file, call, stdout, stderr, *rest = request.descriptors
    order = engine_messages.read_order(order_file)
    jobs = [socket.socket(fileno=descriptor) for descriptor in rest[: order.workers]]
    own = rest[order.workers :]
    try:
        _preload(order)
        fleet.start(order, jobs, (call, stdout, stderr, *own))
    except PacelineError as error:
        fleet.refuse(jobs, error)
    finally:
        fd_messages.close_all((order_file, call, stdout, stderr, *own))
    return True


def _preload(order: LaunchOrder) -> None:
    missing = [name for name in order.preload if name not in sys.modules]
    if not missing:
        return
    here = sys.path[:]
    # "" stands for the caller's folder, which need not be the server's.
    sys.path[:] = [os.path.join(order.cwd or "/", entry) for entry in order.sys_path]
    # An import makes next to no garbage, and looking for it takes time that the first rank waits for.
    gc.disable()
    try:
        for name in missing:
            preload_module(name)
    finally:
        gc.enable()
        sys.path[:] = here
    # What is here now stays for good: ranks need not scan, copy or dismantle it. Torch has finalizers by the
    # hundred, which would cost each rank more time at its end than its start takes. The few objects that are
    # garbage stay too: a collection scans half a million others, for a quarter of a second.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.freeze()


def preload_module(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        raise UsageError(
            f"the module {name!r} could not be imported for the ranks:\n{traceback.format_exc().rstrip()}",
            remedy="import it once in a plain Python to see what is wrong, or leave it out of preload=",
        ) from error
    count = linux.own_thread_count()
    if count > 1:
        raise UsageError(
            f"importing {name!r} started {counted(count - 1, 'thread')}; a process with threads cannot fork "
            "safely",
            remedy=f"leave {name!r} out of preload= and import it inside the function",
            spoils_server=True,
        )


def _wake_on_child_exit() -> tuple[int, int]:
    # Without a handler, however empty, Python does not write to the wake-up pipe.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # The server outlives a Ctrl-C at the prompt, and a scheduler that signals every process of a job to stop
    # it; whether ranks do is their own and the parent's decision. It ends with its parent.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write)
    return read, write


@final
@dataclass
class _ForkedRank:
    job: socket.socket
    outlives: bool = False
    pid: int = 0  # 0: it has ended, or was never started


@final
class ForkedRanks:
    """All ranks that are alive. `private` descriptors are the server's own and closed in ranks."""

    def __init__(self, private: Sequence[int]) -> None:
        self._private = tuple(private)
        self._ranks: dict[int, _ForkedRank] = {}
        # Ranks that outlive their parent and lost it: no process learns how they end.
        self._orphans: set[int] = set()

    @property
    def outlives_parent(self) -> bool:
        """Return whether there are ranks that may run without the parent."""
        return bool(self._orphans) or any(rank.outlives and rank.pid for rank in self._ranks.values())

    def sockets(self) -> set[int]:
        """Return the job sockets on which the parent may send."""
        return set(self._ranks)

    def start(self, order: LaunchOrder, jobs: Sequence[socket.socket], descriptors: Sequence[int]) -> None:
        """Fork the ranks of one order, one for each job socket."""
        self._ranks |= {job.fileno(): _ForkedRank(job, order.outlives_parent) for job in jobs}
        server = os.getpid()
        for number, job in enumerate(jobs, start=order.first_rank):
            try:
                pid = os.fork()
            except OSError as error:
                # The parent kills those that were started, once it has read this.
                self.refuse(jobs[number - order.first_rank :], _no_more_processes(number, order, error))
                return
            if pid == 0:
                self._leave_server(job)
                forked_rank.run(order, number, server, job, descriptors)
            self._ranks[job.fileno()].pid = pid
            self._send(job, EngineMessage(engine_messages.STARTED, pid=pid))

    def refuse(self, jobs: Sequence[socket.socket], error: PacelineError) -> None:
        """Report to the parent why these ranks were not started."""
        reason = memfd_pickle.dump(error)
        for job in jobs:
            self._ranks[job.fileno()] = _ForkedRank(job)
            self._send(job, EngineMessage(engine_messages.REFUSED, descriptors=(reason,)))
        os.close(reason)
        self._settle()

    def listen(self, descriptor: int) -> None:
        """Take a message of the parent from a job socket; a closed one means that the parent gave the rank
        up."""
        rank = self._ranks.get(descriptor)
        if rank is None:
            return
        try:
            message = engine_messages.receive(rank.job)
        except ConnectionError:
            message = None
        # A rank that outlives its parent belongs to no process from now on. It is remembered, so that the
        # server neither ends before it nor takes it for a stray.
        if message is None and rank.outlives and rank.pid:
            self._orphans.add(rank.pid)
        elif rank.pid:
            linux.kill_process_group(rank.pid)
        if message is None:
            # Nothing can be sent; reaping continues without the socket.
            self._forget(rank)

    def reap(self) -> None:
        """Collect every child that has ended, then let go of ranks that are over."""
        while (ended := _next_zombie()) is not None:
            # While the zombie is unreaped its id cannot be given to another group of processes.
            linux.kill_process_group(ended)
            _, status = os.waitpid(ended, 0)
            self._orphans.discard(ended)
            for rank in [rank for rank in self._ranks.values() if rank.pid == ended]:
                rank.pid = 0
                code, when = os.waitstatus_to_exitcode(status), time.monotonic()
                self._send(rank.job, EngineMessage(engine_messages.EXITED, ended, code, when))
        self._settle()

    def kill_bound(self) -> None:
        """Kill the ranks that do not outlive the parent, which is gone."""
        for rank in self._ranks.values():
            if rank.pid and not rank.outlives:
                linux.kill_process_group(rank.pid)

    def kill_everything(self) -> None:
        """Kill all ranks and orphans; return when all are gone."""
        while children := linux.own_children():
            for pid in children:
                linux.kill_process_group(pid)
            for pid in children:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _settle(self) -> None:
        # Children of ranks that left their session have this process as parent now, and cannot be told from
        # those that a living rank still needs: they are killed when no rank is left, before the last DONE, so
        # that a launch that has returned has left no process.
        busy = bool(self._orphans) or any(rank.pid for rank in self._ranks.values())
        if not busy and (strays := linux.own_children()):
            for pid in strays:
                linux.kill_process_group(pid)
            # Their end wakes the server again.
            return
        for rank in [rank for rank in self._ranks.values() if not rank.pid]:
            self._send(rank.job, EngineMessage(engine_messages.DONE))
            self._forget(rank)

    def _forget(self, rank: _ForkedRank) -> None:
        self._ranks.pop(rank.job.fileno(), None)
        rank.job.close()

    def _leave_server(self, job: socket.socket) -> None:
        """Close, in a fresh child, what belongs to the server and to other ranks. A copy of another rank's
        job socket would hide from that rank's parent that server and rank are gone."""
        signal.set_wakeup_fd(-1)
        for descriptor in self._private:
            os.close(descriptor)
        for rank in self._ranks.values():
            if rank.job is not job:
                rank.job.close()

    @staticmethod
    def _send(job: socket.socket, message: EngineMessage) -> None:
        # The parent is gone; the loop notices it at its sockets.
        with contextlib.suppress(OSError):
            engine_messages.send(job, message)


def _no_more_processes(rank: int, order: LaunchOrder, error: OSError) -> ResourceError:
    return ResourceError(
        f"the operating system refused to start rank {rank} of {order.ranks_in_all}: {error.strerror}",
        remedy="use fewer workers, free memory, or raise the limit on processes (`ulimit -u`)",
    )


def _next_zombie() -> int | None:
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid
