"""One Ray cluster for all tests of the folder: it takes a quarter of a minute to start."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.clusters.ray.ray_lab import RayLab, ray_lab, why_not


@pytest.fixture(scope="session")
def session_lab() -> Iterator[RayLab]:
    if reason := why_not():
        pytest.skip(reason)
    # Below /tmp itself: Ray's sockets lie in it, and their paths may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, ray_lab(Path(folder)) as lab:
        yield lab


@pytest.fixture
def lab(session_lab: RayLab) -> RayLab:
    """The cluster with three nodes."""
    session_lab.full_nodes()
    return session_lab
