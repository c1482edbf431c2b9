"""Processes that serve a queue: this one, or one in the background that is started on demand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import PacelineError, PlatformError
from paceline.core.wording import counted
from paceline.frontends.run_queue.queue_client import own_workers
from paceline.frontends.run_queue.queue_folder import QueueFolder, WakeUps
from paceline.frontends.run_queue.queue_server import QueueServer

_SERVER_SECONDS: Final = 20.0
_PAUSE: Final = 0.02
# The shell that adds the first run has them for that run, which keeps them; the server is for all runs.
_OF_A_RUN: Final = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def serve(
    folder: QueueFolder,
    capacity: int | None,
    tell: Callable[[str], None],
    *,
    until_empty: bool = False,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Serve the queue in this process until `is_over`, or until all its runs have ended."""
    with ExitStack() as closing:
        closing.enter_context(folder.serving())
        if capacity is not None:
            folder.change(lambda content: replace(content, capacity=capacity))
        size = folder.read().capacity or own_workers()
        # Commands have another environment than this process, and would count otherwise.
        folder.change(lambda content: replace(content, counted=size))
        tell(f"serving the queue {folder.path} with {counted(size, 'worker')}")
        wakes = WakeUps(folder)
        closing.callback(wakes.close)
        server = QueueServer(folder, size, tell)
        while not is_over():
            pause = server.look()
            if until_empty and _ended_empty(folder, closing):
                tell("all runs have ended")
                return
            wakes.wait(pause)


def _ended_empty(folder: QueueFolder, served: ExitStack) -> bool:
    """End the service of a queue without work; False where it has some, or cannot be read now: the server
    has said why, and looks again."""
    try:
        with folder.locked():
            # Under the lock: a command that adds a run after this sees that no server is there.
            if folder.read().has_work:
                return False
            served.close()
            return True
    except PacelineError:
        return False


def start_server(folder: QueueFolder, clock: Clock | None = None) -> bool:
    """See to it that a server works on the queue; return whether one was started. It ends by itself when all
    runs have ended."""
    clock = clock or MonotonicClock()
    if folder.is_served:
        return False
    command = [
        sys.executable,
        "-m",
        "paceline",
        "queue",
        "serve",
        "--queue",
        str(folder.path),
        "--until-empty",
    ]
    try:
        with open(folder.server_log, "ab") as log:
            start = log.tell()
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
                env={name: value for name, value in os.environ.items() if name not in _OF_A_RUN},
            )
    except OSError as error:
        raise PlatformError(
            f"no server can be started for the queue: {error.filename}: {error.strerror}",
            remedy="the run is in the queue: mend that, and serve it with `paceline queue serve`",
        ) from error
    until = clock.now() + _SERVER_SECONDS
    while not folder.is_served and folder.read().has_work:
        if child.poll() is not None or clock.now() > until:
            said = folder.server_log.read_bytes()[start:].decode("utf-8", "replace").strip()
            if folder.is_served or (child.poll() is not None and not folder.read().has_work):
                break  # another command's server came first, or it is done already
            raise PlatformError(
                f"the server of the queue did not start: {said.splitlines()[-1] if said else 'no output'}",
                remedy=f"the run is in the queue: see {folder.server_log}, and serve it with "
                "`paceline queue serve`",
            )
        clock.sleep(_PAUSE)
    return True
