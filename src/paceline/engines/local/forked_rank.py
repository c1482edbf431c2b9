"""A rank, from the fork to its end: own session, the caller's surroundings, the entry function, a report.

Runs only in a child of the fork server. The entry, named by "module:function", gets a `RankTask` and returns
the descriptor of a payload with its result.
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

from paceline.core import fd_messages
from paceline.core.available_resources import cores
from paceline.core.errors import InternalError
from paceline.core.fd_messages import Plain
from paceline.core.sandbox_fallbacks import memory_file
from paceline.engines.local import (
    engine_messages,
    failure_report,
    linux,
    memfd_pickle,
    thread_counts,
)
from paceline.engines.local.engine_messages import EngineMessage, LaunchOrder

# Not SIGUSR1 or 2, which schedulers and users take for themselves.
STACK_SIGNAL = signal.SIGRTMIN + 7

# Errors of an output without a reader, a terminal, or room, or that was closed.
_UNREAD: Final = frozenset({errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EBADF})

_FAILED_CODE = 1
_BROKEN_CODE = 70


@final
@dataclass
class RankTask:
    """Argument of an entry: its rank, its payload, and a way to report a failure before peers notice."""

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
        descriptors = [memfd_pickle.dump(failure_report.describe(error))]
        try:
            descriptors.append(memfd_pickle.dump(error, shared=self.shared))
        except Exception:
            # The exception holds something that cannot travel; its text does.
            descriptors = descriptors[:1]
        engine_messages.send(
            self.job,
            EngineMessage(engine_messages.FAILED, when=when, descriptors=tuple(descriptors)),
        )
        fd_messages.close_all(descriptors)


def run(
    order: LaunchOrder, rank: int, server_pid: int, job: socket.socket, descriptors: Sequence[int]
) -> NoReturn:
    """Run as rank `rank`; never return. `descriptors`: payload, stdout, stderr, then the caller's own."""
    code = _BROKEN_CODE
    try:
        os.setsid()
        if not order.outlives_server:
            linux.die_with_parent(server_pid)
        call, stdout, stderr, *own = descriptors
        _reset_signals()
        _take_stdio(stdout, stderr)
        _offer_stacks(job)
        code = _work(order, RankTask(rank, order.ranks_in_all, call, tuple(own), order.options, job))
    except ConnectionError:
        # The parent no longer listens on the job socket: it has given this group up and raised its error.
        code = _FAILED_CODE
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _work(order: LaunchOrder, task: RankTask) -> int:
    __tracebackhide__ = True
    code = 0
    try:
        _take_surroundings(order, task.rank)
        thread_counts.apply(thread_counts.choose(order.threads, order.environ, cores(), order.ranks_in_all))
        result = _resolve(order.entry)(task)
        engine_messages.send(
            task.job,
            EngineMessage(engine_messages.RETURNED, when=time.monotonic(), descriptors=(result,)),
        )
        os.close(result)
    except SystemExit as error:
        # The exit code is for the process that waits for this one, also where the job socket is closed.
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
        # Closed by the user, or without a reader; the results are safe already.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    return code


def _resolve(entry: str) -> Callable[[RankTask], int]:
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


class Output(io.FileIO):
    """Standard output or error of this rank. Where that is a pipe without a reader, a terminal that is gone
    or a full disk, what is printed is dropped: lost output is no reason to lose the rank."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _UNREAD:
                raise
            return memoryview(data).nbytes


def _text_stream(descriptor: int, errors: str) -> io.TextIOWrapper:
    raw = io.BufferedWriter(Output(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=True)


def _take_surroundings(order: LaunchOrder, rank: int) -> None:
    os.environ.clear()
    os.environ.update(order.environ)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(order.ranks_in_all),
        LOCAL_RANK=str(rank),
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
    _reseed_generators()


def _offer_stacks(job: socket.socket) -> None:
    """Give the parent a file in which stacks appear, on a crash by themselves and on request by signal."""
    stacks = memory_file("paceline-stacks")
    faulthandler.enable(file=stacks, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True, chain=False)
    engine_messages.send(job, EngineMessage(engine_messages.READY, os.getpid(), descriptors=(stacks,)))


def _reseed_generators() -> None:
    """Seed the global generators of NumPy and torch from the system, as in any fresh process. They were
    seeded when the fork server imported them: every rank of every group would continue from the same numbers.
    (Python's `random` reseeds itself after a fork.)"""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
