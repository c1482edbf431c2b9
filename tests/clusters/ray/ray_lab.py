"""A real Ray cluster of three nodes, as the contract of engines breaks it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import string
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from tests.waiting import wait_for

from paceline.engines.engine import Engine
from paceline.engines.ray.ray_engine import Ray
from paceline.testing.engine_contract import EngineLab
from paceline.testing.ray_cluster import RayCluster, process_file

ROOT = Path(__file__).parents[3]


def why_not() -> str:
    """Return why there can be no such cluster here; empty if there can."""
    return "" if importlib.util.find_spec("ray") else "ray is not installed: make test-engines installs it"


@final
class RayLab(EngineLab):
    """Nodes are called a, b, c, ...; a name is not used twice."""

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster
        self._names = iter(string.ascii_lowercase)

    def engine(self, nodes: int, workers_per_node: int) -> Engine:
        return Ray(address=self.cluster.address, nodes=nodes, workers_per_node=workers_per_node)

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        environment = {**self.cluster.environment, "PACELINE_HOST": "caller", **options.pop("env", {})}
        return subprocess.Popen(command, cwd=ROOT, env=environment, **options)

    def kill_process(self, node: str, pid: int) -> None:
        assert pid in self.cluster.pids(node)
        os.kill(pid, signal.SIGKILL)

    def kill_agent(self, node: str) -> None:
        (agent,) = self.cluster.agents(node)
        os.kill(agent, signal.SIGKILL)

    def lose_node(self, node: str) -> None:
        self.cluster.kill(node)

    def add_node(self) -> None:
        self.cluster.add(next(self._names))

    def left_running(self) -> list[str]:
        """Return what runs for a run. Ray ends the process of a killed actor within a moment."""
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: not self._running(), seconds=10.0)
        return self._running()

    # more

    def run(self, module: str, *arguments: str, seconds: float = 120.0, **environment: str) -> str:
        """Run a program of the tests to its end; return what it printed."""
        command = [sys.executable, "-m", f"tests.clusters.ray.{module}", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.start(command, env=environment, text=True, **pipes) as process:
            try:
                printed, errors = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert process.returncode == 0, printed[-3000:] + errors[-6000:]
        return printed

    def actors(self, node: str) -> list[int]:
        """Return the processes of a node that are Ray's, and have an agent as child."""
        pids = self.cluster.pids(node)
        return [pid for pid in pids if process_file(pid, "cmdline").startswith(b"ray::AgentActor")]

    def client_servers(self) -> list[int]:
        """Return the head's processes that are the drivers of Ray clients: one for each."""
        mark = f"RAY_TMPDIR={self.cluster.environment['RAY_TMPDIR']}".encode()
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        own = [pid for pid in pids if mark in process_file(pid, "environ").split(b"\0")]
        return [pid for pid in own if b"\0--mode=specific-server" in process_file(pid, "cmdline")]

    def have_three_nodes(self) -> None:
        while len(self.cluster.nodes) < 3:
            self.add_node()

    def _running(self) -> list[str]:
        lines = [
            f"{node}: {process_file(pid, 'cmdline').replace(bytes(1), b' ').decode(errors='replace')}"
            for node in (*self.cluster.nodes, "caller")
            for pid in self.cluster.pids(node)
        ]
        return [line for line in lines if "AgentActor" in line or "paceline" in line]
