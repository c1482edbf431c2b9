"""Fixtures of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.folder_in_memory import folder_in_memory
from tests.one_thread import one_thread as one_thread


@pytest.fixture
def quick_path() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder
