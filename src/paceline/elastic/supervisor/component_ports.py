"""Ports of the supervisor's components: what they may use of its loop, and of each other.

The loop itself is in supervisor.py. A component registers its sockets with the selector (the key's data is a
function of the mask and the time), and gives the loop a `due` time and a `tick`. What happened is emitted as
an event for the machine, which decides after the component has returned: components never call the machine.
"""

from __future__ import annotations

import selectors
from collections import deque
from typing import Protocol, final

from paceline.control.messages import Dismissed, WorkerExited, WorkerFileChunk
from paceline.core.clock import Clock
from paceline.elastic.machine.machine_events import MachineEvent
from paceline.elastic.supervisor.worker_record import WorkerRecord


class Component(Protocol):
    """A part of the supervisor with work at times of its choice; `due` is infinite while there is none."""

    @property
    def due(self) -> float: ...

    def tick(self, now: float) -> None: ...


class EventLoop(Protocol):
    """The loop, as components see it."""

    @property
    def clock(self) -> Clock: ...

    @property
    def selector(self) -> selectors.BaseSelector: ...

    def emit(self, event: MachineEvent) -> None:
        """Queue an event for the machine, behind those that were emitted before it."""

    def kill(self, reason: str) -> None:
        """End the job at once; the first reason counts."""


class WorkerProcesses(Protocol):
    """The processes of workers, as the executor of actions uses them."""

    def start(self, member: int, slot: int, agent_id: int) -> None: ...
    def kill(self, record: WorkerRecord, reason: str) -> None: ...
    def dismiss(self, record: WorkerRecord, dismissal: Dismissed, seconds: float) -> None: ...
    def limit_exit(self, record: WorkerRecord, seconds: float) -> None: ...
    def remove_agent(self, agent_id: int, reason: str, *, refuse: bool = False) -> None: ...


class WorkerConnections(Protocol):
    """The processes of workers, as the handlers of members and agents use them."""

    def joined(self, record: WorkerRecord) -> None: ...
    def disconnected(self, record: WorkerRecord, reason: str) -> None: ...
    def remote_exit(self, agent_id: int, message: WorkerExited) -> None: ...
    def remote_file(self, agent_id: int, chunk: WorkerFileChunk) -> None: ...
    def remove_agent(self, agent_id: int, reason: str, *, refuse: bool = False) -> None: ...


@final
class Loop:
    """The loop, as the supervisor runs it. `kill_reason` is why the job ends at once, without saving; empty:
    it does not."""

    def __init__(self, clock: Clock, selector: selectors.BaseSelector) -> None:
        self.clock = clock
        self.selector = selector
        self.events: deque[MachineEvent] = deque()
        self.kill_reason = ""

    def emit(self, event: MachineEvent) -> None:
        self.events.append(event)

    def kill(self, reason: str) -> None:
        self.kill_reason = self.kill_reason or reason
