"""The contract of engines on Kubernetes: pods as containers in network namespaces, the API a fake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.clusters.kubernetes import cluster as fake
from tests.clusters.kubernetes.cluster import Cluster
from tests.clusters.kubernetes.lab import KubernetesLab

from paceline.testing.engine_contract import check_faults, check_stop_and_resume

_WHY_NOT = fake.why_not()

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "containers work"),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    # As many nodes as the run needs: what is lost has no replacement until another node is there.
    with Cluster(tmp_path / "cluster", nodes=2) as made:
        yield made


def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


def test_faults(cluster: Cluster, tmp_path: Path) -> None:
    run = check_faults(KubernetesLab(cluster, shared(tmp_path)), shared_folder := tmp_path / "shared")
    assert shared_folder.exists()
    # What the agents wrote came through the API server to the caller.
    assert "] joined the job at 10.77.0.1:" in run.output


def test_stop_and_resume_on_another_number_of_nodes(tmp_path: Path) -> None:
    with Cluster(tmp_path / "cluster", nodes=3) as cluster:
        check_stop_and_resume(KubernetesLab(cluster, shared(tmp_path)), tmp_path / "shared")


def test_a_stateful_set(cluster: Cluster, tmp_path: Path) -> None:
    check_faults(KubernetesLab(cluster, shared(tmp_path), "statefulset"), tmp_path / "shared")
