"""What the supervisor knows of each worker: its process, its connection, what it said last.

Must not know what is to be done about it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from paceline.core import machine
from paceline.core.control.messages import Beat, Dismissed, Hello, Prepare, Progress, Raised, Stop, View
from paceline.elastic.model import HOME, FailureKind
from paceline.elastic.shell.connection import Connection
from paceline.engines.local.worker import Worker


@final
@dataclass
class Seat:
    """One incarnation of a worker.

    heard       the highest number of its messages that was heard; `confirmed`: that it was told so
    cut_at      since when it has no connection, though it had one
    prepare, view, stop   what it was told last: told again after a reconnect
    dismissed   it was told to end, with `goodbye`; leave_by: when it must have
    expelled    nothing that it says counts any more
    process     its pid and machine as an earlier supervisor knew them
    inherited   an earlier supervisor started it
    watched     its process's end wakes the loop; ended_at: when it did
    """

    member: int
    slot: int
    place: int = HOME
    worker: Worker | None = None
    connection: Connection | None = None
    hello: Hello | None = None
    beat: Beat | None = None
    beat_at: float = 0.0
    progress: Progress | None = None
    heard: int = 0
    confirmed: int = 0
    cut_at: float | None = None
    cut_why: str = ""
    prepare: Prepare | None = None
    view: View | None = None
    stop: Stop | None = None
    goodbye: Dismissed | None = None
    raised: Raised | None = None
    dismissed: bool = False
    expelled: bool = False
    done: bool = False
    process: tuple[int, str] = (0, "")
    inherited: bool = False
    leave_by: float = field(default=float("inf"))
    watched: bool = False
    ended_at: float = field(default=float("inf"))

    @property
    def pid(self) -> int:
        if self.worker is not None and self.worker.pid:
            return self.worker.pid
        return self.hello.pid if self.hello is not None else self.process[0]

    @property
    def hostname(self) -> str:
        return self.hello.hostname if self.hello is not None else self.process[1]

    @property
    def phase(self) -> str:
        return self.beat.phase if self.beat is not None else "start"


def how_it_ended(status: int) -> tuple[FailureKind, str]:
    """A process's exit status in one word and in a sentence."""
    if status >= 0:
        return "exit", f"the process exited with code {status}"
    number = -status
    try:
        name = f"{number} ({signal.Signals(number).name})"
    except ValueError:
        name = str(number)
    kind: FailureKind = "preempted" if number == signal.SIGTERM else "crash"
    return kind, f"the process was killed by signal {name}"


def is_stopped(pid: int) -> bool | None:
    """Whether the kernel does not let a process of this machine run; None where there is no such process."""
    state = _letter(pid)
    if not state or state in "ZXx":
        return None
    if state in "Tt":
        return True
    return machine.is_frozen(Path(f"/proc/{pid}"))


def _letter(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def kernel_state(pid: int) -> str:
    """What the kernel says a process of this machine does; empty where it runs or cannot be seen."""
    if is_stopped(pid) and _letter(pid) not in "Tt":
        return "the process is frozen (cgroup freezer)"
    return {
        "T": "the process is stopped (SIGSTOP)",
        "t": "the process is stopped by a debugger",
        "D": "the process waits for the kernel (disk or network file system)",
        "Z": "the process has ended",
    }.get(_letter(pid), "")
