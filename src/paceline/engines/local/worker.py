"""One rank that its parent looks after for as long as it lives, among many others and without ever waiting.

`group` is for ranks that start and end together; this is for those that come and go. The socket to the rank
can be handed to another process (`keep`) and taken up there (`Worker.adopt`): the rank notices nothing. Must
not decide anything.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Sequence
from typing import Self, final

from paceline.core.errors import PacelineError, PeerLostError
from paceline.core.system_calls import open_process
from paceline.engines.local import child, client, payload, protocol, stacks, system
from paceline.engines.local.protocol import Message, Order


@final
class Worker:
    """A rank as its parent sees it.

    pid       0 until it was forked
    status    how it ended: an exit code, or a signal's number negated; None: it has not, or nobody knows
    returned  file of its result; failed: files of its report and, where it can travel, its exception
    refusal   why it was not started
    done      nothing more will be heard
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._descriptor = sock.fileno()
        self._watch = -1
        self._stack_file = -1
        self._stack_seen = 0
        self._doomed = False
        self.pid = 0
        self.status: int | None = None
        self.returned: tuple[int, ...] = ()
        self.failed: tuple[int, ...] = ()
        self.refusal: PacelineError | None = None
        self.done = False

    @classmethod
    def start(cls, order: Order, call: int, files: Sequence[int] = ()) -> Self:
        """Ask this process's fork server for one rank; returns at once."""
        with contextlib.ExitStack() as stack:
            order_file = protocol.write_order(order)
            stack.callback(os.close, order_file)
            streams = [_duplicate(number) for number in (1, 2)]
            stack.callback(protocol.close_all, streams)
            for _ in range(2):
                server = client.server()
                ours, theirs = protocol.pair()
                with theirs:
                    request = Message(
                        protocol.START, descriptors=(order_file, call, theirs.fileno(), *streams, *files)
                    )
                    try:
                        server.request(request)
                    except ConnectionError:
                        ours.close()
                        # It ended since it was last looked at; the next one is new.
                        server.retired = True
                        continue
                return cls(ours)
        raise PeerLostError(
            "the fork server ends as soon as it is started",
            remedy="its own output above says why; `python -c 'import torch'` shows if the installation is "
            "sound",
        )

    @classmethod
    def adopt(cls, pid: int, files: Sequence[int]) -> Self:
        """Take up what `keep` gave; `files`: the socket, and the stack file where there was one. A pid of 0:
        it was not forked yet, or nobody had heard so."""
        worker = cls(socket.socket(fileno=files[0]))
        if len(files) > 1:
            worker._stack_file = files[1]
        if pid:
            worker.is_process(pid)
        return worker

    def is_process(self, pid: int) -> None:
        """It was forked, and this is its pid; once is enough."""
        if self.pid:
            return
        self.pid = pid
        with contextlib.suppress(ProcessLookupError):
            self._watch = open_process(pid)
        if self._doomed:
            self.signal(signal.SIGKILL)

    def keep(self) -> tuple[int, ...]:
        """Descriptors, still ours, with which another process can adopt this rank."""
        return (self._descriptor, self._stack_file) if self._stack_file >= 0 else (self._descriptor,)

    def fileno(self) -> int:
        return self._descriptor

    def take(self) -> None:
        """Take in all that was said since."""
        while not self.done:
            try:
                message = protocol.receive(self._socket)
            except BlockingIOError:
                return
            except ConnectionError:
                message = None
            if message is None:
                # Server and rank are gone, and all that the rank had forked.
                self.done = True
                self.kill()
            else:
                self._hear(message)

    @property
    def watch(self) -> int:
        """A descriptor that is readable once the process has ended; -1: it was not forked yet."""
        return self._watch

    def end_family(self) -> None:
        """The process has ended and nobody said how: its server is gone, and what it started is left."""
        if self.pid and self.has_ended:
            system.kill_orphans_of(self.pid)

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone, also where nobody has said how."""
        if self.status is not None or self._watch < 0:
            # One that could not even be opened was gone before it was adopted.
            return self.status is not None or self.done or self.pid > 0
        poll = select.poll()
        poll.register(self._watch, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        """End the process now, or as soon as it is forked. The server takes all that it started along."""
        self._doomed = True
        # Not by way of the server, which may be busy importing something for others.
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal, if the process is still there."""
        if self._watch >= 0 and self.status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._watch, number)

    def ask_where(self) -> None:
        """Have the rank write its stack; `frames` reads it a moment later."""
        if self._stack_file >= 0:
            self._stack_seen = os.fstat(self._stack_file).st_size
            self.signal(child.STACK_SIGNAL)

    def stack_size(self) -> int:
        """Bytes written since `ask_where`: a stack that no longer grows is complete."""
        return os.fstat(self._stack_file).st_size - self._stack_seen if self._stack_file >= 0 else 0

    def frames(self) -> list[str]:
        """What was written since `ask_where` (or by a crash), innermost frame first."""
        if self._stack_file < 0:
            return []
        text = stacks.read(self._stack_file).encode(errors="replace")[self._stack_seen :]
        return stacks.frames(text.decode(errors="replace")) if text else []

    def close(self) -> None:
        """Give back every descriptor. The rank, if it still runs, is not touched."""
        self.done = True
        self._socket.close()
        files = [self._watch, self._stack_file, *self.returned, *self.failed]
        self._watch = self._stack_file = -1
        self.returned = self.failed = ()
        protocol.close_all([file for file in files if file >= 0])

    def release(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The files of its result and of its failure, which belong to the caller from now on."""
        files = self.returned, self.failed
        self.returned = self.failed = ()
        return files

    def _hear(self, message: Message) -> None:
        match message.kind:
            case protocol.STARTED:
                self.is_process(message.pid)
            case protocol.READY:
                (self._stack_file,) = message.descriptors
            case protocol.EXITED:
                self.status = message.status
            case protocol.RETURNED if not self.returned:
                self.returned = message.descriptors
            case protocol.FAILED if not self.failed:
                self.failed = message.descriptors
            case protocol.REFUSED:
                self.refusal = payload.load(message.descriptors[0])
                protocol.close_all(message.descriptors)
                if self.refusal is not None and self.refusal.facts.get("spoils_server"):
                    client.server().retired = True
            case protocol.DONE:
                self.done = True
            case _:
                protocol.close_all(message.descriptors)


def _duplicate(number: int) -> int:
    """A descriptor for what `number` refers to, or for nothing where it is closed."""
    try:
        return os.dup(number)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)
