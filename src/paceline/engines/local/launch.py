"""Start a group of ranks, wait for their results, raise one clear error if any fails, leave no process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from paceline.core import fd_messages
from paceline.core.errors import CommTimeoutError, InternalError, PacelineError, PeerLostError, UsageError
from paceline.core.fd_messages import Plain
from paceline.core.limit_errors import explain_os_error
from paceline.core.time_limits import START_SECONDS
from paceline.core.wording import counted, ranks
from paceline.engines.local import (
    blame,
    fork_server_client,
    linux,
    memfd_pickle,
    rank_call,
    stack_display,
)
from paceline.engines.local.blame import RankDied, RankRaised
from paceline.engines.local.engine_messages import LaunchOrder
from paceline.engines.local.worker_handle import WorkerProcess

_CLOSE_SECONDS = 10.0
_STACK_SECONDS = 1.0
_QUIET_SECONDS = 0.02
_RANKS_PER_REQUEST = 200  # a message carries at most 253 descriptors, the caller's own among them


@dataclass(frozen=True)
class Launch:
    """One group of ranks to start.

    entry        "module:function", called in each rank with a `RankTask`
    preload      modules that the fork server imports once, before any rank
    descriptors  handed to every rank, in this order
    options      plain data for the entry
    threads      per rank for numeric libraries; None: OMP_NUM_THREADS, else an equal share of the cores
    timeout      seconds that ranks may take, from their start to the end of the last
    grace        seconds that the others have to end by themselves after one failed
    """

    entry: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    workers: int = 1
    preload: tuple[str, ...] = ()
    descriptors: tuple[int, ...] = ()
    options: Mapping[str, Plain] = field(default_factory=dict)
    reducers: memfd_pickle.Reducers = field(default_factory=dict)
    threads: int | None = None
    timeout: float | None = None
    grace: float = 1.0


@final
class RankGroup:
    """The parent's end of ranks that start and end together. Never blocks for longer than the caller allows.
    Closing it kills the ranks that are left and waits for them."""

    def __init__(self, server: fork_server_client.ForkServer, workers: int) -> None:
        self._server = server
        self._watch = server.duplicate_watch()
        self._started = False
        self._killed_at = float("inf")
        self._ranks: list[WorkerProcess] = []
        self._far_ends: list[socket.socket] = []
        try:
            for _ in range(workers):
                ours, theirs = fd_messages.pair()
                self._ranks.append(WorkerProcess(ours, server))
                self._far_ends.append(theirs)
        except BaseException:
            self.close()
            raise

    def start(self, order: LaunchOrder, packed: int, files: Sequence[int]) -> None:
        """Request the ranks from the server."""
        workers = len(self._ranks)
        self._started = True
        for first in range(0, workers, _RANKS_PER_REQUEST):
            jobs = self._far_ends[first : first + _RANKS_PER_REQUEST]
            part = replace(order, workers=len(jobs), first_rank=first, world_size=workers)
            self._server.start_ranks(part, packed, jobs, files)
        for far_end in self._far_ends:
            far_end.close()

    @property
    def done(self) -> bool:
        """Return whether no further message will come."""
        return all(rank.done for rank in self._ranks)

    @property
    def refusal(self) -> PacelineError | None:
        """The error of a rank that was not started; None: there is no such rank."""
        return next((rank.refusal for rank in self._ranks if rank.refusal is not None), None)

    @property
    def all_ready(self) -> bool:
        """Return whether every rank runs, or has run."""
        return all(rank.is_ready for rank in self._ranks)

    @property
    def anyone_failed(self) -> bool:
        return any(rank.has_failed for rank in self._ranks)

    @property
    def unfinished(self) -> list[int]:
        return [number for number, rank in enumerate(self._ranks) if rank.status is None]

    def listen(self, seconds: float) -> None:
        """Wait for up to `seconds` for messages, and handle them."""
        poll = select.poll()
        poll.register(self._watch, select.POLLIN)
        waiting = [rank for rank in self._ranks if not rank.done]
        for rank in waiting:
            poll.register(rank, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000 + 1)}
        readable = [rank for rank in waiting if rank.fileno() in ready]
        try:
            for rank in readable:
                rank.receive()
        except OSError as error:
            raise explain_os_error(error, f"{counted(len(self._ranks), 'rank')} cannot be watched") from error
        # Messages from before the server's end come first. A rank whose socket is closed without a status has
        # lost its server, which would have sent one.
        if (ready and not readable) or any(
            rank.done and rank.status is None and rank.refusal is None for rank in readable
        ):
            self._server_is_gone()

    def kill(self) -> None:
        """Kill every rank that is still there; their deaths do not count as failures."""
        if self._killed_at == float("inf"):
            self._killed_at = time.monotonic()
            for rank in self._ranks:
                rank.kill()

    def request_stacks(self, numbers: Sequence[int]) -> dict[int, list[str]]:
        """Return where these ranks are, innermost frame first."""
        asked = {number: self._ranks[number] for number in numbers}
        for rank in asked.values():
            rank.request_stack()
        limit = time.monotonic() + _STACK_SECONDS
        last: list[int] = []
        # A file that has new text and no longer grows is complete; a rank that cannot answer writes none.
        while time.monotonic() < limit and not self.done:
            self.listen(_QUIET_SECONDS)
            sizes = [rank.stack_size() for rank in asked.values()]
            if sizes == last and all(sizes):
                break
            last = sizes
        return {number: rank.frames() for number, rank in asked.items()}

    def failures(self, classes: Sequence[type]) -> list[RankRaised | RankDied]:
        """Return how the failed ranks ended, leaving out those that were killed on request."""
        failures: list[RankRaised | RankDied] = []
        for number, rank in enumerate(self._ranks):
            if rank.failed:
                failures.append(RankRaised.load(number, rank.pid, rank.reported_at, rank.failed, classes))
            elif rank.status is not None and rank.has_failed:
                killed = rank.status == -signal.SIGKILL and rank.ended_at >= self._killed_at
                died = (rank.ended_at, rank.status, bool(rank.returned), tuple(rank.frames()))
                failures += [] if killed else [RankDied(number, rank.pid, *died)]
        return failures

    def results(self) -> Iterator[tuple[int, int]]:
        """Yield rank and result file of every rank."""
        for number, rank in enumerate(self._ranks):
            if not rank.returned:
                raise InternalError(f"rank {number} ended without a result and without an error")
            yield number, rank.returned[0]

    def close(self) -> None:
        """End what is left of the group, wait for that, and give back every descriptor."""
        interrupted: KeyboardInterrupt | None = None
        while True:
            # A second Ctrl-C must not leave ranks behind: it takes effect a moment later.
            try:
                self._end()
                break
            except KeyboardInterrupt as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _end(self) -> None:
        limit = time.monotonic() + _CLOSE_SECONDS
        if self._started:
            self.kill()
            # Why the group ended is known by now; only that it has ended matters here.
            with contextlib.suppress(PacelineError):
                while not self.done and time.monotonic() < limit:
                    self.listen(limit - time.monotonic())
        self._started = False
        if self._watch >= 0:
            os.close(self._watch)
            self._watch = -1
        for far_end in self._far_ends:
            far_end.close()
        for rank in self._ranks:
            rank.close()

    def _server_is_gone(self) -> None:
        """Kill all ranks, with all they started, and report: the kernel kills ranks whose server died, this
        makes sure of it."""
        left = [rank for rank in self._ranks if rank.watch >= 0 and rank.status is None]
        for rank in left:
            rank.kill()
            linux.kill_process_group(rank.pid)
        limit = time.monotonic() + _CLOSE_SECONDS
        for rank in left:
            fork_server_client.has_ended(rank.watch, limit - time.monotonic())
        for rank in self._ranks:
            rank.done = True
        how = self._server.how_it_ended()
        raise PeerLostError(
            f"the fork server (pid {self._server.pid}) {how}, and the ranks it had started ended with it",
            ranks=self.unfinished,
            remedy="call again for a new server; signal 9 is often the kernel's out-of-memory killer",
            pid=self._server.pid,
        )


def run(launch: Launch) -> list[Any]:
    """Run the group to its end and return the results by rank."""
    check(launch)
    packed, packed_call = rank_call.pack(launch.function, launch.args, launch.reducers)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, packed)
        group = stack.enter_context(contextlib.closing(_open(launch, packed)))
        _wait(group, launch)
        failures = group.failures(packed_call.classes)
        if failures:
            raise blame.root_cause(failures)
        return [rank_call.unpack_result(file, packed_call, rank) for rank, file in group.results()]


def _open(launch: Launch, packed: int) -> RankGroup:
    order = order_from_caller(launch.entry, launch.workers, launch.preload, launch.threads, launch.options)
    for stream in (sys.stdout, sys.stderr):
        # What was printed before must not appear after what the ranks print.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()

    def start(server: fork_server_client.ForkServer) -> RankGroup:
        try:
            group = RankGroup(server, launch.workers)
            try:
                group.start(order, packed, launch.descriptors)
            except BaseException:
                group.close()
                raise
        except OSError as error:
            if isinstance(error, ConnectionError):
                raise  # the server is gone: `on_server` starts another
            raise explain_os_error(error, f"{counted(launch.workers, 'rank')} cannot be started") from error
        return group

    return fork_server_client.on_server(start)


def _wait(group: RankGroup, launch: Launch) -> None:
    limit = time.monotonic() + START_SECONDS
    started = False
    stop_at: float | None = None
    while not group.done:
        if group.all_ready and not started:
            started = True
            limit = time.monotonic() + launch.timeout if launch.timeout is not None else float("inf")
        if group.anyone_failed and stop_at is None:
            stop_at = time.monotonic() + launch.grace
        now = time.monotonic()
        if stop_at is not None and now >= stop_at:
            group.kill()
            stop_at = float("inf")
        elif stop_at is None and now >= limit:
            _give_up(group, launch, started)
        group.listen(min(limit if stop_at is None else stop_at, now + 3600.0) - now)
        if group.refusal is not None:
            raise group.refusal


def _give_up(group: RankGroup, launch: Launch, started: bool) -> None:
    waiting = group.unfinished
    if not started:
        raise CommTimeoutError(
            f"{ranks(waiting)} did not start within {START_SECONDS:g} s",
            waiting_for=waiting,
            remedy="importing " + ", ".join(launch.preload) + " seems to hang: try it in a plain Python",
        )
    where = stack_display.describe_stacks(group.request_stacks(waiting))
    raise CommTimeoutError(
        f"{ranks(waiting)} of {launch.workers} did not finish within {launch.timeout:g} s\n{where}",
        waiting_for=waiting,
        remedy="see what these ranks are doing at the lines above, or pass a longer timeout=",
    )


def order_from_caller(
    entry: str, workers: int, preload: tuple[str, ...], threads: int | None, options: Mapping[str, Plain]
) -> LaunchOrder:
    """Return an order for ranks that have this process's folder, import paths and environment."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        cwd = None
    return LaunchOrder(
        entry=entry,
        workers=workers,
        preload=preload,
        threads=threads,
        options=options,
        sys_path=tuple(fork_server_client.import_paths()),
        argv=tuple(sys.argv),
        cwd=cwd,
        environ=dict(os.environ),
        affinity=tuple(sorted(os.sched_getaffinity(0))),
    )


def import_ahead(modules: tuple[str, ...]) -> None:
    """Have the fork server import modules while this process does something else. Where an import fails, the
    first rank that needs it is refused with the reason."""
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        order = order_from_caller("", 0, modules, None, {})
        fork_server_client.on_server(lambda server: server.start_ranks(order, nothing, (), ()))
    finally:
        os.close(nothing)


def check(launch: Launch) -> None:
    """Raise UsageError for a launch that cannot work, before anything is started."""
    if not callable(launch.function):
        raise UsageError(
            f"the first argument must be a function, and {launch.function!r} cannot be called",
            remedy="pass the function itself, without calling it: spawn(train), not spawn(train())",
        )
    _check_whole("workers", launch.workers)
    if launch.threads is not None:
        _check_whole("threads", launch.threads)
    check_seconds("timeout", launch.timeout)
    names: Sequence[object] = launch.preload
    if not all(isinstance(name, str) and name for name in names):
        raise UsageError(
            f"preload must be a sequence of module names, not {names!r}", remedy='write preload=("name",)'
        )


def check_seconds(name: str, value: object) -> None:
    """Raise UsageError unless `value` is None or a number of seconds above 0."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise UsageError(
            f"{name} must be a number of seconds above 0, or None, not {value!r}",
            remedy="leave it out to wait without a limit",
        )


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(
            f"{name} must be a whole number from 1 up, not {value!r}", remedy=f"pass {name}=1 or more"
        )
