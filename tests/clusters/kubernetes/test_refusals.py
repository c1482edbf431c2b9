"""What cannot be gets one clear message, and leaves nothing in the cluster."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.kubernetes import cluster as fake
from tests.clusters.kubernetes.admission import Quota
from tests.clusters.kubernetes.cluster import IMAGE, Cluster
from tests.waiting import wait_for

import paceline
from paceline.control.supervisor_address import new_secret
from paceline.core.errors import PacelineError, ResourceError, UnavailableError, UsageError
from paceline.engines.batch import BatchSpec
from paceline.engines.engine import AgentSpec
from paceline.engines.kubernetes import agents_job
from paceline.engines.kubernetes.api_client import ApiError

_WHY_NOT = fake.why_not()

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "containers work"),
]

SPEC = AgentSpec(run="refused", address=("10.77.0.1", 5000), nodes=2, workers_per_node=1)


def engine(cluster: Cluster, **changes: Any) -> paceline.Kubernetes:
    return paceline.Kubernetes(
        **{"kubeconfig": str(cluster.kubeconfig), "image": IMAGE, "nodes": 2, **changes}
    )


def refusal_of_agents(cluster: Cluster, chosen: paceline.Kubernetes) -> PacelineError:
    """Return what `poll` says in the end about agents that cannot come."""
    job = chosen.submit(chosen.request(SPEC), new_secret())
    found: list[PacelineError] = []

    def says() -> bool:
        try:
            job.poll()
        except PacelineError as error:
            found.append(error)
        return bool(found)

    try:
        wait_for(says, "it says that no agent can come")
    finally:
        job.stop()
        job.stop()
    wait_for(lambda: not cluster.left(), f"nothing is left: {cluster.left()}")
    return found[0]


def test_the_image_is_missing(idle_cluster: Cluster) -> None:
    error = refusal_of_agents(idle_cluster, engine(idle_cluster, image="registry.example/typo:1"))
    assert isinstance(error, UsageError)
    assert "'registry.example/typo:1' cannot be pulled" in error.message
    assert "image_pull_secret" in error.remedy


def test_a_quota_of_pods(idle_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents_job, "_QUOTA_SECONDS", 1.0)
    idle_cluster.set_quota(Quota("team", pods=0))
    error = refusal_of_agents(idle_cluster, engine(idle_cluster))
    assert isinstance(error, ResourceError)
    assert "exceeded quota: team" in error.message


def test_a_quota_of_jobs_and_a_name_that_is_taken(idle_cluster: Cluster) -> None:
    chosen, job = engine(idle_cluster), BatchSpec(script="train.py", name="taken")
    idle_cluster.set_quota(Quota("team", pods=9, jobs=0))
    with pytest.raises(ResourceError, match="quota is used up"):
        chosen.submit_batch(job)
    assert idle_cluster.left() == []  # the Secret and the Service, which came before the Job, are gone again
    idle_cluster.set_quota(Quota("team", pods=0))
    identifier = chosen.submit_batch(job)
    with pytest.raises(ApiError, match="the name is taken"):
        chosen.submit_batch(job)
    wait_for(lambda: "exceeded quota" in chosen.batch_status(identifier).reason, "the quota is named")
    assert chosen.batch_status(identifier).state == "pending"
    chosen.stop_batch(identifier)
    assert chosen.batch_status(identifier).state == "stopped"
    wait_for(lambda: not idle_cluster.left(), "nothing is left")


def test_who_may_not(idle_cluster: Cluster) -> None:
    idle_cluster.api.may = lambda verb, resource: (verb, resource) != ("create", "jobs")
    with pytest.raises(UsageError, match="this user may not create jobs in namespace 'ml'"):
        engine(idle_cluster).check()
    with pytest.raises(ApiError, match="this user may not: jobs is forbidden"):
        engine(idle_cluster).submit(engine(idle_cluster).request(SPEC), new_secret())
    assert idle_cluster.left() == []


def test_a_wrong_token(idle_cluster: Cluster, tmp_path: Path) -> None:
    config = tmp_path / "config"
    idle_cluster.write_kubeconfig(config, idle_cluster.server, idle_cluster.authority, "expired-token")
    with pytest.raises(ApiError, match="does not accept the credentials of context 'test'") as told:
        engine(idle_cluster, kubeconfig=str(tmp_path / "config")).check()
    assert told.value.status == 401
    assert "expired-token" not in str(told.value)


def test_a_server_that_does_not_answer_or_is_none(idle_cluster: Cluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    config = tmp_path / "config"
    idle_cluster.write_kubeconfig(config, f"http://127.0.0.1:{port}", b"")
    with pytest.raises(UnavailableError, match="cannot be reached"):
        engine(idle_cluster, kubeconfig=str(config)).check()
    # Another authority's certificate: whoever answers is not the cluster.
    stranger, _ = fake.certificates(["127.0.0.1"], tmp_path)
    idle_cluster.write_kubeconfig(config, idle_cluster.server, stranger)
    with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
        engine(idle_cluster, kubeconfig=str(config)).check()


def test_what_the_cluster_does_not_have(idle_cluster: Cluster) -> None:
    with pytest.raises(UsageError, match="no namespace 'nowhere'"):
        engine(idle_cluster, namespace="nowhere").check()
    with pytest.raises(UnavailableError, match="no JobSet"):
        engine(idle_cluster, kind="jobset").check()
    idle_cluster.api.version["minor"] = "25+"
    with pytest.raises(UnavailableError, match=r"is Kubernetes 1\.25"):
        engine(idle_cluster).check()


def test_pods_cannot_reach_a_loopback_address(idle_cluster: Cluster) -> None:
    with pytest.raises(UsageError, match="pods cannot reach this machine at 127"):
        engine(idle_cluster).address_for_nodes()
    assert engine(idle_cluster, address="10.1.2.3").address_for_nodes() == "10.1.2.3"


def test_the_command_says_it_in_one_line_and_exits(idle_cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('never')")
    command = [sys.executable, "-m", "paceline", "submit", str(script), "--engine", "kubernetes", "--wait"]
    command += ["--image", "registry.example/typo:1", "--engine-set", f"kubeconfig={idle_cluster.kubeconfig}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "'registry.example/typo:1' cannot be pulled" in done.stderr
    assert "Traceback" not in done.stderr
    wait_for(lambda: not idle_cluster.left(), "nothing is left")
