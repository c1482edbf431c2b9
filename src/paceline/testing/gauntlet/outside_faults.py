"""Failures from outside of the workers: real signals to real processes of one run, at planned moments.

Processes are found in the run's journal and are signalled through a descriptor (pidfd) that is checked to
belong to a descendant of this process: a number that was reused meanwhile is never hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Self, final

import psutil

from paceline.control import supervisor_address
from paceline.control.messages import ToolRequest
from paceline.core import events, journal
from paceline.core.errors import PacelineError
from paceline.elastic.supervisor import tool_client
from paceline.testing.gauntlet.plans import OutsideAction

_LOOK_SECONDS = 0.01
_ASK_SECONDS = 5.0


@final
class OutsideFaults:
    """Executor of the acts beside a run that starts meanwhile; `done` counts those that met something."""

    def __init__(self, folder: Path, acts: Sequence[OutsideAction]) -> None:
        self._folder, self._acts = folder, list(acts)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-assault", daemon=True)
        self.done: Counter[str] = Counter()
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        if self._acts:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._acts:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not _pids(self._folder):
                if self._over.wait(_LOOK_SECONDS):
                    return
            began = time.monotonic()
            for act in self._acts:
                if self._over.wait(max(0.0, began + act.at - time.monotonic())):
                    return
                self.done[act.kind] += self._do(act)
        except BaseException as error:
            self.error = error  # shown with the run that it belongs to

    def _do(self, act: OutsideAction) -> bool:
        match act.kind:
            case "kill supervisor":
                with contextlib.suppress(PacelineError):
                    return self._signal(supervisor_address.read(self._folder).pid, signal.SIGKILL)
                return False  # it is being started again
            case "kill all":
                return sum(self._signal(pid, signal.SIGKILL) for pid in _pids(self._folder)) > 0
            case "scale":
                return self._ask(ToolRequest(what="scale", number=act.number))
            case "end":
                return self._ask(ToolRequest(what="stop", text="the gauntlet resumes it"))
        pids = _pids(self._folder)
        pid = pids[act.number % len(pids)]
        if act.kind != "stop":
            return self._signal(pid, signal.SIGKILL if act.kind == "kill" else signal.SIGTERM)
        stopped = self._signal(pid, signal.SIGSTOP)
        if stopped:
            self._over.wait(act.seconds)
            self._signal(pid, signal.SIGCONT)
        return stopped

    def _signal(self, pid: int, number: signal.Signals) -> bool:
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            descriptor = os.pidfd_open(pid)
            try:
                if any(parent.pid == os.getpid() for parent in psutil.Process(pid).parents()):
                    signal.pidfd_send_signal(descriptor, number)
                    return True
            finally:
                os.close(descriptor)
        return False

    def _ask(self, question: ToolRequest) -> bool:
        """Ask until the supervisor answers: it may be restarting. False where it refuses, or the run ends."""
        until = time.monotonic() + _ASK_SECONDS
        while time.monotonic() < until and not self._over.is_set():
            with contextlib.suppress(PacelineError):
                return tool_client.ask(self._folder, question, seconds=1.0).done
            self._over.wait(_LOOK_SECONDS)
        return False


def _pids(folder: Path) -> list[int]:
    """Return the workers of the newest view."""
    file = folder / "journal.jsonl"
    lines = journal.iterate(file) if file.exists() else ()
    views = [one for one in lines if isinstance(one, events.ViewChanged)]
    return views[-1].pids if views else []
