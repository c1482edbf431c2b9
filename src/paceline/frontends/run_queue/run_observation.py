"""What a run of the queue does now: from its locks, the exit code of its process, its journal, the settings
in its folder, and its supervisor.

A run lives as long as any of its processes does: its own process (the lock `alive-N`), or the supervisor and
the workers that outlive it for as long as they save (the locks in the run's folder). The kernel releases the
locks however a process ends, so that a server which was started anew needs to remember nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from paceline.control import liveness_lock, supervisor_address
from paceline.control.messages import ToolRequest
from paceline.control.run_status import RunStatus
from paceline.core import journal, untrusted
from paceline.core.errors import PacelineError
from paceline.core.events import RunEnded, RunFailed, RunResumed, RunStarted, StepCommitted
from paceline.core.host import host_identity
from paceline.elastic.supervisor import tool_client
from paceline.frontends.run_queue.queue_folder import QueueFolder
from paceline.frontends.run_queue.queued_run import QueuedRun
from paceline.frontends.run_queue.run_endings import RunEnd
from paceline.frontends.run_queue.run_host import read_code, read_group
from paceline.train.state import run_lock
from paceline.train.state.run_folder import RunFolder

ASK_SECONDS: Final = 2.0
TAIL_LINES: Final = 12
_TAIL_BYTES: Final = 1 << 14


@final
@dataclass(frozen=True)
class SizeLimits:
    """The sizes that the run itself accepts; `is_elastic`: it has a supervisor, which can change its size."""

    most: int | None = None
    is_elastic: bool = True


def exit_code(folder: QueueFolder, run: QueuedRun) -> int | None:
    """Return the exit code of the run's process at this attempt; None: it lives, or its end was not seen."""
    return read_code(_exit_file(folder, run))


def process_group(folder: QueueFolder, run: QueuedRun) -> int | None:
    """Return the process group of a run whose process lives here. The number cannot be used for another one
    while the lock is held."""
    held = is_here(run) and run_lock.is_held(folder.alive_file_of(run.id, run.attempt))
    return read_group(_exit_file(folder, run)) if held else None


def is_here(run: QueuedRun) -> bool:
    """Return whether the numbers of a run's processes mean the same to this process: locks of a file system
    that several machines share say that a run lives, and not where."""
    return run.host in ("", host_identity())


def processes(run: QueuedRun) -> list[int]:
    """Return the supervisor and the workers of a run here, which outlive its process to save."""
    return liveness_lock.holders(Path(run.request.run_dir)) if is_here(run) else []


def _exit_file(folder: QueueFolder, run: QueuedRun) -> bytes:
    try:
        return untrusted.read_regular(folder.exit_file_of(run.id, run.attempt))
    except OSError:
        return b""


def is_alive(folder: QueueFolder, run: QueuedRun) -> bool:
    """Return whether any process of the run lives."""
    path = Path(run.request.run_dir)
    process = exit_code(folder, run) is None and run_lock.is_held(folder.alive_file_of(run.id, run.attempt))
    return process or run_lock.is_held(RunFolder(path).lock_file) or not liveness_lock.is_free(path)


def end_of(folder: QueueFolder, run: QueuedRun) -> RunEnd:
    """Return how a run ended that no process works on."""
    step, reason = progress(Path(run.request.run_dir))
    return RunEnd(
        code=exit_code(folder, run),
        step=step,
        stop_reason=reason,
        other_boot=bool(run.host) and run.host != host_identity(),
        tail=last_lines(folder.log_of(run.id)),
    )


def limits(run_dir: Path) -> SizeLimits | None:
    """Return what the settings in the run's folder say about its size; None before it has begun."""
    try:
        settings: dict[str, Any] = tomllib.loads(
            untrusted.read_regular(RunFolder(run_dir).config_file).decode()
        )
        care = settings.get("fault_tolerance", {})
        exact = settings.get("mode", "exact") == "exact"
        shards = settings.get("shards")
        return SizeLimits(
            most=int(shards) if exact and shards is not None else None,
            is_elastic=bool(care.get("enabled", True)),
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def progress(run_dir: Path) -> tuple[int, str]:
    """Return the last step in the run's journal, and why it ended; the reason is empty where it has not."""
    step, reason = 0, ""
    with suppress(OSError):
        for event in journal.last_events(RunFolder(run_dir).journal_file):
            match event:
                case RunStarted():
                    step, reason = 0, ""
                case RunResumed() | StepCommitted():
                    step, reason = event.step, ""
                case RunEnded() | RunFailed():
                    step, reason = event.step, event.reason
    return step, reason


def has_supervisor(run_dir: Path) -> bool:
    """Return whether a supervisor of the run says where it listens."""
    return (run_dir / supervisor_address.ADDRESS_FILE).exists()


def workers_now(run_dir: Path) -> int | None:
    """Return how many workers the run has, those that are about to leave among them; None where its
    supervisor does not answer."""
    answer = request(run_dir, ToolRequest(what="status"))
    if answer is None:
        return None
    try:
        return len(RunStatus.from_plain(answer).workers)
    except PacelineError:
        return None


def ask_to_scale(run_dir: Path, workers: int) -> bool:
    """Have the run grow or shrink; return whether its supervisor agreed."""
    return request(run_dir, ToolRequest(what="scale", number=workers)) is not None


def ask_to_stop(run_dir: Path, reason: str) -> bool:
    """Have the run finish its step, save and end; return whether its supervisor agreed."""
    return request(run_dir, ToolRequest(what="stop", text=reason)) is not None


def request(run_dir: Path, what: ToolRequest) -> dict[str, Any] | None:
    """Return the facts of the supervisor's answer; None where it does not answer, or refuses."""
    try:
        answer = tool_client.ask(run_dir, what, ASK_SECONDS)
    except (PacelineError, OSError):
        return None
    return dict(answer.facts) if answer.done else None


def last_lines(log: Path, lines: int = TAIL_LINES) -> tuple[str, ...]:
    """Return the last lines of what a run printed, for people."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(_shown(text.splitlines())[-lines:])


def _shown(lines: Iterable[str]) -> list[str]:
    return [untrusted.printable(line.rstrip()) for line in lines if line.strip()]
