"""Probes of a worker's process: its Python stack, the kernel's state of it, and the phase on its page.

StackProbe asks a worker of this host for its stack: for a verdict. ProcessProbe asks whether the processes
of workers without heartbeats run: their interpreter may be held by a call, so that they cannot be asked, but
the kernel knows whether it schedules the process, and the page that a worker writes when it enters a phase
tells since when it is in it. Neither does anything to a process.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from paceline.control.messages import StackReply, StackRequest
from paceline.core import phase_page
from paceline.core.process_state import is_stopped_or_frozen, state_letter
from paceline.elastic.machine.machine_events import ProcessProbed
from paceline.elastic.machine.settings import LOCAL_AGENT
from paceline.elastic.supervisor.agents import Agents
from paceline.elastic.supervisor.component_ports import EventLoop
from paceline.elastic.supervisor.worker_record import WorkerRecords
from paceline.engines.local.worker_handle import WorkerProcess

STACK_SECONDS: Final = 0.4
MAX_STACK_SECONDS: Final = 1.0  # for a process that is ready to run and waits for a processor
PROBE_POLL_SECONDS: Final = 0.02


@final
class StackProbe:
    """Asks one worker of this host for its stack.

    The worker writes its stack to a file when it gets a signal, also while a call holds the interpreter's
    lock. Dumping takes a few milliseconds, so the owner polls `is_over` every PROBE_POLL_SECONDS, until the
    dump has stopped growing or STACK_SECONDS are over. Where the host is overloaded, the process gets
    MAX_STACK_SECONDS as long as the kernel calls it ready to run. `state` is the kernel's, from before the
    signal.
    """

    def __init__(self, process: WorkerProcess, now: float) -> None:
        self._process = process
        self._began = now
        self._size = 0
        self.state = kernel_state(process.pid)
        if not process.has_ended:
            process.request_stack()

    def wake(self) -> None:
        """Let a stopped process run to write its stack; only for a process that is killed afterwards."""
        if self.state:
            self._process.signal(signal.SIGCONT)

    def is_over(self, now: float) -> bool:
        """Return whether the stack is complete, or time is up."""
        before, self._size = self._size, self._process.stack_size()
        if self._process.has_ended or (self._size > 0 and self._size == before):
            return True
        if now < self._began + STACK_SECONDS:
            return False
        return now >= self._began + MAX_STACK_SECONDS or state_letter(self._process.pid) != "R"

    def frames(self) -> list[str]:
        """Return the frames, innermost first."""
        return self._process.frames() if self._process.stack_size() else []


@final
@dataclass(frozen=True)
class ProcessProbe:
    """Probes workers of this host at once; agents are asked about theirs, and may not answer."""

    loop: EventLoop
    records: WorkerRecords
    agents: Agents
    folder: Path

    def probe(self, members: Iterable[int]) -> None:
        """Emit a ProcessProbed for each member whose process is there."""
        for member in members:
            record = self.records.live.get(member)
            if record is None:
                continue
            process = record.process
            if record.agent_id != LOCAL_AGENT:
                self.agents.request(record.agent_id, StackRequest(member=member, probe=True))
            elif process is not None and process.pid and not process.has_ended:
                stopped = is_stopped_or_frozen(process.pid)
                if stopped is not None:
                    self.loop.emit(self._probed(member, stopped))

    def reply(self, reply: StackReply) -> None:
        """Handle the answer of an agent."""
        if reply.stopped is not None:
            self.loop.emit(ProcessProbed(reply.member, reply.stopped))

    def _probed(self, member: int, stopped: bool) -> ProcessProbed:
        page = phase_page.read(phase_page.page_file(self.folder, member))
        if page is None:
            return ProcessProbed(member, stopped)
        # Both times are of the machine's monotonic clock, which stands still while the machine is suspended.
        now = self.loop.clock.now()
        ran = max(0.0, now - page.ran) if page.ran else -1.0
        return ProcessProbed(member, stopped, page.phase, max(0.0, now - page.since), ran)


def kernel_state(pid: int) -> str:
    """Describe the kernel's state of a process of this host; empty where it runs or cannot be seen."""
    letter = state_letter(pid)
    if letter not in "Tt" and is_stopped_or_frozen(pid):
        return "the process is frozen (cgroup freezer)"
    return {
        "T": "the process is stopped (SIGSTOP)",
        "t": "the process is stopped by a debugger",
        "D": "the process waits for the kernel (disk or network file system)",
        "Z": "the process has ended",
    }.get(letter, "")
