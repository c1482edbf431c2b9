"""What cannot be gets one clear message, and leaves nothing in the cluster."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.kubernetes import cluster as fake
from tests.clusters.kubernetes.admission import Quota
from tests.clusters.kubernetes.certificates import certificates
from tests.clusters.kubernetes.cluster import IMAGE, USER, Cluster
from tests.clusters.kubernetes.sandbox import ROOT
from tests.waiting import wait_for

import paceline
from paceline.control.supervisor_address import new_secret
from paceline.core.errors import PacelineError, ResourceError, UnavailableError, UsageError
from paceline.core.version import VERSION
from paceline.engines.batch import BatchSpec
from paceline.engines.engine import AgentSpec
from paceline.engines.kubernetes import agents_job
from paceline.engines.kubernetes.api_client import ApiError

_WHY_NOT = fake.why_not()

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(120),
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
    monkeypatch.setattr(agents_job, "REFUSAL_SECONDS", 1.0)
    idle_cluster.set_quota(Quota("team", pods=0))
    error = refusal_of_agents(idle_cluster, engine(idle_cluster))
    assert isinstance(error, ResourceError)
    assert "exceeded quota: team" in error.message


def test_a_quota_of_jobs_and_a_name_that_is_taken(idle_cluster: Cluster) -> None:
    chosen, job = engine(idle_cluster), BatchSpec(script="train.py", name="taken")
    idle_cluster.set_quota(Quota("team", pods=9, jobs=0))
    with pytest.raises(ResourceError, match="the namespace's quota does not allow it"):
        chosen.submit_batch(job)
    assert idle_cluster.left() == []  # the Secret and the Service, which came before the Job, are gone again
    idle_cluster.set_quota(Quota("team", pods=1))
    # Another run has all of the quota, and waits for a node.
    waiting = engine(idle_cluster, node_selector={"gpu": "h200"})
    other = waiting.submit_batch(BatchSpec(script="train.py", name="other"))
    wait_for(lambda: len(idle_cluster.store.every("Pod")) == 1, "its pod is made")
    identifier = chosen.submit_batch(job)
    with pytest.raises(ApiError, match="the name is taken"):
        chosen.submit_batch(job)
    wait_for(lambda: "exceeded quota" in chosen.batch_status(identifier).reason, "the quota is named")
    assert chosen.batch_status(identifier).state == "pending"  # the other run may end
    chosen.stop_batch(identifier)
    assert chosen.batch_status(identifier).state == "stopped"
    chosen.stop_batch(other)
    wait_for(lambda: not idle_cluster.left(), "nothing is left")


SETTINGS_OF_NO_NODE: list[tuple[dict[str, Any], str]] = [
    ({"node_selector": {"gpu": "h200"}}, "didn't match Pod's node affinity/selector"),
    ({"volumes": {"/runs": "typo"}}, 'persistentvolumeclaim "typo" not found'),
    ({"service_account": "typo"}, 'serviceaccount "typo" not found'),
]


@pytest.mark.parametrize(("changes", "told"), SETTINGS_OF_NO_NODE)
def test_agents_for_which_there_is_no_node_say_why_they_wait(
    idle_cluster: Cluster, changes: dict[str, Any], told: str
) -> None:
    chosen = engine(idle_cluster, **changes)
    job = chosen.submit(chosen.request(SPEC), new_secret())
    try:
        wait_for(lambda: all(told in status.reason for status in job.poll()), "it says why they wait")
        assert {status.state for status in job.poll()} == {"pending"}
    finally:
        job.stop()
    wait_for(lambda: not idle_cluster.left(), "nothing is left")


def test_a_role_with_the_documented_rights_is_enough(idle_cluster: Cluster) -> None:
    """It may not read the Namespace, nor events."""
    idle_cluster.api.may = lambda verb, resource: resource not in ("namespaces", "events")
    engine(idle_cluster).check()
    assert "cannot be pulled" in refusal_of_agents(idle_cluster, engine(idle_cluster, image="typo")).message


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
    stranger, _ = certificates(["127.0.0.1"], tmp_path)
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


QUOTA = Quota("team", pods=0)
MISTAKES: list[tuple[str, list[str], Quota | None]] = [
    ("'registry.example/typo:1' cannot be pulled", ["--image", "registry.example/typo:1"], None),
    ("exceeded quota: team", ["--image", IMAGE], QUOTA),
]


def check_one_message(cluster: Cluster, printed: str, said: str) -> None:
    assert said in printed
    error = printed[printed.index("error: ") :]
    # Of the error itself: what agents said about it has more spaces in front.
    assert len(re.findall(r"^  try: ", error, re.MULTILINE)) == 1, printed
    assert "Traceback" not in printed
    wait_for(lambda: not cluster.left(), "nothing is left")


@pytest.mark.parametrize(("said", "options", "quota"), MISTAKES)
def test_the_command_says_it_in_one_line_and_exits(
    idle_cluster: Cluster, tmp_path: Path, said: str, options: list[str], quota: Quota | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('never')")
    idle_cluster.set_quota(quota)
    command = [sys.executable, "-m", "paceline", "submit", str(script), "--engine", "kubernetes", "--wait"]
    command += [*options, "--engine-set", f"kubeconfig={idle_cluster.kubeconfig}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1, done.stderr
    check_one_message(idle_cluster, done.stderr, said)


def test_the_command_says_what_a_run_waits_for(idle_cluster: Cluster, tmp_path: Path) -> None:
    script, errors = tmp_path / "train.py", tmp_path / "errors"
    script.write_text("print('never')")
    command = [sys.executable, "-m", "paceline", "submit", str(script), "--engine", "kubernetes", "--wait"]
    command += ["--image", IMAGE, "--engine-set", f"kubeconfig={idle_cluster.kubeconfig}"]
    command += ["--engine-set", 'node_selector={gpu = "h200"}']
    with errors.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        wait_for(lambda: "node affinity/selector" in errors.read_text(), "it says what the run waits for")
        engine(idle_cluster).stop_batch("job/train")
        assert process.wait(60) == 1
    printed = errors.read_text()
    assert "job/train waits: Unschedulable: 0/2 nodes are available" in printed
    check_one_message(idle_cluster, printed, "job/train stopped: there is no job/train in namespace ml")


_SCRIPT = """
import paceline, torch
from torch import nn
trainer = paceline.Trainer(
    nn.Linear(2, 1), nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1),
    config=paceline.TrainConfig(max_steps=3, global_batch=4, progress=False, threads=1),
)
trainer.fit((torch.zeros(8, 2), torch.zeros(8, 1)))
"""

IN_THE_FOREGROUND: dict[str, tuple[str, list[str]]] = {
    "image": ("'registry.example/typo:1' cannot be pulled", ["--image", "registry.example/typo:1"]),
    # The supervisor listens at all of this machine's addresses, and pods are sent to another machine.
    "address": (
        "no agent of kubernetes stayed",
        ["--image", IMAGE, "--engine-set", "address=10.77.0.3", "--set", "fault_tolerance.bind=0.0.0.0"],
    ),
    "node": (
        "didn't match Pod's node affinity/selector",
        [
            *("--image", IMAGE, "--engine-set", 'node_selector={gpu = "h200"}'),
            *("--set", "fault_tolerance.node_wait=40"),
        ],
    ),
}


@pytest.mark.parametrize("mistake", IN_THE_FOREGROUND)
def test_a_run_in_the_foreground_says_it_in_one_line_and_exits(
    idle_cluster: Cluster, tmp_path: Path, mistake: str
) -> None:
    said, options = IN_THE_FOREGROUND[mistake]
    code, printed = run_in_the_foreground(idle_cluster, tmp_path, *options)
    assert code not in (0, 75), printed
    check_one_message(idle_cluster, printed, said)


def test_an_image_with_another_version_is_named(idle_cluster: Cluster, tmp_path: Path) -> None:
    """The image's Paceline says that it is another one, as it is imported."""
    folder = tmp_path / "image"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import paceline.core.version as own; own.VERSION = '0.0.9'")
    idle_cluster.kubelets.claims["image"] = folder
    options = ["--image", IMAGE, "--engine-set", 'volumes={"/image" = "image"}']
    options += ["--engine-set", f'environment={{PYTHONPATH = "/image:{ROOT}/src:{ROOT}"}}']
    code, printed = run_in_the_foreground(idle_cluster, tmp_path, *options)
    assert code not in (0, 75), printed
    assert "Paceline 0.0.9 and speaks protocol" in printed
    assert f"Paceline {VERSION} and speaks protocol" in printed
    check_one_message(idle_cluster, printed, "no agent of kubernetes stayed")


def run_in_the_foreground(cluster: Cluster, tmp_path: Path, *options: str) -> tuple[int, str]:
    """Run `paceline train --engine kubernetes`; return its exit code and what it printed."""
    folder = tmp_path / "login"
    folder.mkdir()
    os.chown(folder, USER, USER)
    (folder / "train.py").write_text(_SCRIPT)
    command = [sys.executable, "-m", "paceline", "train", str(folder / "train.py")]
    command += ["--engine", "kubernetes", "--nodes", "2", "--run-dir", str(folder / "run"), *options]
    process = cluster.start_as_user(
        command, folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    printed, _ = process.communicate(timeout=100)
    return process.returncode, printed
