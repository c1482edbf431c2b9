"""What `paceline status` tells of a run in progress. The names of the fields are the keys of its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import msgspec

from paceline.core.errors import WireError


@final
@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """One worker. `place`: the agent of its machine; `heard`: seconds since its last heartbeat."""

    rank: int
    member: int
    pid: int
    host: str
    place: int
    phase: str
    step: int
    shards: tuple[int, ...] = ()
    heard: float | None = None
    shard_seconds: float = 0.0
    rss: int = 0


@final
@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run and its workers, by rank. `refused`, `dropped`: connections that proved no secret, and those that
    sent what no worker sends."""

    phase: str
    generation: int
    step: int
    attempt: int = 1
    refused: int = 0
    dropped: int = 0
    workers: tuple[WorkerFacts, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        try:
            return msgspec.convert(plain, cls)
        except msgspec.ValidationError as error:
            raise WireError(f"the supervisor's answer is no status of a run: {error}") from error
