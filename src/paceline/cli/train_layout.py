"""How many workers `paceline train` asks for, from the words that users of other launchers know, and refusal
by name of what one start of a script cannot do. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Final

from paceline.cli.engine_options import EngineOptions
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


def sized(options: EngineOptions, found: PerGpuFile | None, workers: int | None) -> EngineOptions:
    """Return the options of an engine with the size that it has where they give none: that of the ranks of
    this process's mpirun, or what a file with backend = "ray" means to RayTrainer. `found`: such a file;
    `workers`: those of the other options, which win over it."""
    if (options.nodes, options.workers_per_node) != (None, None):
        return options
    if options.engine == "mpi":
        return dataclasses.replace(options, nodes=launched_ranks())
    if options.engine != "ray" or found is None:
        return options
    config = found.config
    in_file = config.num_gpus or config.num_nodes * (config.gpus_per_node or 1)
    has_gpus = config.communication_backend == "nccl" or visible_gpus() > 0
    return dataclasses.replace(
        options,
        nodes=workers or in_file,
        gpus_per_node=int(has_gpus) if options.gpus_per_node is None else options.gpus_per_node,
        settings=["share_nodes=true", *options.settings],
    )


def launched_ranks() -> int | None:
    """Return how many ranks this process's mpirun has started, each of which is a node with one worker; None
    outside of one."""
    if "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return None
    from paceline.frontends import mpi_calls

    ranks = mpi_calls.current()
    return None if ranks is None else ranks.place.world_size


def settings_of_file(
    found: PerGpuFile | None,
    asked: tuple[int | None, int | None, int | None, int | None],
    address: str | None,
    backend: str | None,
) -> tuple[int | None, dict[str, Any], tuple[str, ...]]:
    """Return what a file of DistributedConfig asks for: the workers, the settings of TrainConfig, and the
    assignments for PyTorchDDPTrainer. `asked`: workers, GPUs, nodes and GPUs per node of the options, which
    win, as the ranks of an mpirun do."""
    if found is None:
        return number_of_workers(*asked, address, backend), {}, ()
    workers, num_gpus, num_nodes, each = asked
    if backend is None:  # Ray is an engine by now, or another engine was chosen in its place
        backend = "pytorch-ddp" if found.config.backend == "ray" else found.config.backend
    texts = tuple(
        f"{PER_GPU}{text}"
        for text in found.texts
        if backend == found.config.backend or not text.startswith("backend=")
    )
    if (workers, num_gpus, each) == (None, None, None):
        workers = None if backend in FRAMEWORKS else launched_ranks()
    if (workers, num_gpus, each) == (None, None, None):
        num_gpus, each = found.config.num_gpus, found.config.gpus_per_node
        num_nodes = found.config.num_nodes if num_nodes is None else num_nodes
    number = number_of_workers(workers, num_gpus, num_nodes, each, address, backend)
    if backend in FRAMEWORKS:  # whose trainers read the file's settings as they are
        return number, {}, texts
    settings = found.global_settings(number)
    if sentence := found.arithmetic(settings):
        announce(sentence)
    return number, settings, texts


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
