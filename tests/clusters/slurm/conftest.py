"""One real SLURM cluster for all tests of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.testing import slurm_cluster
from paceline.testing.slurm_cluster import SlurmCluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Four nodes and a login host."""
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def cluster(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster with all its nodes and no job, before and after a test."""
    yield slurm
    slurm.restore()
