"""What the next supervisor must know if this one dies: a small file in the run's folder, replaced whole.

Holds what the machine wants remembered and which process each worker is. Must not know what it is for.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, final

from paceline.core import typed
from paceline.core.control.address import replace_file
from paceline.core.errors import PlatformError
from paceline.elastic.model import Began

STATE_FILE: Final = "supervisor.json"


@dataclass(frozen=True)
class Remembered:
    """`fingerprint` and `model` are those of the first member, which others must match in exact mode;
    `processes` the pid and the machine of each worker, by member; `injected` the faults on demand that came,
    see injections.py."""

    began: Began = field(default_factory=Began)
    port: int = 0
    fingerprint: dict[str, str] | None = None
    model: str = ""
    processes: dict[int, tuple[int, str]] = field(default_factory=dict)
    injected: tuple[tuple[int, int, int, int], ...] = ()


@final
class Memory:
    """The file. While it cannot be written the newest state waits for the next attempt."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATE_FILE
        self._written: Remembered | None = None
        self.failed = False
        self.trouble = ""  # why nothing was recalled

    def recall(self) -> Remembered | None:
        """What the supervisor before this one knew."""
        try:
            found = typed.convert(json.loads(self._path.read_text()), Remembered, STATE_FILE)
        except FileNotFoundError:
            self.trouble = f"{self._path} is missing"
            return None
        except OSError as error:
            self.trouble = f"{self._path} cannot be read: {error.strerror}"
            return None
        except (ValueError, typed.MismatchError, typed.MissingKeyError, typed.UnknownKeyError) as error:
            self.trouble = f"{self._path} is damaged: {error}"
            return None
        assert isinstance(found, Remembered)
        return found

    def keep(self, now_known: Remembered) -> None:
        """Write it down if it has changed."""
        if now_known == self._written:
            return
        try:
            replace_file(self._path, json.dumps(asdict(now_known)).encode())
        except PlatformError:
            # Disk full: training goes on; a supervisor that took over now would know a little less.
            self.failed = True
            return
        self._written, self.failed = now_known, False

    def forget(self) -> None:
        """The job is over."""
        self._path.unlink(missing_ok=True)
