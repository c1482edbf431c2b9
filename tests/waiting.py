"""Wait for what another process or thread does, where nothing can be waited on."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0  # a machine may be busy; less than pytest-timeout, so that `what` is seen


def wait_for(
    condition: Callable[[], object], what: str = "the other side did not do it", seconds: float = PATIENCE
) -> float:
    """Poll until the condition is true; return the seconds. TimeoutError with `what` if it stays false."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise TimeoutError(what)
        time.sleep(0.002)
    return time.monotonic() - begun
