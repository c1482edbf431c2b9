"""How the contract reaches into a cluster: start the caller of a run, and break nodes."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from paceline.engines.engine import Engine


class EngineLab(ABC):
    """A cluster of at least three nodes. Names of nodes are the host names in the run's journal, i.e.
    PACELINE_HOST of the agents or the node's own name."""

    has_spare_node = True
    """Whether the cluster has a node that `check_faults` leaves unused: it then replaces the lost node at
    once. Where there is none, the run stays smaller until `add_node`."""

    @abstractmethod
    def engine(self, nodes: int, workers_per_node: int) -> Engine:
        """Return the engine's settings; they are pickled for the caller's process."""

    @abstractmethod
    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start the process that calls `fit`, where a user of this engine would."""

    @abstractmethod
    def kill_process(self, node: str, pid: int) -> None:
        """SIGKILL a worker of a node; `pid` is as the worker itself knows it."""

    @abstractmethod
    def kill_agent(self, node: str) -> None:
        """SIGKILL the agent of a node (`paceline join`), not the engine's own process."""

    @abstractmethod
    def lose_node(self, node: str) -> None:
        """Have a node vanish with all that runs on it."""

    @abstractmethod
    def add_node(self) -> None:
        """Have the cluster offer one more node than it has now: another, or the lost one again."""

    @abstractmethod
    def left_running(self) -> list[str]:
        """Return what still runs on the nodes for a run: agents, workers, jobs of the engine."""
