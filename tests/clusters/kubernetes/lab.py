"""The fake cluster as the contract of engines wants it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, final

from tests.clusters.kubernetes import sandbox
from tests.clusters.kubernetes.cluster import IMAGE, USER, Cluster

import paceline
from paceline.engines.engine import Engine
from paceline.testing.engine_contract import EngineLab

CLAIM = "training"


@final
class KubernetesLab(EngineLab):
    """Nodes of the contract are pods by their host names. `folder` is a volume that all pods mount."""

    def __init__(self, cluster: Cluster, folder: Path, kind: Literal["job", "statefulset"] = "job") -> None:
        self.cluster, self.folder, self._kind = cluster, folder, kind
        os.chown(folder, USER, USER)
        cluster.kubelets.claims[CLAIM] = folder
        self._lost: list[str] = []

    def engine(self, nodes: int, workers_per_node: int) -> Engine:
        return paceline.Kubernetes(
            image=IMAGE,
            kind=self._kind,
            nodes=nodes,
            workers_per_node=workers_per_node,
            volumes={str(self.folder): CLAIM},
            shared_memory="16Mi",
            grace_seconds=20,
        )

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        process = self.cluster.start_as_user(list(command), self.folder, **options)

        def send_signal(number: int) -> None:
            """To the program itself, which is process 1 of a container: `unshare` passes nothing on."""
            if process.poll() is None and (first := sandbox.first_process(process.pid)) is not None:
                os.kill(first, number)

        process.send_signal = send_signal  # type: ignore[method-assign, assignment]
        return process

    def kill_process(self, node: str, pid: int) -> None:
        self.cluster.kill_in_pod(node, pid)

    def kill_agent(self, node: str) -> None:
        self.cluster.kill_in_pod(node, 1)

    def lose_node(self, node: str) -> None:
        self._lost.append(self.cluster.lose_node(node))

    def add_node(self) -> None:
        self.cluster.heal_node(self._lost.pop())

    def left_running(self) -> list[str]:
        return self.cluster.left()
