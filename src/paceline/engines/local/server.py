"""The fork server: a process with one thread that has imported what ranks need and forks them on request.

Started by `client` as a child of the user's process, which may lend it to a supervisor of its own. It ends
when that process closes the control socket or is gone, and takes everything it ever started with it; ranks
that were ordered to outlive their parent are given an hour to end by themselves while the control socket is
open somewhere, and ten minutes once nobody can tell them to; while another process holds their own sockets,
they are that one's. Ranks that were ordered to outlive this server do. Must not know what ranks do.
"""

from __future__ import annotations

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
from typing import NoReturn

from paceline.core.errors import PacelineError, UsageError
from paceline.core.system_calls import open_process
from paceline.engines.local import protocol, system
from paceline.engines.local.fleet import Fleet
from paceline.engines.local.protocol import Order

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
    system.adopt_orphans()
    wake_read, wake_write = _wake_on_child_exit()
    try:
        parent = open_process(parent_pid)
    except ProcessLookupError:
        return
    fleet = Fleet(private=(control.fileno(), parent, wake_read, wake_write))
    masters = {control.fileno(), parent}
    limit = float("inf")
    # With a second thread in the process no further rank can be forked; those that run may finish.
    while fleet.sockets() or fleet.outlives_parent or system.own_thread_count() == 1:
        poll = select.poll()
        for descriptor in (*masters, wake_read, *fleet.sockets()):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(_milliseconds_until(limit))}
        if wake_read in ready:
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


def _patience(masters: set[int], fleet: Fleet, limit: float, *, first: bool) -> float:
    """Until when ranks may go on without the parent; `first`: something of it is gone since."""
    if not masters and fleet.sockets():
        # The next supervisor has them, or the caller keeps them for it.
        return float("inf")
    if first or limit == float("inf"):
        return time.monotonic() + (_ORPHAN_SECONDS if masters else _ALONE_SECONDS)
    return limit


def _milliseconds_until(limit: float) -> float | None:
    return None if limit == float("inf") else max(0.0, limit - time.monotonic()) * 1000


def _accept(control: socket.socket, fleet: Fleet) -> bool:
    """Carry out one request; False when the parent has closed the socket."""
    request = protocol.receive(control)
    if request is None:
        return False
    order_file, call, job_descriptor, stdout, stderr, *own = request.descriptors
    job = socket.socket(fileno=job_descriptor)
    try:
        order = protocol.read_order(order_file)
        _preload(order)
        fleet.start(order, job, (call, stdout, stderr, *own))
    except PacelineError as error:
        fleet.refuse(job, error)
    finally:
        protocol.close_all((order_file, call, stdout, stderr, *own))
    return True


def _preload(order: Order) -> None:
    missing = [name for name in order.preload if name not in sys.modules]
    if not missing:
        return
    here = sys.path[:]
    # "" stands for the caller's folder, which need not be the server's.
    sys.path[:] = [os.path.join(order.cwd or "/", entry) for entry in order.sys_path]
    try:
        for name in missing:
            _import(name)
    finally:
        sys.path[:] = here
    # What is here now stays for good: ranks need not scan, copy or dismantle it. Torch has finalizers by the
    # hundred, which would cost each rank more time at its end than its start takes.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.collect()
    gc.freeze()


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        raise UsageError(
            f"the module {name!r} could not be imported for the ranks:\n{traceback.format_exc().rstrip()}",
            remedy="import it once in a plain Python to see what is wrong, or leave it out of preload=",
        ) from error
    count = system.own_thread_count()
    if count > 1:
        raise UsageError(
            f"importing {name!r} started {count - 1} thread(s); a process with threads cannot fork safely",
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
