"""The folder of a run that failed before its first step: free for the next attempt.

A typo in the objective must not use up the name of a run. What the attempt left is put aside in `failed-N/`,
so that its log can still be read. A run that committed a step or saved a version is never touched, nor one
that still goes on. Must not import torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from paceline.core import journal
from paceline.core.control import address, crew, unheard
from paceline.core.errors import PacelineError, PlatformError
from paceline.core.events import CheckpointSaved, RunResumed, StepCommitted
from paceline.elastic.shell.memory import STATE_FILE
from paceline.train.config import TrainConfig
from paceline.train.run_folder import RunFolder
from paceline.train.run_lock import held

_log = logging.getLogger(__name__)

_LEFT = (
    "config.toml",
    "config.toml.part",
    "journal.jsonl",
    "logs",
    "stop",
    "command.json",
    address.ADDRESS_FILE,
    address.SECRET_FILE,
    crew.CREW_FILE,
    crew.LEAVE_FILE,
    STATE_FILE,
)


def clear(folder: RunFolder, config: TrainConfig) -> None:
    """Puts aside what an attempt without a step left in the folder that `config` names for a new run."""
    if not folder.config_file.is_file() or _has_begun(folder, config):
        return
    try:
        with held(folder.lock_file, str(folder.path)):
            if not _has_begun(folder, config):
                _put_aside(folder.path)
    except PacelineError as error:
        # It goes on there, or the folder cannot be changed: the run is refused for what it is.
        _log.debug("%s is left as it is: %s", folder.path, error.message)


def _has_begun(folder: RunFolder, config: TrainConfig) -> bool:
    """Whether anything in it is worth keeping: a step, a version, words of workers, or somebody at work."""
    if unheard.is_there(folder.path) or (crew.is_known(folder.path) and not crew.is_free(folder.path)):
        return True
    with contextlib.suppress(FileNotFoundError):
        if any(not name.startswith(".") for name in os.listdir(folder.checkpoints)):
            return True
    if not folder.journal_file.exists():
        return False
    kept = StepCommitted | CheckpointSaved | RunResumed
    return any(isinstance(event, kept) for event in journal.iterate(folder.journal_file))


def _put_aside(path: Path) -> None:
    number = 1
    while (path / f"failed-{number}").exists():
        number += 1
    aside = path / f"failed-{number}"
    try:
        aside.mkdir()
        for name in _LEFT:
            with contextlib.suppress(FileNotFoundError):
                (path / name).rename(aside / name)
    except OSError as error:
        raise PlatformError(
            f"{path} cannot be cleared for a new start: {error.strerror}", remedy="choose another run_dir"
        ) from error
    _log.warning(
        "%s holds an attempt that failed before its first step: it was put aside in %s, and the run begins "
        "anew",
        path,
        aside.name,
    )
