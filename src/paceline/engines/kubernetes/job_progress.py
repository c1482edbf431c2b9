"""Read and count a Job: which indexes are done, how many are needed for a number of pods. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def completed_indexes(text: str) -> set[int]:
    """Read `status.completedIndexes`: "1,3-5" is 1, 3, 4 and 5."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def completions_for(pods: int, job: Mapping[str, Any]) -> int:
    """Return the number of indexes with which this many pods run: an index whose agent has left with code 0
    gets no other pod."""
    done = completed_indexes(str(job.get("status", {}).get("completedIndexes") or ""))
    count = active = 0
    while active < pods:
        active += count not in done
        count += 1
    return count


def condition(owner: Mapping[str, Any], *types: str) -> Mapping[str, Any] | None:
    """Return the first condition of these types that is true."""
    for found in owner.get("status", {}).get("conditions") or ():
        if found.get("type") in types and found.get("status") == "True":
            return dict(found)
    return None


def is_over(owner: Mapping[str, Any]) -> bool:
    """Return whether a Job has ended, in either way: no pod of it comes again."""
    return condition(owner, "Failed", "FailureTarget", "Complete", "SuccessCriteriaMet") is not None
