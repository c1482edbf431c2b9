"""`srun -N 4 paceline train script.py`: one srun starts the same command on every node. Its first task
trains, and starts agents as steps beside it; the others wait for its end, so that srun has one exit code.

They know of each other by a file in the working directory, which nodes share: the first task writes to it
every few seconds and removes it at its end. A first task that was killed stops writing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from paceline.core.atomic_file import replace_file
from paceline.core.errors import PeerLostError, PlatformError
from paceline.engines.slurm.allocation import StepTask
from paceline.engines.slurm.shared_folder import FOLDER

WRITE_SECONDS: Final = 2.0
_SILENCE_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.5


def sign_of_life(task: StepTask, folder: Path) -> Path:
    """Return the file that the first task of a step writes to."""
    return folder / FOLDER / f"step-{task.job}.{task.step}"


@contextlib.contextmanager
def first_task(task: StepTask, folder: Path, write_seconds: float = WRITE_SECONDS) -> Iterator[None]:
    """Keep the other tasks of this step waiting while the block runs."""
    file, over = sign_of_life(task, folder), threading.Event()

    def write() -> None:
        number = 0
        while not over.is_set():
            number += 1
            with contextlib.suppress(PlatformError):  # a full disk, a file server that is away for a while
                replace_file(file, str(number).encode(), mode=0o600)
            over.wait(write_seconds)

    replace_file(file, b"0", mode=0o600)  # raises here where the folder cannot be written to
    thread = threading.Thread(target=write, name="paceline-slurm-task", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another run has files in it
            file.parent.rmdir()


def wait_for_first_task(
    task: StepTask,
    folder: Path,
    silence_seconds: float = _SILENCE_SECONDS,
    look_seconds: float = _LOOK_SECONDS,
) -> None:
    """Wait until the first task of this step has ended; PeerLostError where it has stopped writing."""
    file, last, changed_at = sign_of_life(task, folder), b"", time.monotonic()
    seen = unreadable = False
    while True:
        try:
            content = file.read_bytes()
            seen = True
        except FileNotFoundError:
            if seen:
                return
            content = b""  # it has not begun, or has ended before this task looked
        except OSError:
            content, unreadable = last, True  # a file server that is away for a while
        if content != last:
            last, changed_at = content, time.monotonic()
        if time.monotonic() - changed_at > silence_seconds:
            if not seen and not unreadable:
                return
            raise PeerLostError(
                f"the first task of step {task.job}.{task.step} has stopped without a word",
                remedy="see its output above; was it killed? Start again with --resume auto",
            )
        time.sleep(look_seconds)
