"""Groups of other devices beside the CPU's: `init_process_group("cpu:paceline,cuda:nccl")`.

torch takes a process group written in Python for all devices and makes no other backend beside it. So the
group makes them itself: a process group of torch's own, with the backend that the user named for the device,
when the first tensor of that device comes."""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from paceline.core.errors import UsageError


class NoBackendError(UsageError, RuntimeError):
    """The group has no backend for a device; torch tells this by a RuntimeError."""


def config_of(group: Any) -> str | None:
    """Return a group's map of devices to backends; None until torch has registered the group."""
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    config = c10d._world.pg_backend_config.get(group)
    return None if config is None else str(config)


@final
class OtherDevices:
    """The process groups of devices other than the CPU, for one group of ranks."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._timeout = timeout
        self._groups: dict[str, Any] = {}

    def group_for(self, device: torch.device, config: str) -> Any:
        """Return the process group for tensors on a device, by the group's map of devices to backends."""
        group = self._groups.get(device.type)
        if group is None:
            group = self._groups[device.type] = self._make(device, config)
        return group

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        for group in self._groups.values():
            group.set_timeout(timeout)

    def abort(self) -> None:
        for group in self._groups.values():
            group.abort()

    def shutdown(self) -> None:
        for group in self._groups.values():
            group.shutdown()
        self._groups.clear()

    def _make(self, device: torch.device, config: str) -> Any:
        backends = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
        name = backends.get(device.type, "")
        if not name or name == "paceline":
            raise NoBackendError(
                f"a tensor on {device} in a group of the backend 'paceline', which moves CPU tensors",
                remedy=f"name a backend for the device, as in 'cpu:paceline,{device.type}:nccl', or move the "
                "tensor to the CPU",
            )
        store = PrefixStore(f"paceline/{device.type}/", self._store)
        group = ProcessGroup(store, self._rank, self._world_size)
        backend, kind = self._backend(name, store)
        group._set_default_backend(kind)
        group._register_backend(torch.device(device.type), kind, backend)
        return group

    def _backend(self, name: str, store: Store) -> tuple[Any, Any]:
        kinds = ProcessGroup.BackendType
        c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
        if name == "nccl":
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return c10d.ProcessGroupNCCL(store, self._rank, self._world_size, options), kinds.NCCL
        if name == "gloo":
            gloo = c10d.ProcessGroupGloo(store, self._rank, self._world_size, timeout=self._timeout)
            return gloo, kinds.GLOO
        plugin = dist.Backend._plugins.get(name.upper())
        if plugin is None:
            raise UsageError(
                f"the backend {name!r} is not known to torch.distributed", remedy="use nccl or gloo"
            )
        if not plugin.extended_api:
            return plugin.creator_fn(store, self._rank, self._world_size, self._timeout), kinds.CUSTOM
        options = c10d._DistributedBackendOptions()
        options.store, options.timeout = store, self._timeout
        options.group_rank, options.group_size = self._rank, self._world_size
        return plugin.creator_fn(options, None), kinds.CUSTOM
