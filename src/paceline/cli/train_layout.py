"""How many workers `paceline train` asks for, from the words that users of other launchers know, and refusal
by name of what one start of a script cannot do. Imports no torch."""

from __future__ import annotations

import os
from typing import Any, Final

from paceline.core.available_resources import visible_gpus
from paceline.core.errors import UsageError
from paceline.frontends.announcements import announce
from paceline.frontends.ddp_trainer.config_file import PerGpuFile
from paceline.frontends.ddp_trainer.distributed_config import DistributedConfig, check_backend
from paceline.frontends.ddp_trainer.settings_in_words import devices
from paceline.frontends.overrides import PER_GPU

_ELSEWHERE: Final = (
    "start it on one machine and let others help with `paceline join HOST:PORT --token-file control.secret`, "
    "or start one process per rank on every machine with `paceline run --nnodes {nodes} --node-rank N "
    "--master-addr HOST`"
)
_TRANSPORTS: Final = ("nccl", "gloo", "mpi")
FRAMEWORKS: Final = ("horovod", "tensorflow")
"""Backends that start their workers by themselves, or by their own launcher."""


def number_of_workers(
    workers: int | None,
    num_gpus: int | None,
    num_nodes: int | None,
    gpus_per_node: int | None,
    address: str | None,
    backend: str | None,
) -> int | None:
    """Return the number of workers that the options ask for; None: the script decides. Options that
    contradict each other, or that need processes on other machines, are refused."""
    _check_engine(backend)
    asked = DistributedConfig(num_gpus=num_gpus, num_nodes=num_nodes or 1, gpus_per_node=gpus_per_node)
    if num_nodes == 0:
        raise UsageError(
            "--num-nodes 0: nothing can train there", remedy="give --num-nodes 1, or leave it out"
        )
    if asked.num_nodes > 1 or address is not None:
        what = f"--address {address}" if asked.num_nodes == 1 else f"--num-nodes {asked.num_nodes}"
        raise UsageError(
            f"{what}: `paceline train` starts the script once, on this machine",
            remedy=_engine_for(address, asked.num_nodes) + _ELSEWHERE.format(nodes=max(2, asked.num_nodes)),
        )
    gpus = num_gpus if num_gpus is not None else gpus_per_node
    if workers is not None and gpus is not None and workers != gpus:
        raise UsageError(
            f"--workers {workers} and --num-gpus {gpus}: each GPU has one worker",
            remedy="give one of them, or equal numbers",
        )
    if gpus is not None and (sentence := devices(gpus, visible_gpus())):
        announce(sentence)
    return gpus if workers is None else workers


def _engine_for(address: str | None, nodes: int) -> str:
    """Return how an engine would start the workers on other machines."""
    if address is not None and address.startswith("ray://"):
        return "add --engine ray; or "
    return f"add --engine with --nodes {max(2, nodes)} where a cluster has them; or "


def settings_of_file(
    path: str,
    asked: tuple[int | None, int | None, int | None, int | None],
    address: str | None,
    backend: str | None,
) -> tuple[int | None, dict[str, Any], tuple[str, ...]]:
    """Return what a file of DistributedConfig asks for: the workers, the settings of TrainConfig, and the
    assignments for PyTorchDDPTrainer. `asked`: workers, GPUs, nodes and GPUs per node of the options, which
    win."""
    found = PerGpuFile.read(path)
    if found is None:
        return number_of_workers(*asked, address, backend), {}, ()
    workers, num_gpus, num_nodes, each = asked
    if (workers, num_gpus, each) == (None, None, None):
        num_gpus, each = found.config.num_gpus, found.config.gpus_per_node
        num_nodes = found.config.num_nodes if num_nodes is None else num_nodes
    backend = backend or found.config.backend
    number = number_of_workers(workers, num_gpus, num_nodes, each, address, backend)
    if backend in FRAMEWORKS:  # whose trainers read the file's settings as they are
        return number, {}, tuple(f"{PER_GPU}{text}" for text in found.texts)
    settings = found.global_settings(number)
    if sentence := found.arithmetic(settings):
        announce(sentence)
    return number, settings, tuple(f"{PER_GPU}{text}" for text in found.texts)


def _check_engine(backend: str | None) -> None:
    if backend in _TRANSPORTS:
        raise UsageError(
            f"--backend {backend}: how gradients travel is chosen for you, and does not change the result",
            remedy="leave --backend out; `paceline run --backend` is for scripts that make their own "
            "process group",
        )
    if backend is not None:
        check_backend(backend)
    if backend == "horovod" and "HOROVOD_RANK" not in os.environ:
        announce("--backend horovod without horovodrun: one rank trains; horovodrun -np N --gloo starts N")


def backend_settings(backend: str | None) -> tuple[str, ...]:
    """Return the assignment by which scripts that leave the choice to DistributedConfig get the trainer of a
    framework."""
    return (f"{PER_GPU}backend={backend}",) if backend in FRAMEWORKS else ()
