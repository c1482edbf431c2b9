"""Runs on disk: find them, tell how each ended and what it takes, choose those to delete, delete them.

There is no registry: a run is a folder with a config.toml, its journal says how far it came and how it ended,
and its lock whether it runs now. `runs_to_remove` decides and touches nothing; `remove_runs` acts, and asks
each run's lock again before it does.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, final

from paceline.checkpoint.checksummed_json import decode_document
from paceline.checkpoint.loader import read_document
from paceline.checkpoint.store import TAGS, CheckpointStore
from paceline.control import liveness_lock
from paceline.core import events, journal
from paceline.core.errors import PacelineError, PlatformError, UsageError
from paceline.train.state.run_folder import RunFolder
from paceline.train.state.run_lock import held, is_held

RunPhase = Literal["running", "finished", "stopped", "failed", "interrupted", "not begun"]

FINISHED: Final = "finished"  # the reason of a RunEnded that came to its end
_FIRST_BYTES: Final = 1 << 16


@final
@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """One run on disk. "interrupted": the journal has no end, and no process works on it.

    reason    a sentence about the end; empty where there is none
    step      the last one in the journal, and its `loss`
    hash      of the state that it ended with
    versions  of checkpoints in the folder itself, and their `tags` ("?" where these cannot be read)
    started   wall-clock seconds, as `changed`, which is the time of the last event
    """

    path: Path
    phase: RunPhase
    reason: str = ""
    step: int = 0
    loss: float = math.nan
    hash: str = ""
    versions: int = 0
    tags: tuple[str, ...] = ()
    bytes: int = 0
    started: float = 0.0
    changed: float = 0.0


def find_runs(
    folder: str | os.PathLike[str], on_closed: Callable[[Path], None] = lambda path: None
) -> list[FoundRun]:
    """Return the runs directly below a folder, oldest first; of the folder of a run, that run alone.
    `on_closed` is told of folders in which this user may not look."""
    root = Path(folder).absolute()
    if RunFolder(root).holds_run():
        return [look_at(root)]
    try:
        below = [Path(entry.path) for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        raise UsageError(f"there is no folder {root}", remedy="give the folder that holds runs") from None
    except OSError as error:
        raise PlatformError(
            f"{root} cannot be searched for runs: {error.strerror}",
            remedy="check the path and its permissions",
        ) from error
    found: list[FoundRun] = []
    for path in below:
        try:
            if RunFolder(path).holds_run():
                found.append(look_at(path))
        except (PlatformError, PermissionError):
            on_closed(path)
    return sorted(found, key=lambda run: (run.started, run.path.name))


def is_running(path: Path) -> bool:
    """Return whether any process of the run in this folder lives: its caller, its supervisor or a worker."""
    return is_held(RunFolder(path).lock_file) or not liveness_lock.is_free(path)


def look_at(path: Path) -> FoundRun:
    """Return what the folder of one run holds."""
    folder = RunFolder(path)
    end = _end(folder)
    if is_running(path):
        end.phase, end.reason = "running", ""
    # A job that was started without a Trainer has a journal and no settings.
    made = (folder.config_file if folder.config_file.exists() else path).stat().st_mtime
    versions, tags = _versions(folder)
    return FoundRun(
        path=path,
        phase=end.phase,
        reason=end.reason,
        step=end.step,
        loss=end.loss,
        hash=end.hash,
        versions=versions,
        tags=tags,
        bytes=_bytes(path),
        started=_first_time(folder.journal_file) or made,
        changed=end.changed or made,
    )


def runs_to_remove(
    runs: Iterable[FoundRun],
    *,
    now: float,
    keep_last: int = 0,
    older_than: float = 0.0,
    phases: Sequence[RunPhase] | None = None,
) -> list[FoundRun]:
    """Choose the runs to delete: those of these `phases` (None: any) without an event for `older_than`
    seconds, but for the `keep_last` that changed last. A run that is running or has a tagged version is
    never among them."""
    by_change = sorted(runs, key=lambda run: (run.changed, run.path.name), reverse=True)
    kept = {run.path for run in by_change[:keep_last]}
    return [
        run
        for run in reversed(by_change)
        if run.path not in kept
        and run.phase != "running"
        and not run.tags
        and (phases is None or run.phase in phases)
        and now - run.changed >= older_than
    ]


def remove_runs(runs: Iterable[FoundRun]) -> list[tuple[FoundRun, PacelineError | None]]:
    """Delete the folders of these runs; return each with the error that kept it. Links inside of them are
    deleted, not followed. Versions at a `checkpoint.url` elsewhere stay."""
    return [(run, _removed(run.path)) for run in runs]


def _removed(path: Path) -> PacelineError | None:
    folder = RunFolder(path)
    try:
        if path.is_symlink() or not folder.config_file.is_file():
            raise UsageError(f"{path} is not the folder of a run", remedy="delete it by hand")
        with held(folder.lock_file, str(path)):
            if not liveness_lock.is_free(path):
                raise UsageError(
                    f"processes of {path} still run", remedy="stop the run first (paceline stop)"
                )
            # First: where a part of it cannot be deleted, what is left is not taken for a run.
            folder.config_file.unlink()
            shutil.rmtree(path)
    except OSError as error:
        return PlatformError(
            f"{path} cannot be deleted: {error.strerror}",
            remedy="check its permissions, and delete it by hand",
        )
    except PacelineError as error:
        return error
    return None


@dataclass
class _JournalEnd:
    """What the end of a journal tells."""

    phase: RunPhase = "not begun"
    reason: str = ""
    step: int = 0
    loss: float = math.nan
    hash: str = ""
    changed: float = 0.0


def _end(folder: RunFolder) -> _JournalEnd:
    found, begun = _JournalEnd(), False
    end: tuple[RunPhase, str] | None = None
    for event in journal.last_events(folder.journal_file):
        found.changed = max(found.changed, event.time) if event.time == event.time else found.changed
        match event:
            case events.RunStarted() | events.RunResumed():
                found.step, found.hash, begun, end = getattr(event, "step", 0), "", True, None
            case events.StepCommitted():
                found.step, found.loss, begun, end = event.step, event.loss, True, None
            case events.RunEnded():
                found.step, found.hash, begun = event.step, event.hash, True
                finished = event.reason == FINISHED
                end = ("finished", "") if finished else ("stopped", event.reason)
            case events.RunFailed() | events.WorkerFailed() if end is None or end[0] == "failed":
                # Under a supervisor a lost worker is followed by a view, or by the failure of the run.
                end = "failed", event.reason
            case events.ViewChanged():
                end = None
    found.phase, found.reason = end or (("interrupted" if begun else "not begun"), "")
    return found


def _first_time(file: Path) -> float:
    with contextlib.suppress(OSError, PacelineError):
        for event in journal.read(file, max_bytes=_FIRST_BYTES).events:
            return event.time
    return 0.0


def _versions(folder: RunFolder) -> tuple[int, tuple[str, ...]]:
    if not folder.checkpoints.is_dir():
        return 0, ()
    try:
        store = CheckpointStore(folder.checkpoints)
        body, damage = read_document(store.storage, TAGS, decode_document)
        # Where it is not known which versions are tagged, any may be.
        tags = ("?",) if damage else tuple(sorted((body or {}).get("tags", {})))
        return len(store.versions()), tags
    except PacelineError:
        return 0, ("?",)


def _bytes(path: Path) -> int:
    total = 0
    for base, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(OSError):  # deleted meanwhile
                total += os.lstat(os.path.join(base, name)).st_size
    return total
