"""Waiting for what another process or thread does, where there is no other way to hear of it."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 120.0  # a machine may be busy; who waits that long waits in vain


def wait_for(
    condition: Callable[[], object], what: str = "the other side did not do it", seconds: float = PATIENCE
) -> float:
    """Looks often; the seconds it took. TimeoutError with `what` where it does not come true."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise TimeoutError(what)
        time.sleep(0.002)
    return time.monotonic() - begun
