"""Who a worker is in a job that is looked after, and the ways in which its membership ends.

Must not know what a member does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.comm.cost import Links
from paceline.core.control import address, crew
from paceline.core.errors import PacelineError

_LEAVE_SECONDS = 2.0  # that a wait for others may last where the run is being started again


class ReleasedError(Exception):
    """This worker is no member any more, and ends. `code` is what its process ends with."""

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(reason)
        self.code = code


class SupervisorGoneError(Exception):
    """Nobody looks after the job any more."""


class StartOverError(Exception):
    """The state is to be thrown away, and there is no checkpoint: only a new process has the initial one."""


@dataclass(frozen=True)
class Seat:
    """Who this worker is. `folder` is the run's, where this machine sees it."""

    member: int
    slot: int
    host: str
    hostname: str
    secret: bytes
    links: Links
    comm_timeout: float
    patience: float
    folder: Path | None = None
    ports: str = ""

    def why_forsaken(self, away: float) -> str | None:
        """Why nobody will look after this worker any more, whose supervisor is away for so long."""
        if away > self.patience:
            return f"the supervisor stayed away for {away:.0f} s"
        if away and self._is_to_leave:
            return "the supervisor is gone, and the run is being started again"
        return None

    @property
    def is_taken(self) -> bool:
        """Whether the folder is no longer that of the start that this worker belongs to."""
        if self.folder is None:
            return False
        try:
            return address.read_secret(self.folder) != self.secret
        except PacelineError:
            return True

    def gives_up_waiting(self, seconds: float) -> bool:
        """Whether a wait for others, without a supervisor who would end it, has lasted long enough."""
        return seconds > self.patience or (seconds > _LEAVE_SECONDS and self._is_to_leave)

    @property
    def _is_to_leave(self) -> bool:
        return self.folder is not None and crew.is_asked_to_leave(self.folder)
