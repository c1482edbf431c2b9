"""A real Ray cluster on this machine: a head without CPUs, and nodes called a, b, c, ... with a raylet each.

PACELINE_HOST tells the nodes apart: each raylet hands its own to what it starts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import string
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

from tests.waiting import wait_for

from paceline.engines.ray.settings import Ray

ROOT = Path(__file__).parents[3]
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
}


def why_not() -> str:
    """Return why there can be no such cluster here; empty if there can."""
    return "" if importlib.util.find_spec("ray") else "ray is not installed: make test-engines installs it"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@final
class RayLab:
    """The cluster, as the contract of engines breaks it."""

    def __init__(self, folder: Path, *, with_head_services: bool = True) -> None:
        # A path of a socket may have 107 bytes: Ray's are long below its own folder.
        self.environment = {**os.environ, **_QUIET, "RAY_TMPDIR": str(folder)}
        self.client_port, self.dashboard_port = (free_port() if with_head_services else 0 for _ in range(2))
        program = [sys.executable, "-m", "tests.clusters.ray.cluster_process"]
        with (folder / "cluster.log").open("w") as log:
            self._process = subprocess.Popen(
                [*program, str(self.client_port), str(self.dashboard_port)],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.address = self._answer("head")
        self.nodes: list[str] = []
        self._names = iter(string.ascii_lowercase)

    @property
    def client_address(self) -> str:
        return f"ray://127.0.0.1:{self.client_port}"

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    # as EngineLab has it

    def engine(self, nodes: int, workers_per_node: int) -> Ray:
        return Ray(address=self.address, nodes=nodes, workers_per_node=workers_per_node)

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        environment = {**self.environment, "PACELINE_HOST": "caller", **options.pop("env", {})}
        return subprocess.Popen(command, cwd=ROOT, env=environment, **options)

    def kill_process(self, node: str, pid: int) -> None:
        assert pid in self.pids(node)
        os.kill(pid, signal.SIGKILL)

    def kill_agent(self, node: str) -> None:
        (agent,) = self.agents(node)
        os.kill(agent, signal.SIGKILL)

    def lose_node(self, node: str) -> None:
        """Kill the raylet and all that it started, at once."""
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes.remove(node)
        self._ask("remove", node)

    def add_node(self) -> str:
        name = next(self._names)
        self._ask("add", name)
        self.nodes.append(name)
        return name

    def left_running(self) -> list[str]:
        """Return what runs on nodes for a run. Ray ends a killed actor's process within a moment."""
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: not self._running(), seconds=10.0)
        return self._running()

    # more

    def agents(self, node: str) -> list[int]:
        return [pid for pid in self.pids(node) if b"\0join\0" in _read(pid, "cmdline")]

    def actors(self, node: str) -> list[int]:
        return [pid for pid in self.pids(node) if _read(pid, "cmdline").startswith(b"ray::AgentActor")]

    def pids(self, node: str) -> list[int]:
        """Return the processes of a node."""
        mark = f"PACELINE_HOST={node}".encode()
        found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [pid for pid in found if mark in _read(pid, "environ").split(b"\0")]

    def full_nodes(self) -> None:
        """Have three nodes, whatever tests before did."""
        while len(self.nodes) < 3:
            self.add_node()

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _ask(self, command: str, name: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command} {name}\n")
        self._process.stdin.flush()
        assert self._answer("done") == name

    def _answer(self, word: str) -> str:
        """Return what follows the word in the program's answer; Ray prints other lines too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(f"{word} "):
                return line.split()[1]
        raise AssertionError("the cluster's process has ended")

    def _running(self) -> list[str]:
        lines = [
            f"{node}: {_read(pid, 'cmdline').replace(bytes(1), b' ').decode(errors='replace')}"
            for node in (*self.nodes, "caller")
            for pid in self.pids(node)
        ]
        return [line for line in lines if "AgentActor" in line or "paceline" in line]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def ray_lab(folder: Path) -> Iterator[RayLab]:
    lab = RayLab(folder)
    try:
        yield lab
    finally:
        lab.close()
