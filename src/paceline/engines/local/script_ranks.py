"""Ranks that run a user's script, as the launcher of their node sees them: start, listen, signal, end.

Each rank is a `WorkerProcess` from the fork server, two pipes for what it prints, and a socket on which the
script's process may ask its launcher for something. One thread serves all of them with `listen`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from paceline.core import fd_messages
from paceline.engines.local import memfd_pickle
from paceline.engines.local.blame import how_ended
from paceline.engines.local.engine_messages import LaunchOrder
from paceline.engines.local.failure_report import FailureReport, FailureRole
from paceline.engines.local.fork_server_client import is_open
from paceline.engines.local.output_relay import OutputPipe, RankOutput
from paceline.engines.local.worker_handle import WorkerProcess

# What a rank that lost a peer raises from torch's own collectives.
_ECHOES: Final = ("DistBackendError", "DistNetworkError", "DistStoreError", "gloo", "ncclRemoteError")
_SECONDS_OF_AN_ECHO: Final = 1.0  # a killed process is reaped a moment later than its peers notice it


@final
@dataclass(frozen=True)
class RankEnd:
    """How a rank ended. `status` is an exit code, or a signal's number negated; None: the fork server that
    watched it is gone."""

    rank: int
    pid: int
    when: float
    status: int | None
    report: FailureReport | None = None
    frames: tuple[str, ...] = ()
    last_lines: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The code that stands for this end, as shells count: 128 and the signal for a process that one
        ended."""
        if self.status is None:
            return 1
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def has_failed(self) -> bool:
        return self.exit_code != 0 or self.report is not None

    @property
    def how(self) -> str:
        """How it ended, in words."""
        if self.status is None:
            return "was lost with the fork server"
        return how_ended(self.status)

    @property
    def is_echo(self) -> bool:
        """Return whether the rank failed because it had lost another one, as far as its error says."""
        if self.report is None:
            return False
        return self.report.standing is not FailureRole.CAUSE or any(
            word in self.report.summary for word in _ECHOES
        )


def first_failure(ends: Sequence[RankEnd]) -> RankEnd:
    """Return the failure that the others followed from."""
    failed = [end for end in ends if end.has_failed]
    return min(failed, key=lambda end: end.when + (_SECONDS_OF_AN_ECHO if end.is_echo else 0.0))


@final
class ScriptRank:
    """One process of one rank."""

    def __init__(self, order: LaunchOrder, output: RankOutput) -> None:
        self.rank = order.first_rank
        self.link, far_end = fd_messages.pair()
        self.link.setblocking(False)
        self._output = output
        self.pipes = [OutputPipe(output, target) for target in (1, 2)]
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Descriptor 0 as it is here and now: ranks read what the launcher would.
            stdin = 0 if is_open(0) else nothing
            files = (stdin, *(pipe.writing for pipe in self.pipes), far_end.fileno())
            self.worker = WorkerProcess.start(order, nothing, files)
        except BaseException:
            for pipe in self.pipes:
                pipe.close()
            self.link.close()
            raise
        finally:
            os.close(nothing)
            far_end.close()
            for pipe in self.pipes:
                pipe.close_writing()

    @property
    def has_ended(self) -> bool:
        """Return whether the process is gone and no message of it will come."""
        return self.worker.done

    @property
    def has_failed(self) -> bool:
        """Return whether it raised, or ended with another code than 0. One that ended by itself with code 0
        did well, whether or not it came to the end of its script."""
        worker = self.worker
        return bool(worker.failed) or (
            worker.done if worker.status is None else worker.status != 0  # lost with its server
        )

    @property
    def was_killed(self) -> bool:
        """Return whether a signal ended it before it could report anything."""
        worker = self.worker
        return not worker.failed and worker.status is not None and worker.status < 0

    def end(self) -> RankEnd:
        """Return how it ended, after `has_ended`."""
        worker = self.worker
        report = None
        if worker.failed:
            # Only the report: the exception itself may need modules that the launcher must not import.
            report = memfd_pickle.load(worker.failed[0])
        when = worker.reported_at if report is not None else worker.ended_at
        lines = tuple(self._output.last_lines)
        return RankEnd(self.rank, worker.pid, when, worker.status, report, tuple(worker.frames()), lines)

    def close(self) -> None:
        """Pass on what it printed, and give back every descriptor."""
        for pipe in self.pipes:
            pipe.close()
        self.link.close()
        self.worker.close()


@final
class ScriptRanks:
    """All ranks of one node. `on_request` gets what a rank asks on its link: the rank, the message, and its
    descriptors."""

    def __init__(self, on_request: Callable[[ScriptRank, Mapping[str, Any], tuple[int, ...]], None]) -> None:
        self._on_request = on_request
        self._selector = selectors.DefaultSelector()
        self.running: dict[int, ScriptRank] = {}

    def watch(self, descriptor: int | socket.socket, on_ready: Callable[[], None]) -> None:
        """Call `on_ready` in `listen` when the descriptor can be read."""
        self._selector.register(descriptor, selectors.EVENT_READ, on_ready)

    def start(self, order: LaunchOrder, output: RankOutput) -> None:
        """Start one rank; the one that had its number before has ended."""
        rank = ScriptRank(order, output)
        self.running[rank.rank] = rank
        self._selector.register(rank.worker, selectors.EVENT_READ, lambda: self._listen_to(rank))
        self._selector.register(rank.link, selectors.EVENT_READ, lambda: self._answer(rank))
        for pipe in rank.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, lambda pipe=pipe: self._relay(pipe))

    def listen(self, seconds: float) -> None:
        """Wait for at most so long for something to happen, and handle what has."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            # One that was handled before it may have closed this one.
            if key.fd in self._selector.get_map():
                key.data()

    def ended(self) -> list[ScriptRank]:
        return [rank for rank in self.running.values() if rank.has_ended]

    def signal(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        for rank in self.running.values():
            rank.worker.signal(number)

    def kill(self) -> None:
        for rank in self.running.values():
            rank.worker.kill()

    def remove(self, rank: ScriptRank) -> RankEnd:
        """Take out a rank that has ended; return how it did. What it asked before its end is answered."""
        while rank.link in self._selector.get_map() and self._answer(rank):
            pass
        for source in (rank.worker, rank.link, *rank.pipes):
            self._forget(source)
        for pipe in rank.pipes:
            pipe.close()  # before its last lines are asked for
        end = rank.end()
        rank.close()
        self.running.pop(rank.rank, None)
        return end

    def close(self) -> None:
        """Give back every descriptor; ranks that still run are killed by their server when it notices."""
        for rank in list(self.running.values()):
            rank.worker.kill()
            rank.close()
        self.running.clear()
        self._selector.close()

    def _listen_to(self, rank: ScriptRank) -> None:
        rank.worker.receive()
        if rank.worker.done:
            self._forget(rank.worker)

    def _relay(self, pipe: OutputPipe) -> None:
        if not pipe.relay():
            self._forget(pipe)

    def _answer(self, rank: ScriptRank) -> bool:
        """Answer the next message of a rank; False where there is none."""
        try:
            message = fd_messages.receive(rank.link)
        except BlockingIOError:
            return False
        if message is None:
            self._forget(rank.link)
        else:
            self._on_request(rank, *message)
        return message is not None

    def _forget(self, source: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)
