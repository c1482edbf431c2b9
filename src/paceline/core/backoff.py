"""The pause before another try: doubled with every failure in a row, up to a limit."""

from __future__ import annotations

from typing import Final

_MOST_DOUBLINGS: Final = 64  # 2.0**1024 overflows, and what fails for days comes to it


def doubled(first: float, times: int, most: float) -> float:
    """Return `first`, doubled so many times, and at most `most`."""
    return min(first * 2.0 ** min(times, _MOST_DOUBLINGS), most)
