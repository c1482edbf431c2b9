"""The supervisor's side of its caller: hears what it wants, and leaves with it what a successor needs.

When the caller is gone, the job is asked to save and end; what has not ended after a while is killed: nobody
would ever miss it. Must not know what the caller is.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, final

from paceline.elastic import job
from paceline.elastic.model import ScaleAsked, StopAsked
from paceline.engines.local.protocol import Plain
from paceline.engines.local.worker import Worker

if TYPE_CHECKING:
    from paceline.elastic.supervisor import Supervisor


@final
class Caller:
    """`kept`: pid and descriptors of workers that an earlier supervisor left, by member. `patience`: seconds
    that the job has to end by itself once the caller is gone; `due` is when they are over."""

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        supervisor: Supervisor,
        patience: float,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._selector = selector
        self._supervisor = supervisor
        self._waiting: deque[tuple[str, tuple[int, ...], dict[str, Plain]]] = deque()
        self.kept: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.gone = False
        self.due = float("inf")
        self._patience = patience
        selector.register(sock, selectors.EVENT_READ, self._ready)

    def say(self, kind: str, descriptors: tuple[int, ...] = (), **fields: Plain) -> None:
        """Tell the caller, now or when it listens."""
        if self.gone:
            return
        self._waiting.append((kind, descriptors, fields))
        self._flush()

    def tick(self, now: float) -> None:
        """The caller has been gone for long enough."""
        if now >= self.due:
            self.due = float("inf")
            self._supervisor.kill(f"the calling process is gone, and {self._patience:g} s were not enough")

    def keep(self, member: int, worker: Worker) -> None:
        """Leave a worker's descriptors with the caller."""
        self.say("keep", worker.keep(), member=member, pid=worker.pid)

    def drop(self, member: int) -> None:
        """The worker is gone."""
        # Those that wait to be sent are closed by now.
        self._waiting = deque(
            one for one in self._waiting if not (one[0] == "keep" and one[2].get("member") == member)
        )
        self.say("drop", member=member)

    def close(self) -> None:
        """Tell what waits, and end."""
        if not self.gone:
            self._selector.unregister(self._socket)
            self._socket.settimeout(5.0)
            self._flush()
        self._socket.close()

    def _flush(self) -> None:
        try:
            while self._waiting:
                kind, descriptors, fields = self._waiting[0]
                job.send(self._socket, kind, descriptors, **fields)
                self._waiting.popleft()
        except (BlockingIOError, TimeoutError):
            pass
        except OSError:
            self._lose()
            return
        if not self.gone and self._socket.gettimeout() == 0.0:
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._waiting else 0)
            if self._selector.get_key(self._socket).events != mask:
                self._selector.modify(self._socket, mask, self._ready)

    def _ready(self, mask: int, now: float) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush()
        if not mask & selectors.EVENT_READ or self.gone:
            return
        try:
            message = job.receive(self._socket)
        except BlockingIOError:
            return
        if message is None:
            self._lose()
            return
        kind, fields, _ = message
        match kind:
            case "stop":
                self._supervisor.feed(StopAsked(str(fields["reason"])))
            case "scale":
                self._supervisor.feed(ScaleAsked(int(fields["workers"])))
            case "kill":
                self._supervisor.kill(str(fields["reason"]))

    def _lose(self) -> None:
        if self.gone:
            return
        self.gone = True
        self.due = time.monotonic() + self._patience
        self._waiting.clear()
        if self._socket.gettimeout() == 0.0:
            self._selector.unregister(self._socket)
        self._supervisor.feed(StopAsked("the calling process is gone"))
