"""Who a worker is in a job that is looked after, and the ways in which its membership ends.

Must not know what a member does.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.comm.cost import Links


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
    """Who this worker is."""

    member: int
    slot: int
    host: str
    hostname: str
    secret: bytes
    links: Links
    comm_timeout: float
    patience: float
