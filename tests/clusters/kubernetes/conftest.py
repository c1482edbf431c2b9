"""One cluster for the tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.clusters.kubernetes import cluster as fake
from tests.clusters.kubernetes.cluster import Cluster


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why_not := fake.why_not():
        pytest.skip(why_not)
    pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    with Cluster(tmp_path_factory.mktemp("kubernetes") / "cluster", nodes=2) as made:
        yield made


@pytest.fixture
def idle_cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, with nothing in it before and after the test."""
    yield shared_cluster
    assert shared_cluster.failure is None
    shared_cluster.set_quota(None)
    shared_cluster.install_job_sets(False)
    shared_cluster.api.may = lambda verb, resource: True
    shared_cluster.api.version["minor"] = "33"
