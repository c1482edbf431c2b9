"""A rank, from the fork to its end: own session, the caller's surroundings, the entry function, a report.

Runs only in a child of the fork server. The entry, named by "module:function", gets a `Task` and returns the
descriptor of a payload with its result. Must not know what the entry does.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import importlib
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, final

from paceline.core.errors import InternalError
from paceline.core.machine import cores
from paceline.core.system_calls import memory_file
from paceline.engines.local import payload, protocol, randomness, report, system, threads
from paceline.engines.local.protocol import Message, Order, Plain

# Not SIGUSR1 or 2, which schedulers and users take for themselves.
STACK_SIGNAL = signal.SIGRTMIN + 7

# What a descriptor of the output says that has no reader, no terminal, no room, or was closed.
_UNREAD: Final = frozenset({errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EBADF})

_FAILED_CODE = 1
_BROKEN_CODE = 70


@final
@dataclass
class Task:
    """What an entry gets: who it is, what to work on, and a way to report a failure before peers notice."""

    rank: int
    workers: int
    payload: int
    descriptors: tuple[int, ...]
    options: Mapping[str, Plain]
    job: socket.socket = field(repr=False)
    shared: tuple[type, ...] = ()
    failed: bool = False

    def fail(self, error: BaseException) -> None:
        """Report a failure now; only the first counts."""
        if self.failed:
            return
        self.failed = True
        when = time.monotonic()
        descriptors = [payload.dump(report.describe(error))]
        try:
            descriptors.append(payload.dump(error, shared=self.shared))
        except Exception:
            # The exception holds something that cannot travel; its text does.
            descriptors = descriptors[:1]
        protocol.send(
            self.job, Message(protocol.FAILED, self.rank, when=when, descriptors=tuple(descriptors))
        )
        protocol.close_all(descriptors)


def run(order: Order, rank: int, server_pid: int, job: socket.socket, descriptors: Sequence[int]) -> NoReturn:
    """Be rank `rank`; never returns. `descriptors`: payload, stdout, stderr, then the caller's own."""
    code = _BROKEN_CODE
    try:
        os.setsid()
        if not order.outlives_server:
            system.die_with_parent(server_pid)
        call, stdout, stderr, *own = descriptors
        _reset_signals()
        _take_stdio(stdout, stderr)
        _offer_stacks(job, rank)
        code = _work(order, Task(rank, order.workers, call, tuple(own), order.options, job))
    except ConnectionError:
        # The parent no longer listens on the job socket: it has given up on this group and said why.
        code = _FAILED_CODE
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _work(order: Order, task: Task) -> int:
    __tracebackhide__ = True
    code = 0
    try:
        _take_surroundings(order, task.rank)
        threads.apply(threads.choose(order.threads, order.environ, cores(), order.ranks_in_all))
        result = _resolve(order.entry)(task)
        protocol.send(
            task.job, Message(protocol.RETURNED, task.rank, when=time.monotonic(), descriptors=(result,))
        )
        os.close(result)
    except SystemExit as error:
        # The code is for whoever looks at the process, also where nobody listens any more.
        code = error.code if type(error.code) is int and 0 < error.code < 256 else _FAILED_CODE
        with contextlib.suppress(ConnectionError):
            task.fail(error)
    except BaseException as error:
        code = _FAILED_CODE
        task.fail(error)
    # Where the interpreter would normally end: background threads finish, exit handlers run, output is
    # written.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # Closed by the user, or nobody reads any more; the results are safe already.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    return code


def _resolve(entry: str) -> Callable[[Task], int]:
    module, _, name = entry.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise InternalError(f"there is no entry {entry!r}") from error
    if not callable(function):
        raise InternalError(f"the entry {entry!r} is not a function")
    return function  # type: ignore[no-any-return]


def _reset_signals() -> None:
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    # A rank has no terminal, so Ctrl-C cannot reach it; one that interrupts itself is interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _take_stdio(stdout: int, stderr: int) -> None:
    for descriptor, target in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    # Written line by line, so that the lines of several ranks do not cut each other.
    sys.stdout = _text_stream(1, "strict")
    sys.stderr = _text_stream(2, "backslashreplace")
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]


class _Output(io.FileIO):
    """Where this rank prints to. Where that is a pipe without a reader, a terminal that is gone or a full
    disk, what is printed is dropped: lost output is no reason to lose the rank."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _UNREAD:
                raise
            return memoryview(data).nbytes


def _text_stream(descriptor: int, errors: str) -> io.TextIOWrapper:
    raw = io.BufferedWriter(_Output(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=True)


def _take_surroundings(order: Order, rank: int) -> None:
    os.environ.clear()
    os.environ.update(order.environ)
    os.environ.update(
        RANK=str(order.first_rank + rank),
        WORLD_SIZE=str(order.ranks_in_all),
        LOCAL_RANK=str(order.first_rank + rank),
        LOCAL_WORLD_SIZE=str(order.ranks_in_all),
    )
    if order.cwd is not None:
        os.chdir(order.cwd)
    sys.path[:] = order.sys_path
    sys.argv[:] = order.argv
    # Files may have been written since the server last looked.
    importlib.invalidate_caches()
    with contextlib.suppress(OSError):
        # The machine's rules may have changed since; the cores the server has are good as well.
        os.sched_setaffinity(0, order.affinity)
    randomness.renew()


def _offer_stacks(job: socket.socket, rank: int) -> None:
    """Give the parent a file in which stacks appear, on a crash by themselves and on request by signal."""
    stacks = memory_file("paceline-stacks")
    faulthandler.enable(file=stacks, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True, chain=False)
    protocol.send(job, Message(protocol.READY, rank, pid=os.getpid(), descriptors=(stacks,)))
