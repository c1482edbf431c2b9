"""Time limits of runs, as SLURM writes them: minutes, minutes:seconds, hours:minutes:seconds, days-hours,
days-hours:minutes and days-hours:minutes:seconds."""

from __future__ import annotations

import re
from typing import Final

from paceline.core.errors import UsageError

_TIME: Final = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?(?::(\d{1,2}))?")


def seconds_of(text: str) -> int:
    """Return the seconds of a limit, as SLURM reads it."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--time {text} is not a time", remedy="write it like 2:00:00, or 1-12:00:00 for 36 hours"
        )
    days, *parts = (None if part is None else int(part) for part in match.groups())
    if days is None and parts[2] is None:
        parts = [0, *parts[:2]]
    hours, minutes, seconds = (part or 0 for part in parts)
    return (((days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
