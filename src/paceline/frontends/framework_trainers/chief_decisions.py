"""What the chief of a job decides for all of its ranks, over whatever the framework broadcasts with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from paceline.core.errors import PacelineError, PeerLostError, UsageError

T = TypeVar("T")


def decided_by_chief(decide: Callable[[], T], is_chief: bool, broadcast: Callable[[list[Any]], Any]) -> T:
    """Return what `decide` returns on the chief, on every rank; what it raises there ends all of them, so
    that no rank waits for one that has left. `broadcast` returns the chief's list on every rank."""
    found: list[Any] = []
    failed: Exception | None = None
    if is_chief:
        try:
            found = [decide()]
        except PacelineError as error:
            failed, found = error, [None, error.message, error.remedy]
        except Exception as error:
            failed, found = error, [None, f"{type(error).__name__}: {error}", None]
    found = broadcast(found)
    if failed is not None:
        raise failed
    if len(found) > 1:
        _, text, remedy = found
        if remedy is None:
            raise PeerLostError(f"rank 0 ended with {text}", rank=0)
        raise UsageError(f"rank 0 refuses the run: {text}", remedy=remedy)
    decided: T = found[0]
    return decided
