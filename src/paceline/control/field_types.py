"""Types of the fields of control messages: what the wire accepts, checked when a message is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, final

from msgspec import Meta


@final
@dataclass(frozen=True)
class Truncated:
    """Annotate text for a log or an error: cut to `most` characters, not refused. Exceptions of user code are
    of any length, and their text goes into other messages, which are limited too."""

    most: int


# A run of 2**48 steps takes nine thousand years at a thousand steps a second.
MOST_STEPS: Final = 1 << 48
MAX_WORKERS: Final = 1 << 12
Whole = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]  # what a float holds exactly
Count = Annotated[int, Meta(ge=0, le=MOST_STEPS)]
MaybeCount = Annotated[int, Meta(ge=-1, le=MOST_STEPS)]
Small = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
MaybeSmall = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
Signed = Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)]
ExitStatus = Annotated[int, Meta(ge=-1024, le=1 << 31)]
WorkerCount = Annotated[int, Meta(ge=0, le=MAX_WORKERS)]
Port = Annotated[int, Meta(ge=0, le=65535)]
# Ratios of measured seconds decide the assignment of shards: a value is one that a clock can show.
Seconds = Annotated[float, Meta(ge=0, le=10**9)]
StepKey = Annotated[str, Meta(pattern=r"^[0-9]{1,14}\Z")]
Name = Annotated[str, Meta(max_length=1024)]
Reason = Annotated[str, Truncated(1 << 16)]
Trace = Annotated[str, Truncated(1 << 20)]

Progress = tuple[Count, Count, Count]
"""Progress of a member: (committed steps, epoch, duties done since the last commit). Ordered."""
