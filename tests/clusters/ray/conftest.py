"""One Ray cluster for all tests of the folder: it takes a quarter of a minute to start."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.clusters.ray.ray_lab import ROOT, RayLab, why_not

from paceline.testing.ray_cluster import RayCluster


@pytest.fixture(scope="session")
def session_lab() -> Iterator[RayLab]:
    if reason := why_not():
        pytest.skip(reason)
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,
        RayCluster(Path(folder), environment) as cluster,
    ):
        yield RayLab(cluster)


@pytest.fixture
def lab(session_lab: RayLab) -> RayLab:
    """The cluster with three nodes."""
    session_lab.have_three_nodes()
    return session_lab
