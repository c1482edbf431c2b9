"""Queues for tests: requests, and a server in this process whose runs are small shell programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

from paceline.core.clock import Clock
from paceline.engines.local.linux import own_children
from paceline.frontends.run_queue.queue_client import add_run
from paceline.frontends.run_queue.queue_folder import QueueFolder
from paceline.frontends.run_queue.queue_server import QueueServer
from paceline.frontends.run_queue.queued_run import QueuedRun, RunRequest

# In the place of Python: `python -m paceline train SCRIPT OPTIONS...` is then a shell program with options.
_SHELL = '#!/bin/sh\nshift 3\nexec sh "$@"\n'


def request(folder: Path, /, **changes: Any) -> RunRequest:
    made = RunRequest(
        script="train.py",
        options=("train.py",),
        folder=str(folder),
        python="python3",
        run_dir=str(folder / "run"),
        name="train",
    )
    return replace(made, **changes)


class Served:
    """A queue, and its server; `lines` are what the server told."""

    def __init__(self, place: Path, capacity: int, steady: Clock | None) -> None:
        self.steady = steady
        self.place = place
        self.capacity = capacity
        self.folder = QueueFolder.at(str(place / "queue"))
        self.lines: list[str] = []
        self._servers: list[QueueServer] = []
        self._children_before = set(own_children())  # of other tests of this process: a fork server stays
        self.restart()

    def restart(self) -> None:
        """A new server, which knows what is on disk and nothing else."""
        self.server = QueueServer(self.folder, self.capacity, self.lines.append, steady=self.steady)
        self._servers.append(self.server)

    def add(self, program: str, name: str = "train", **changes: Any) -> int:
        """Put a shell program into the queue; return its number."""
        shell = self.place / "shell"
        if not shell.exists():
            shell.write_text(_SHELL)
            shell.chmod(0o755)
        number = self.folder.read().next_id
        (self.place / f"{number}.sh").write_text(program)
        made = request(
            self.place,
            python=str(shell),
            script=f"{number}.sh",
            options=(f"{number}.sh",),
            run_dir=str(self.place / "runs" / str(number)),
            name=name,
            **changes,
        )
        self.folder.change(lambda content: replace(content, capacity=self.capacity))
        return add_run(self.folder, made).id

    def has_no_children(self) -> bool:
        """Have the servers of before see the ends of their children, too."""
        for server in self._servers:
            server.look()
        return self._children_before.issuperset(own_children())

    def run(self, number: int) -> QueuedRun:
        return next(run for run in self.folder.read().runs if run.id == number)

    def state(self, number: int) -> str:
        return self.run(number).state

    def until(self, condition: Callable[[], Any], what: str = "") -> None:
        def looked() -> bool:
            if condition():
                return True
            self.server.look()
            return False

        wait_for(looked, f"{what} {[(run.id, run.state, run.reason) for run in self.folder.read().runs]}")

    def until_state(self, number: int, state: str) -> None:
        self.until(lambda: self.state(number) == state, f"run {number} is not {state}:")


@contextmanager
def served(place: Path, capacity: int = 2, steady: Clock | None = None) -> Iterator[Served]:
    """No process of the queue is left in the end."""
    queue = Served(place, capacity, steady)
    try:
        yield queue
    finally:
        (place / "go").touch()
        queue.until(lambda: not queue.folder.read().has_work)
        wait_for(queue.has_no_children)
