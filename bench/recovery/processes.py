"""Processes that a benchmark starts: whole families that end with it, their output in a file.

Only processes started here, and their descendants, are ever signalled. Must not know what they run.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, final

import psutil

from paceline.core.errors import CommTimeoutError, RankFailedError

ROOT = Path(__file__).parents[2]
END_SECONDS = 20.0


@final
class Family:
    """Commands that belong together; leaving the context ends all of them and whatever they started."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._started: list[subprocess.Popen[bytes]] = []
        self._known: dict[int, psutil.Process] = {}

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """Runs `command` from the project's root; gives its pid."""
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    **(environment or {}),
                },
            )
        self._started.append(process)
        return process.pid

    def running(self) -> bool:
        """Whether every command still runs."""
        return all(process.poll() is None for process in self._started)

    def status(self) -> list[int | None]:
        return [process.poll() for process in self._started]

    def wait(self, index: int, seconds: float) -> int:
        """The exit status of the command that was started as number `index`."""
        try:
            return self._started[index].wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise CommTimeoutError(
                f"{self._started[index].args!r} has not ended after {seconds:.0f} s\n{self.tail()}"
            ) from error

    def finish(self, seconds: float) -> None:
        """Waits for the first command's end; an error unless it went well."""
        status = self.wait(0, seconds)
        if status != 0:
            raise RankFailedError(f"{self._started[0].args!r} ended with {status}\n{self.tail()}")

    def descendants(self) -> list[psutil.Process]:
        """All living processes below the commands; also orphans, if they were seen before."""
        for process in self._started:
            try:
                for child in psutil.Process(process.pid).children(recursive=True):
                    self._known.setdefault(child.pid, child)
            except psutil.NoSuchProcess:
                continue
        self._known = {pid: child for pid, child in self._known.items() if child.is_running()}
        return list(self._known.values())

    def suspend(self) -> None:
        """Stops all of them, parents first: no process sees another stand still."""
        for process in self.processes():
            process.suspend()

    def resume(self) -> None:
        """Lets all of them go on."""
        for process in reversed(self.processes()):
            process.resume()

    def processes(self) -> list[psutil.Process]:
        """The commands and all living processes below them."""
        return [*(psutil.Process(process.pid) for process in self._started), *self.descendants()]

    def tail(self, size: int = 3000) -> str:
        """The end of what they printed."""
        if not self.log.exists():
            return ""
        return self.log.read_bytes()[-size:].decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        below = self.descendants()
        for process in self._started:
            process.kill()
        for child in below:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        for process in self._started:
            process.wait()
        psutil.wait_procs(below, timeout=END_SECONDS)
