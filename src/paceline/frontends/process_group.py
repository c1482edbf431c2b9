"""The process group of this process: begin, end, rank, size and backend.

`init_process_group` works under torchrun, mpirun and srun as they are, on top of a group that
torch.distributed already has, and inside `paceline.spawn`. Decides where the group comes from and nothing
else: joining is comm/rendezvous/transport_setup.py's work, talking the context's.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch

from paceline.comm import default_group
from paceline.comm.collectives.arguments import check_timeout, check_world
from paceline.comm.context import DistributedContext
from paceline.comm.rendezvous.environment import BACKENDS, find_launch_info
from paceline.core import log
from paceline.core.errors import UsageError
from paceline.core.time_limits import COLLECTIVE_SECONDS
from paceline.frontends.error_folding import folding_errors

_ENV = "env://"
_TCP = "tcp://"


@folding_errors
def init_process_group(
    backend: str = "auto",
    init_method: str = _ENV,
    world_size: int | None = None,
    rank: int | None = None,
    *,
    timeout: float | timedelta = COLLECTIVE_SECONDS,
) -> DistributedContext:
    """Join this process to a group of ranks, which the plain functions and DistributedDataParallel then use.

    backend      "auto" takes shared memory on one host and Gloo (NCCL for GPUs) between hosts
    init_method  "env://": what torchrun, mpirun, srun or spawn set, or the group that torch.distributed has;
                 "tcp://host:port": rank 0 waits there for the others
    world_size, rank   default: the launcher's
    timeout      seconds, or a timedelta, that a communication may wait for other ranks; inside spawn its own
                 comm_timeout counts

    Returns the group's context. A group of torch.distributed that existed before stays torch's own.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    _check(backend, init_method, world_size, rank, seconds)
    if default_group.is_explicit():
        raise UsageError(
            f"init_process_group: this process already has a group, {default_group.current()!r}",
            remedy="call destroy_process_group() first; a second group is made with DistributedContext(...)",
        )
    context = _existing(backend, world_size, rank, seconds) if init_method == _ENV else None
    if context is None:
        address = None if init_method == _ENV else init_method.removeprefix(_TCP)
        context = DistributedContext(world_size, rank, address=address, backend=backend, timeout=seconds)
    default_group.install(context)
    log.label_records(context.rank)
    return context


def destroy_process_group() -> None:
    """Leave the group, if there is one. Groups of spawn or torch.distributed stay open."""
    context = uninstall_process_group()
    if context is not None and context is not default_group.offered():
        context.close()


def uninstall_process_group() -> DistributedContext | None:
    """Take back what init_process_group did to this process, and return the group, which stays open."""
    if default_group.is_explicit():
        log.unlabel_records()
    return default_group.clear()


def is_initialized() -> bool:
    """Return whether this process has a default group: after init_process_group, and always inside spawn."""
    return default_group.current() is not None


def get_rank() -> int:
    """Return this process's rank; before a group exists the one that the launcher announces, else 0."""
    context = default_group.current()
    return context.rank if context is not None else find_launch_info(os.environ).rank


def get_world_size() -> int:
    """Return the number of ranks; before a group exists the one that the launcher announces, else 1."""
    context = default_group.current()
    return context.world_size if context is not None else find_launch_info(os.environ).world_size


def get_distributed_info() -> dict[str, Any]:
    """Return what is known of this process's group, also before there is one.

    available (whether ranks can talk at all), backends (those that are here), initialized, backend,
    world_size, rank, local_rank, local_world_size, hosts (names, in order of their first rank),
    ranks_by_host. What is not known before the group exists is None.
    """
    context = default_group.current()
    backends = _backends()
    info: dict[str, Any] = {
        "available": bool(backends),
        "backends": backends,
        "initialized": context is not None,
    }
    if context is None:
        place = find_launch_info(os.environ)
        return info | {
            "backend": None,
            "world_size": place.world_size,
            "rank": place.rank,
            "local_rank": place.local_rank,
            "local_world_size": None if place.world_size > 1 else 1,
            "hosts": [os.uname().nodename],
            "ranks_by_host": None if place.world_size > 1 else [[0]],
        }
    topology = context.transport.topology
    numbers = list(dict.fromkeys(topology.host_of))
    ranks = [topology.ranks_on(number) for number in numbers]
    mine = topology.ranks_on(topology.host_of[context.rank])
    names = topology.names or tuple(f"host {number}" for number in numbers)
    return info | {
        "backend": context.backend,
        "world_size": context.world_size,
        "rank": context.rank,
        "local_rank": mine.index(context.rank),
        "local_world_size": len(mine),
        "hosts": list(names),
        "ranks_by_host": ranks,
    }


def _check(
    backend: object, init_method: object, world_size: int | None, rank: int | None, timeout: float
) -> None:
    if backend not in BACKENDS:
        raise UsageError(
            f"init_process_group: backend={backend!r}",
            remedy=f"backend is one of {', '.join(map(repr, BACKENDS))}",
        )
    if not isinstance(init_method, str) or not (init_method == _ENV or init_method.startswith(_TCP)):
        raise UsageError(
            f"init_process_group: init_method={init_method!r}",
            remedy="use 'env://' (the launcher's variables, or MASTER_ADDR and MASTER_PORT) or 'tcp://host:port'",
        )
    check_world(world_size, rank)
    check_timeout(timeout)


def _existing(
    backend: str, world_size: int | None, rank: int | None, timeout: float
) -> DistributedContext | None:
    """Return the group that this process is already in: its launcher's, or torch's."""
    offered = default_group.offered()
    theirs = _torch_backends()
    if offered is not None and backend in ("auto", offered.backend):
        _check_place("this rank of spawn", offered.world_size, offered.rank, world_size, rank)
        return offered
    if theirs:
        return _over_torch(backend, theirs, world_size, rank, timeout)
    if offered is not None:
        raise UsageError(
            f"init_process_group(backend={backend!r}) inside spawn, whose group runs on {offered.backend!r}",
            remedy="use backend='auto'; for another group pass init_method='tcp://host:port'",
        )
    return None


def _over_torch(
    backend: str, theirs: tuple[str, ...], world_size: int | None, rank: int | None, timeout: float
) -> DistributedContext:
    if backend not in ("auto", *theirs):
        raise UsageError(
            f"init_process_group(backend={backend!r}): torch.distributed has a group on {'/'.join(theirs)}",
            remedy="use backend='auto', or end torch's group with torch.distributed.destroy_process_group()",
        )
    size, number = torch.distributed.get_world_size(), torch.distributed.get_rank()
    _check_place("the group of torch.distributed", size, number, world_size, rank)
    from paceline.comm.rendezvous.transport_setup import over_process_group  # only this way in needs it

    transport, links = over_process_group(timeout=timeout)
    return DistributedContext.from_transport(transport, timeout=timeout, links=links)


def _check_place(what: str, size: int, number: int, world_size: int | None, rank: int | None) -> None:
    if world_size not in (None, size) or rank not in (None, number):
        raise UsageError(
            f"init_process_group(world_size={world_size}, rank={rank}): {what} is rank {number} of {size}",
            remedy="leave world_size and rank out",
        )


def _torch_backends() -> tuple[str, ...]:
    """Return the backends of torch's default group, one per kind of device; empty without such a group."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ()
    config = torch.distributed.get_backend_config()  # "cpu:gloo,cuda:nccl"
    return tuple(dict.fromkeys(part.rpartition(":")[2].lower() for part in config.split(",")))


def _backends() -> list[str]:
    found = ["shm"] if hasattr(os, "memfd_create") else []
    if torch.distributed.is_available():
        names = ("gloo", "nccl", "mpi")
        found += [name for name in names if getattr(torch.distributed, f"is_{name}_available")()]
    return found
