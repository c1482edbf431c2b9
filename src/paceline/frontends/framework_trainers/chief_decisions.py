"""What the chief of a job decides for all of its ranks, over whatever the framework broadcasts with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from paceline.core.errors import PacelineError, UsageError

T = TypeVar("T")


def decided_by_chief(decide: Callable[[], T], is_chief: bool, broadcast: Callable[[list[Any]], Any]) -> T:
    """Return what `decide` returns on the chief, on every rank; what it raises there is raised by all, so
    that no rank waits for one that has left. `broadcast` returns the chief's list on every rank."""
    found: list[Any] = []
    refused: PacelineError | None = None
    if is_chief:
        try:
            found = [decide()]
        except PacelineError as error:
            refused, found = error, [None, error.message, error.remedy]
    found = broadcast(found)
    if refused is not None:
        raise refused
    if len(found) > 1:
        raise UsageError(f"rank 0 refuses the run: {found[1]}", remedy=found[2])
    decided: T = found[0]
    return decided
