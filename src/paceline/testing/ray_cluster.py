"""A real Ray cluster on this machine: a head without CPUs, and nodes with a raylet each. For tests and
benchmarks; needs Ray.

    with RayCluster(folder) as cluster:
        cluster.add("a"), cluster.add("b")
        ... Ray(address=cluster.address)
        cluster.kill("b")

PACELINE_HOST tells the nodes apart, which share a kernel: each raylet hands its own to what it starts. Ray
leaves files open and warns about it, so the cluster lives in a process of its own:

    python -m paceline.testing.ray_cluster CLIENT_PORT DASHBOARD_PORT CPUS
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, final

from paceline.frontends.launcher.master_port import free_port

_END_SECONDS: Final = 60.0
_QUIET: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Ray writes a token for local clusters into the home folder, and then takes it for this cluster's own.
    "RAY_AUTH_MODE": "disabled",
}


@final
class RayCluster:
    """A cluster; `environment` is that of its processes and of those that use it. `folder` must have a short
    path: Ray's sockets lie below it, and a socket's path has 107 bytes at most."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        *,
        with_services: bool = True,
        cpus: int = 4,
    ) -> None:
        self._folder = str(folder)
        self.environment = {**os.environ, **(environment or {}), **_QUIET, "RAY_TMPDIR": str(folder)}
        # Of the Ray client's server and of the dashboard, which takes jobs; 0: there is none.
        self.client_port, self.dashboard_port = (free_port() if with_services else 0 for _ in range(2))
        program = [sys.executable, "-m", "paceline.testing.ray_cluster"]
        with (folder / "cluster.log").open("w") as log:
            self._process = subprocess.Popen(
                [*program, str(self.client_port), str(self.dashboard_port), str(cpus)],
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.nodes: list[str] = []
        try:
            self.address = self._answer("head")
        except BaseException:
            self.close()
            raise

    @property
    def client_address(self) -> str:
        return f"ray://127.0.0.1:{self.client_port}"

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    def add(self, node: str) -> None:
        """Add a node, and wait until Ray has it."""
        self._ask("add", node)
        self.nodes.append(node)

    def kill(self, node: str) -> None:
        """Kill a node's raylet and all that runs on the node, at once."""
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes.remove(node)
        self._ask("remove", node)

    def pids(self, node: str) -> list[int]:
        """Return the processes of a node of this cluster; other clusters have nodes of that name too."""
        marks = {f"PACELINE_HOST={node}".encode(), f"RAY_TMPDIR={self._folder}".encode()}
        found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [pid for pid in found if marks <= {*process_file(pid, "environ").split(b"\0")}]

    def agents(self, node: str) -> list[int]:
        """Return the processes of a node that are agents (`paceline join`)."""
        return [pid for pid in self.pids(node) if b"\0join\0" in process_file(pid, "cmdline")]

    def close(self) -> None:
        """End the cluster."""
        self._process.communicate(timeout=_END_SECONDS)

    def _ask(self, command: str, node: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command} {node}\n")
        self._process.stdin.flush()
        assert self._answer("done") == node

    def _answer(self, word: str) -> str:
        """Return what follows the word in the program's answer; Ray prints other lines too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(f"{word} "):
                return line.split()[1]
        raise RuntimeError("the process of the Ray cluster has ended: see cluster.log in its folder")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def process_file(pid: int, name: str) -> bytes:
    """Return a file of a process below /proc; empty where the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def main(client_port: str, dashboard_port: str, cpus: str) -> None:
    """Run a cluster; lines `add NODE` and `remove NODE` come from the input, and its end ends the cluster."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": dashboard_port != "0",
            "dashboard_port": int(dashboard_port) or None,
            "ray_client_server_port": int(client_port) or None,
            # The default is one port, which nodes of one machine would dispute; jobs go through the head's.
            "dashboard_agent_listen_port": free_port(),
        },
    )
    print(f"head {cluster.address}", flush=True)
    nodes: dict[str, Any] = {}
    try:
        for line in sys.stdin:
            command, name = line.split()
            if command == "add":
                nodes[name] = cluster.add_node(
                    num_cpus=int(cpus),
                    dashboard_agent_listen_port=free_port(),
                    env_vars={"PACELINE_HOST": name},
                )
            else:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            print(f"done {name}", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
