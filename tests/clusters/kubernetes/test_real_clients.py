"""The fake is one for other clients too: the real `kubectl` does with it what it does with a cluster."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from tests.clusters.kubernetes import cluster as fake
from tests.clusters.kubernetes.cluster import IMAGE, Cluster
from tests.waiting import wait_for

import paceline
from paceline.engines.batch import BatchSpec

_WHY_NOT = fake.why_not() or (
    "" if shutil.which("kubectl") else "kubectl not found: apt install kubernetes-client"
)

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "kubectl works"),
]


def test_kubectl_applies_what_dry_run_prints(idle_cluster: Cluster) -> None:
    def kubectl(*arguments: str, given: str = "") -> str:
        command = ["kubectl", "--kubeconfig", str(idle_cluster.kubeconfig), *arguments]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    engine = paceline.Kubernetes(kubeconfig=str(idle_cluster.kubeconfig), image=IMAGE)
    text = engine.batch_text(BatchSpec(script="no-such-script.py", name="by-hand"))
    (command,) = [line for line in text.splitlines() if line.startswith("#   openssl")]
    # Of its own objects kubectl sends protobuf, which the fake does not read; of files it sends JSON.
    pipe = f"{command.removeprefix('#   ')} --dry-run=client -o yaml"
    secret = subprocess.run(["sh", "-c", pipe], check=True, capture_output=True, text=True, timeout=60)
    kubectl("create", "--validate=false", "-f", "-", given=secret.stdout)
    kubectl("create", "--validate=false", "-f", "-", given=text)
    wait_for(lambda: engine.batch_status("job/by-hand").is_over, "the job ends")
    pods = json.loads(kubectl("get", "pods", "-o", "json", "-l", "paceline/run=by-hand"))["items"]
    assert "no-such-script.py" in kubectl("logs", pods[0]["metadata"]["name"])
    found = engine.batch_status("job/by-hand")
    # A mistake of the caller is not tried again: the Job's policy ends it.
    assert (found.state, found.code) == ("failed", 2)
    assert "PodFailurePolicy" in found.reason
    assert len(pods) == 1
    assert any("no-such-script.py" in line for line in engine.batch_logs("job/by-hand")(True))
    kubectl("delete", "--wait=false", "job", "by-hand")
    kubectl("delete", "--wait=false", "service/by-hand", "secret/by-hand-token")
    wait_for(lambda: not idle_cluster.left(), "nothing is left")
