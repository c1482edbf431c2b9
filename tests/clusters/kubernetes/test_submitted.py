"""A run that is handed over: `paceline submit`, the supervisor in pod 0, an agent in the other pod."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.kubernetes import cluster as fake
from tests.clusters.kubernetes.cluster import IMAGE, USER, Cluster
from tests.clusters.kubernetes.object_store import JsonObject
from tests.waiting import wait_for

import paceline
from paceline.core import events, journal

_WHY_NOT = fake.why_not()

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "containers work"),
]

_OF_AN_AGENT = re.compile(r"\[run-[\w-]+\] ")
# Steps are slow until the gate is open, on the volume of the pods or here: a test has time to take pods away.
_SCRIPT = """
import os, sys, time, torch, paceline
from torch import nn
from paceline.train.callbacks import Modifier

class Gate(Modifier):
    def change_gradients(self, parameters):
        limit = time.monotonic() + 0.3
        while not (os.path.exists("/runs/gate") or os.path.exists("gate")) and time.monotonic() < limit:
            time.sleep(0.01)

torch.manual_seed(1)
x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
# Handed over, and all the same named in the script: pods start no engine.
engine = paceline.Kubernetes(image="another", nodes=5) if "--lr" in sys.argv else None
config = paceline.TrainConfig(
    engine=engine,
    global_batch=16, max_steps=200, shards=4, threads=1, progress=False, seed=3,
    checkpoint=paceline.CheckpointConfig(every_steps=5),
)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8))
trainer = paceline.Trainer(
    model, nn.MSELoss(), optimizer=lambda p: torch.optim.Adam(p, 0.01), config=config, callbacks=[Gate()]
)
print("hash", trainer.fit((x, x)).state_hash, sys.argv[1:], flush=True)
"""


def command(script: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "paceline", "submit", str(script), "--engine", "kubernetes", *options]


@pytest.mark.parametrize("kind", ["job", "jobset", "statefulset"])
def test_a_run_is_handed_over_loses_its_pods_and_ends_as_if_nothing_was(
    idle_cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    idle_cluster.install_job_sets(kind == "jobset")
    # A Job numbers its pods; a JobSet has a Job for the supervisor's pod and one for the agents.
    first_host, other = ("run-head-0-0", "run-agents-0-0") if kind == "jobset" else ("run-0", "run-1")
    folder = tmp_path / "runs"
    folder.mkdir()
    os.chown(folder, USER, USER)
    (folder / "train.py").write_text(_SCRIPT)
    idle_cluster.kubelets.claims["training"] = folder
    chosen: dict[str, Any] = {"kubeconfig": str(idle_cluster.kubeconfig), "image": IMAGE}
    options = ["--nodes", "2", "--name", "run", "--kind", kind, "--image", IMAGE, "--run-dir", "/runs/run"]
    for setting in (
        f"kubeconfig={idle_cluster.kubeconfig}",
        'volumes={"/runs" = "training"}',
        "shared_memory=8Mi",
        "grace_seconds=20",
    ):
        options += ["--engine-set", setting]
    # The script lies on the volume: here it has another path than in the pods.
    (tmp_path / "train.py").symlink_to(folder / "train.py")
    options += ["--engine-set", "folder=/runs"]
    done = subprocess.run(
        [*command(Path("train.py"), *options), "--", "--lr", "0.1", "$(POD_IP)$$"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, f"{kind}/run\n"), done.stderr
    engine = paceline.Kubernetes(**chosen)
    try:
        both = {first_host, other}
        wait_for(lambda: len(_views(folder / "run", both)) > 0, "both pods train", 100)
        wait_for(lambda: _last_step(folder / "run") >= 10, "a few steps")
        # The supervisor listens, and the agent is connected to it.
        wait_for(lambda: _ready(idle_cluster) == both, "both pods are ready")
        if kind == "job":
            # The agent's node is drained: it leaves, and another one comes under its index.
            seen = len(_views(folder / "run", both))
            idle_cluster.store.begin_deletion(_pod(idle_cluster, other))
            wait_for(lambda: len(_views(folder / "run", both)) > seen, "another agent has come", 100)
        assert engine.batch_status(f"{kind}/run").state == "running"
        # The node is drained: SIGTERM to pod 0. It saves, leaves with 75, and comes again.
        idle_cluster.store.begin_deletion(_pod(idle_cluster, first_host))
        wait_for(lambda: len(_starts(folder / "run")) > 1, "the run is resumed", 100)
        new_lines, followed = engine.batch_logs(f"{kind}/run"), list[str]()
        followed += new_lines(False)
        (folder / "gate").touch()

        def is_over() -> bool:
            over = engine.batch_status(f"{kind}/run").is_over
            followed.extend(new_lines(over))
            return over

        wait_for(is_over, "the run ends", 100)
        assert engine.batch_status(f"{kind}/run").state == "succeeded"
        lines = list(engine.batch_logs(f"{kind}/run")(True))
        agents = [line for line in followed if _OF_AN_AGENT.match(line)]
        if kind != "statefulset":  # that starts pod 0 again, which writes on
            # The agents' pods go with the run, and their logs with them.
            of_pod_0 = [line for line in lines if not _OF_AN_AGENT.match(line)]
            assert Counter(followed) - Counter(agents) == Counter(of_pod_0)
        assert Counter(agents) <= _written_by_agents(idle_cluster, agents)
        (said,) = {line for line in followed if line.startswith("hash ")}
        assert "['--lr', '0.1', '$(POD_IP)$$']" in said
        secret = idle_cluster.store.find("Secret", "ml", "run-token")
        assert secret is not None
        written = secret["data"]["token"]
        token = base64.b64decode(written).decode().strip()
        assert len(token) == 64
        kinds = ("Pod", "Job", "JobSet", "StatefulSet", "Service", "Event")
        objects = [json.dumps(one) for each in kinds for one in idle_cluster.store.every(each)]
        texts = [*lines, *followed, *objects, done.stdout, done.stderr]
        assert not any(form in text for text in texts for form in (token, written))
    finally:
        engine.stop_batch(f"{kind}/run")
    wait_for(lambda: not idle_cluster.left(), "nothing is left")
    alone = subprocess.run(
        [sys.executable, "-m", "paceline", "train", "train.py", "--run-dir", str(tmp_path / "alone")],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert re.findall(r"hash (\w{64})", alone.stdout) == re.findall(r"hash (\w{64})", said), alone.stderr


def _written_by_agents(cluster: Cluster, shown: list[str]) -> Counter[str]:
    """Return what the pods wrote that are named in lines that were shown."""
    pods = {line.partition("] ")[0].removeprefix("[") for line in shown}
    return Counter(f"[{pod}] {line}" for pod in pods for line in cluster.kubelets.written(pod))


def _pod(cluster: Cluster, hostname: str) -> JsonObject:
    pods = cluster.store.every("Pod")
    return next(
        pod for pod in pods if pod["spec"]["hostname"] == hostname and pod["status"]["phase"] == "Running"
    )


def _ready(cluster: Cluster) -> set[str]:
    """Return the host names of pods that are ready."""
    return {
        pod["spec"]["hostname"]
        for pod in cluster.store.every("Pod")
        if all(status["ready"] for status in pod["status"].get("containerStatuses") or [{"ready": False}])
    }


def _events(folder: Path) -> list[events.Event]:
    file = folder / "journal.jsonl"
    return list(journal.read(file).events) if file.exists() else []


def _views(folder: Path, hosts: set[str]) -> list[events.ViewChanged]:
    """Views with workers of both pods."""
    found = [event for event in _events(folder) if isinstance(event, events.ViewChanged)]
    return [view for view in found if set(view.hosts) == hosts]


def _starts(folder: Path) -> list[events.Event]:
    return [event for event in _events(folder) if isinstance(event, events.RunStarted | events.RunResumed)]


def _last_step(folder: Path) -> int:
    return max((e.step for e in _events(folder) if isinstance(e, events.StepCommitted)), default=0)
