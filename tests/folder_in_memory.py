"""A scratch folder in memory, for tests with thousands of flushes that no disk need see."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SHM = Path("/dev/shm")


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder in /dev/shm where there is one. It is held open: the leak checks of tests that run beside this
    one see by that whose it is."""
    with tempfile.TemporaryDirectory(dir=_SHM if _SHM.is_dir() else None) as folder:
        held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield Path(folder)
        finally:
            os.close(held)
