"""The supervisor's connection to its parent, the process that called `fit`.

The parent asks (stop, scale, kill), and keeps copies of the workers' sockets for the next supervisor. When
the parent is gone, the job is asked to save and end; what has not ended after `patience` seconds is killed,
because no process would wait for it.
"""

from __future__ import annotations

import selectors
import socket
from collections import deque
from typing import final

from paceline.core.fd_messages import Plain
from paceline.elastic.machine.machine_events import ScaleRequested, StopRequested
from paceline.elastic.supervisor import parent_messages
from paceline.elastic.supervisor.component_ports import EventLoop
from paceline.engines.local.worker_handle import WorkerProcess


@final
class Parent:
    """The supervisor's end of its connection to the parent. `due`: when the job has to have ended
    after the parent is gone."""

    def __init__(self, loop: EventLoop, sock: socket.socket, patience: float) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._socket = sock
        self._unsent: deque[tuple[str, tuple[int, ...], dict[str, Plain]]] = deque()
        self._gone = False
        self._patience = patience
        self.due = float("inf")
        loop.selector.register(sock, selectors.EVENT_READ, self._ready)

    def send(self, kind: str, descriptors: tuple[int, ...] = (), **fields: Plain) -> None:
        """Send, now or when there is room; nothing once the parent is gone."""
        if self._gone:
            return
        self._unsent.append((kind, descriptors, fields))
        self._flush()

    def tick(self, now: float) -> None:
        """Kill the job once its time after the end of the parent is over."""
        if now >= self.due:
            self.due = float("inf")
            self._loop.kill(f"the calling process is gone, and {self._patience:g} s were not enough")

    def keep(self, member: int, process: WorkerProcess) -> None:
        """Leave copies of a worker's descriptors with the parent."""
        self.send("keep", process.descriptors(), member=member, pid=process.pid)

    def drop(self, member: int) -> None:
        """Have the parent close its copies for a worker that has ended."""
        # Those that wait to be sent are closed here by now.
        self._unsent = deque(
            unsent for unsent in self._unsent if unsent[0] != "keep" or unsent[2].get("member") != member
        )
        self.send("drop", member=member)

    def close(self) -> None:
        """Send what waits, and close the connection."""
        if not self._gone:
            self._loop.selector.unregister(self._socket)
            self._socket.settimeout(5.0)
            self._flush()
        self._socket.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                kind, descriptors, fields = self._unsent[0]
                parent_messages.send(self._socket, kind, descriptors, **fields)
                self._unsent.popleft()
        except (BlockingIOError, TimeoutError):
            pass
        except OSError:
            self._lose()
            return
        if not self._gone and self._socket.gettimeout() == 0.0:
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
            if self._loop.selector.get_key(self._socket).events != mask:
                self._loop.selector.modify(self._socket, mask, self._ready)

    def _ready(self, mask: int, now: float) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush()
        if not mask & selectors.EVENT_READ or self._gone:
            return
        try:
            message = parent_messages.receive(self._socket)
        except BlockingIOError:
            return
        if message is None:
            self._lose()
            return
        kind, fields, _ = message
        match kind:
            case "stop":
                self._loop.emit(StopRequested(str(fields["reason"])))
            case "scale":
                self._loop.emit(ScaleRequested(int(fields["workers"])))
            case "kill":
                self._loop.kill(str(fields["reason"]))

    def _lose(self) -> None:
        if self._gone:
            return
        self._gone = True
        self.due = self._loop.clock.now() + self._patience
        self._unsent.clear()
        if self._socket.gettimeout() == 0.0:
            self._loop.selector.unregister(self._socket)
        self._loop.emit(StopRequested("the calling process is gone"))
