"""The contract of engines on a SLURM cluster: how its nodes are broken."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import paceline
from paceline.testing.engine_contract import EngineLab
from paceline.testing.slurm_cluster import SlurmCluster

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
_DAEMONS = ("slurmd", "slurmctld", "munged")


class SlurmLab(EngineLab):
    """A cluster in which each agent is a job of its own. `usable`: the nodes that agents may be on; None: all
    of them, of which runs leave some unused."""

    def __init__(self, cluster: SlurmCluster, folder: Path, usable: int | None = None) -> None:
        self.cluster, self.folder = cluster, folder
        self.has_spare_node = usable is None
        excluded = [f"n{number + 1}" for number in range(usable or cluster.nodes, cluster.nodes)]
        self._options = {"exclude": ",".join(excluded)} if excluded else {}
        self._lost: list[int] = []

    def engine(self, nodes: int, workers_per_node: int) -> paceline.Slurm:
        return paceline.Slurm(
            nodes=nodes, workers_per_node=workers_per_node, folder=str(self.folder), poll_seconds=0.25,
            options=self._options,
        )  # fmt: skip

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        return self.cluster.start(command, env=ENVIRONMENT, cwd=self.folder, **options)

    def kill_process(self, node: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def kill_agent(self, node: str) -> None:
        (agent,) = [pid for pid in self.pids(node) if _is_agent(pid)]
        os.kill(agent, signal.SIGKILL)

    def lose_node(self, node: str) -> None:
        self._lost.append(int(node[1:]))
        self.cluster.kill_node(int(node[1:]))

    def add_node(self) -> None:
        self.cluster.start_slurmd(self._lost.pop())

    def pids(self, node: str) -> list[int]:
        return self.cluster.pids(int(node[1:]))

    def left_running(self) -> list[str]:
        with suppress(paceline.PlatformError):
            self.cluster.wait_until_empty(10)
        queue = self.cluster.run(["squeue", "--noheader"]).splitlines()
        nodes = range(1, self.cluster.nodes + 1)
        processes = [_command(pid) for node in nodes for pid in self.cluster.pids(node)]
        return [*queue, *(text for text in processes if text and not any(name in text for name in _DAEMONS))]

    def left_files(self) -> list[Path]:
        """The folders with tokens and logs that runs left behind."""
        return list(self.folder.rglob(".paceline-slurm"))


def _is_agent(pid: int) -> bool:
    words = _command(pid).split()
    return words[1:4] == ["-m", "paceline", "join"]


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""


class AllocationLab(SlurmLab):
    """An allocation of all nodes, in which each agent is a step."""

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        allocate = ["salloc", "--quiet", "--nodes=4", "--exclusive", "--no-kill"]
        return super().start([*allocate, *command], **options)

    def add_node(self) -> None:
        """Nothing: the allocation has nodes without an agent."""
