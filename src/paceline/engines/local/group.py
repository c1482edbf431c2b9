"""The parent's ear to one group of ranks: hears what they and the server say, can kill or question them.

Never blocks for longer than it was told to. Closing it ends whatever is still alive and waits for that.
Must not decide anything: `launch` does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from paceline.core.errors import InternalError, PacelineError, PeerLostError
from paceline.core.system_calls import open_process
from paceline.engines.local import client, payload, protocol, stacks, system
from paceline.engines.local.protocol import Message
from paceline.engines.local.verdict import Died, Raised

_CLOSE_SECONDS = 10.0
_STACK_SECONDS = 1.0
_QUIET_SECONDS = 0.02


@final
@dataclass
class _Rank:
    pid: int = 0
    watch: int = -1
    stack_file: int = -1
    said: Message | None = None
    exit: Message | None = None
    files: list[int] = field(default_factory=list)

    @property
    def returned(self) -> bool:
        return self.said is not None and self.said.kind == protocol.RETURNED

    @property
    def raised(self) -> bool:
        return self.said is not None and self.said.kind == protocol.FAILED

    @property
    def failed(self) -> bool:
        return self.raised or (self.exit is not None and (self.said is None or self.exit.status != 0))


@final
class Group:
    """One group of ranks as its parent sees it."""

    def __init__(self, server: client.Server, workers: int) -> None:
        self.done = False
        self._server = server
        self._watch = server.duplicate_watch()
        self._asked = False
        self._killed_at = float("inf")
        self._refusal: PacelineError | None = None
        self._socket, self._far_end = protocol.pair()
        self._ranks = [_Rank() for _ in range(workers)]

    def start(self, order: int, packed: int, files: Sequence[int]) -> None:
        """Ask the server for the ranks; they will write to what is standard output and error here and now."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._far_end.close)
            streams = [_duplicate(number) for number in (1, 2)]
            stack.callback(protocol.close_all, streams)
            self._asked = True
            everything = (order, packed, self._far_end.fileno(), *streams, *files)
            self._server.request(Message(protocol.START, descriptors=everything))

    @property
    def all_ready(self) -> bool:
        """Whether every rank has been running."""
        return all(rank.stack_file >= 0 or rank.exit is not None for rank in self._ranks)

    @property
    def anyone_failed(self) -> bool:
        return any(rank.failed for rank in self._ranks)

    @property
    def unfinished(self) -> list[int]:
        return [number for number, rank in enumerate(self._ranks) if rank.exit is None]

    def listen(self, seconds: float) -> None:
        """Wait for up to `seconds` for one message and take it in."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._watch, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000 + 1)}
        # What was said before the server ended is heard first.
        if self._socket.fileno() in ready:
            self._take()
        elif ready:
            self._server_is_gone()

    def kill(self) -> None:
        """Have the server kill every rank that is still there; their deaths do not count as failures."""
        if not self.done and self._killed_at == float("inf"):
            self._killed_at = time.monotonic()
            self._say(protocol.KILL)

    def ask_where(self, numbers: Sequence[int]) -> dict[int, list[str]]:
        """Where these ranks are, innermost frame first."""
        before = {number: len(self._stack(number)) for number in numbers}
        self._say(protocol.STACKS)
        limit = time.monotonic() + _STACK_SECONDS
        last: dict[int, int] = {}
        # A file that has new text and no longer grows is complete; a rank that cannot answer writes none.
        while time.monotonic() < limit and not self.done:
            self.listen(_QUIET_SECONDS)
            sizes = {number: len(self._stack(number)) for number in numbers}
            if sizes == last and all(sizes[number] > before[number] for number in numbers):
                break
            last = sizes
        return {number: stacks.frames(self._stack(number)[before[number] :]) for number in numbers}

    def failures(self, classes: Sequence[type]) -> list[Raised | Died]:
        """How the failed ranks ended, leaving out those that were killed on request."""
        found: list[Raised | Died] = []
        for number, rank in enumerate(self._ranks):
            if rank.raised and rank.said is not None:
                found.append(_raised(number, rank, rank.said.when, classes))
            elif rank.failed and rank.exit is not None:
                end = rank.exit
                if end.status != -signal.SIGKILL or end.when < self._killed_at:
                    frames = tuple(stacks.frames(self._stack(number)))
                    found.append(Died(number, rank.pid, end.when, end.status, rank.returned, frames))
        return found

    def results(self) -> Iterator[tuple[int, int]]:
        """Rank and result file of every rank."""
        for number, rank in enumerate(self._ranks):
            if not rank.returned:
                raise InternalError(f"rank {number} ended without a result and without an error")
            yield number, rank.files[0]

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
        if self._asked:
            self.kill()
            # Why the group ended is known by now; only that it has ended matters here.
            with contextlib.suppress(PacelineError):
                while not self.done and time.monotonic() < limit:
                    self.listen(limit - time.monotonic())
        self._asked = False
        if self._watch >= 0:
            os.close(self._watch)
            self._watch = -1
        self._far_end.close()
        self._socket.close()
        for rank in self._ranks:
            files = [rank.watch, rank.stack_file, *rank.files]
            rank.watch, rank.stack_file, rank.files = -1, -1, []
            protocol.close_all([descriptor for descriptor in files if descriptor >= 0])

    def _take(self) -> None:
        try:
            message = protocol.receive(self._socket)
        except ConnectionError:
            message = None
        if message is None:
            self._server_is_gone()
        elif message.kind == protocol.DONE:
            self.done = True
            if self._refusal is not None:
                self._server.retired |= bool(self._refusal.facts.get("spoils_server"))
                raise self._refusal
        elif message.kind == protocol.REFUSED:
            self._refusal = payload.load(message.descriptors[0])
            protocol.close_all(message.descriptors)
        else:
            self._hear(self._ranks[message.rank], message)

    @staticmethod
    def _hear(rank: _Rank, message: Message) -> None:
        rank.files += message.descriptors
        if message.kind == protocol.STARTED:
            rank.pid = message.pid
            with contextlib.suppress(ProcessLookupError):
                rank.watch = open_process(message.pid)
        elif message.kind == protocol.READY:
            rank.stack_file = rank.files.pop()
        elif message.kind == protocol.EXITED:
            rank.exit = message
        elif rank.said is None:
            rank.said = message

    def _say(self, kind: str) -> None:
        # A server that is gone cannot hear; `listen` finds out and says so.
        with contextlib.suppress(ConnectionError):
            protocol.send(self._socket, Message(kind))

    def _stack(self, number: int) -> str:
        stack_file = self._ranks[number].stack_file
        return stacks.read(stack_file) if stack_file >= 0 else ""

    def _server_is_gone(self) -> None:
        """The kernel kills ranks whose server died; make sure of it, with all they started, and report."""
        self.done = True
        poll = select.poll()
        for rank in self._ranks:
            if rank.watch >= 0:
                poll.register(rank.watch, select.POLLIN)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank.watch, signal.SIGKILL)
                system.kill_family(rank.pid)
        left = sum(rank.watch >= 0 for rank in self._ranks)
        limit = time.monotonic() + _CLOSE_SECONDS
        while left and (ended := poll.poll(max(0.0, limit - time.monotonic()) * 1000)):
            for descriptor, _ in ended:
                poll.unregister(descriptor)
            left -= len(ended)
        how = self._server.how_it_ended()
        raise PeerLostError(
            f"the fork server (pid {self._server.pid}) {how}, and the ranks it had started ended with it",
            ranks=self.unfinished,
            remedy="call again for a new server; signal 9 is often the kernel's out-of-memory killer",
            pid=self._server.pid,
        )


def _raised(number: int, rank: _Rank, when: float, classes: Sequence[type]) -> Raised:
    error: BaseException | None = None
    if len(rank.files) > 1:
        # Exceptions whose constructor wants other arguments than it stores cannot be rebuilt; the text
        # remains.
        with contextlib.suppress(Exception):
            error = payload.load(rank.files[1], shared=classes)
    return Raised(number, rank.pid, when, payload.load(rank.files[0]), error)


def _duplicate(number: int) -> int:
    """A descriptor for what `number` refers to, or for nothing where it is closed."""
    try:
        return os.dup(number)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)
