"""Which run a command is about: the folder that is given, a name below runs/, else the newest run there."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.core.errors import PlatformError, UsageError
from paceline.train.state.run_folder import RUNS, RunFolder


def opened(given: str | os.PathLike[str] | None) -> RunFolder:
    """Return the folder of the run; UsageError where there is none."""
    return RunFolder.open(chosen(given))


def chosen(given: str | os.PathLike[str] | None) -> Path:
    """Return the path of the folder, which may hold no run where it is given."""
    if given is None:
        return _newest()
    path, below = Path(given), Path(RUNS) / given
    return below if not path.exists() and below.is_dir() else path


def _newest() -> Path:
    try:
        folders = [RunFolder(Path(entry.path)) for entry in os.scandir(RUNS) if entry.is_dir()]
    except FileNotFoundError:
        folders = []
    except OSError as error:
        raise PlatformError(
            f"{RUNS} cannot be searched for runs: {error.strerror}", remedy="give the run's folder"
        ) from error
    runs = [folder for folder in folders if _is_open_run(folder)]
    if not runs:
        raise UsageError(
            f"no run is given, and there is none below {Path(RUNS).absolute()}",
            remedy="give the folder of a run; its name is printed when the run starts",
        )
    return max(runs, key=_changed).path


def _is_open_run(folder: RunFolder) -> bool:
    """Return whether a folder holds a run that this user may look at."""
    try:
        return folder.holds_run()
    except PlatformError:
        return False


def _changed(folder: RunFolder) -> tuple[float, str]:
    file = folder.journal_file if folder.journal_file.is_file() else folder.config_file
    return file.stat().st_mtime, folder.path.name
