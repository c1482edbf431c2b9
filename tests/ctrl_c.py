"""Ctrl-C in tests: a process in the background of a shell, as under nohup, begins with SIGINT ignored."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heard() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt, as in a terminal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
