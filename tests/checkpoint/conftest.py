"""Fixtures of this folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.one_thread import one_thread as one_thread


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """A folder in memory where there is one, for tests with thousands of flushes that no disk need see."""
    folder = tempfile.mkdtemp(prefix="paceline-test-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    yield Path(folder)
    shutil.rmtree(folder)
