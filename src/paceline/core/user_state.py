"""The folder of the user for what belongs to no single run: keys, and the queue of runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from paceline.core.errors import PlatformError


def state_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder, which may not exist: paceline/ below XDG_STATE_HOME, else below ~/.local/state."""
    base = environment.get("XDG_STATE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "state") / "paceline"
    except RuntimeError as error:
        raise PlatformError(
            "this user has no home folder", remedy="set HOME or XDG_STATE_HOME to a folder of this user"
        ) from error
