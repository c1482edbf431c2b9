"""What `paceline run` starts: how many ranks on how many nodes, where they meet, and how often they may be
started again. Checked when it is made; the counts of "gpu", "cpu" and "auto" are looked up then, too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, final

from paceline.comm.rendezvous.environment import BACKENDS, LOCAL_HOST
from paceline.core.available_resources import cores
from paceline.core.errors import ConfigError, UnavailableError
from paceline.train.settings.keyword_hints import explained

MASTER_PORT: Final = 29500
"""Where the launchers of several nodes meet by default, as torchrun's do."""

_GPUS = Path("/proc/driver/nvidia/gpus")


# Answers to names of other launchers.
_OTHER_NAMES = {
    **dict.fromkeys(("workers", "num_workers", "np"), "use nproc_per_node=..., the ranks of this node"),
    **dict.fromkeys(("num_nodes", "num_machines", "nodes"), "use nnodes=..."),
    **dict.fromkeys(("machine_rank", "rank"), "use node_rank=..., the number of this node"),
    **dict.fromkeys(("main_process_ip", "address", "host", "rdzv_endpoint"), "use master_addr=..."),
    **dict.fromkeys(("main_process_port", "port"), "use master_port=..."),
    "rdzv_backend": "leave it out: nodes meet at master_addr and master_port",
    "rdzv_id": "use run_id=...",
    "timeout": "use start_timeout=... or shutdown_timeout=...",
    **dict.fromkeys(
        ("lr", "learning_rate", "global_batch", "epochs", "max_steps"),
        'training is the script\'s: launcher.launch("train.py", "--lr", "0.1") passes arguments to it',
    ),
}


@explained(hints=_OTHER_NAMES)
@final
@dataclass(frozen=True)
class LaunchConfig:
    """One job of ranks, as one of its nodes starts it.

    nproc_per_node    ranks on this node: a number, "gpu", "cpu" or "auto" (GPUs, else cores)
    nnodes, node_rank  how many nodes there are, and which one this is, from 0
    master_addr       the host of node 0; of several nodes, each gives the same
    master_port       several nodes: where their launchers meet. One node: where its ranks do; None: a free
                      port, another one for every start
    backend           of groups of Paceline that ask for none: auto, gloo, nccl, mpi or shm
    max_restarts      how often all ranks are started again after one has failed
    monitor_interval  seconds between two signs of life of the nodes; ranks of this node are noticed at once
    start_timeout     seconds until all nodes must have come
    shutdown_timeout  seconds that ranks have to end after a signal
    run_id, role      for TORCHELASTIC_RUN_ID and ROLE_NAME
    shown_ranks       the ranks of this node, from 0, whose output is shown; empty: all
    """

    nproc_per_node: int | str = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = LOCAL_HOST
    master_port: int | None = None
    backend: str = "auto"
    max_restarts: int = 3
    monitor_interval: float = 1.0
    start_timeout: float = 600.0
    shutdown_timeout: float = 30.0
    run_id: str = "none"
    role: str = "default"
    shown_ranks: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        self._check_whole("nnodes", self.nnodes, 1)
        self._check_whole("node_rank", self.node_rank, 0)
        self._check_whole("max_restarts", self.max_restarts, 0)
        for name in ("monitor_interval", "start_timeout", "shutdown_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(
                    f"{name}={value!r}", remedy=f"{name} is a number of seconds above 0", key=name
                )
        if not isinstance(self.nproc_per_node, str):
            self._check_whole("nproc_per_node", self.nproc_per_node, 1)
        elif self.nproc_per_node not in ("gpu", "cpu", "auto"):
            raise ConfigError(
                f"nproc_per_node={self.nproc_per_node!r}",
                remedy='it is a number of ranks, "gpu", "cpu" or "auto"',
                key="nproc_per_node",
            )
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"node_rank={self.node_rank} with nnodes={self.nnodes}: nodes go from 0 to {self.nnodes - 1}",
                remedy="give every node its own number, from 0",
                key="node_rank",
            )
        self._check_place()

    def _check_place(self) -> None:
        port = self.master_port
        if port is not None and (type(port) is not int or not 0 < port < 65536):
            raise ConfigError(
                f"master_port={port!r}", remedy="master_port is a number from 1 to 65535", key="master_port"
            )
        if not isinstance(self.master_addr, str) or not self.master_addr.strip():
            raise ConfigError(
                f"master_addr={self.master_addr!r}", remedy="give the host of node 0", key="master_addr"
            )
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"backend={self.backend!r}", remedy=f"backend is one of {', '.join(BACKENDS)}", key="backend"
            )

    @staticmethod
    def _check_whole(name: str, value: object, least: int) -> None:
        if type(value) is not int or value < least:
            raise ConfigError(f"{name}={value!r}", remedy=f"{name} is a whole number from {least}", key=name)

    def counted(self, environment: Mapping[str, str] = os.environ) -> LaunchConfig:
        """Return the config with a number of ranks."""
        if not isinstance(self.nproc_per_node, str):
            return self
        gpus = count_gpus(environment)
        if self.nproc_per_node == "gpu" and not gpus:
            raise UnavailableError(
                "nproc_per_node=gpu, and this machine shows no GPU",
                remedy="give a number of ranks, or see `nvidia-smi` and CUDA_VISIBLE_DEVICES",
            )
        number = cores() if self.nproc_per_node == "cpu" else gpus or cores()
        return replace(self, nproc_per_node=number)

    @property
    def ranks_here(self) -> int:
        """The number of ranks of this node, after `counted`."""
        assert isinstance(self.nproc_per_node, int)
        return self.nproc_per_node


def count_gpus(environment: Mapping[str, str], folder: Path = _GPUS) -> int:
    """Return how many GPUs ranks would see; without importing torch."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    present = len(list(folder.iterdir())) if folder.is_dir() else 0
    if visible is None or not present:
        return present
    # Devices behind one that does not exist are not seen.
    names = [name.strip() for name in visible.split(",")]
    seen = 0
    for name in names:
        if not name or (name.lstrip("-").isdecimal() and not 0 <= int(name) < present):
            break
        seen += 1
    return seen
