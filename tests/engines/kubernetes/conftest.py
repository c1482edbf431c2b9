"""A small API server for each test that wants one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.engines.kubernetes.scripted_api import ScriptedApi


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with ScriptedApi().serving() as serving:
        yield serving
